import json

import pytest

from longtrain.data.chat.prompts import Answers, respond
from longtrain.errors import DataError
from longtrain.journals import with_checksum

PROMPTS = [[1, 2, 3], [4], [5, 6], [1, 2, 3], [7, 8, 9, 10]]


def double(prompts):
    return [[2 * token for token in prompt] for prompt in prompts]


def test_answers_come_in_order_and_once_each(tmp_path):
    asked = []

    def generate(prompts):
        asked.extend(prompts)
        return double(prompts)

    answers = Answers(tmp_path / "a.jsonl", {})
    assert list(respond(PROMPTS, generate, answers, batch=2)) == double(PROMPTS)
    assert asked == [[7, 8, 9, 10], [1, 2, 3], [5, 6], [4]]
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 4


def test_a_run_that_was_stopped_goes_on(tmp_path):
    calls = []

    def stops(prompts):
        if calls:
            raise KeyboardInterrupt
        calls.append(prompts)
        return double(prompts)

    path = tmp_path / "a.jsonl"
    with pytest.raises(KeyboardInterrupt):
        list(respond(PROMPTS, stops, Answers(path, {}), batch=2))
    asked = []
    wanted = list(respond(PROMPTS, lambda p: asked.extend(p) or double(p), Answers(path, {}), batch=2))
    assert wanted == double(PROMPTS) and asked == [[5, 6], [4]]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_last_line_cut_short_is_dropped_and_written_again(tmp_path, cut):
    path = tmp_path / "a.jsonl"
    list(respond(PROMPTS, double, Answers(path, {}), batch=2))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    answers = Answers(path, {})
    assert len(answers.done) == 3 and path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:3])
    assert list(respond(PROMPTS, double, answers)) == double(PROMPTS)
    assert path.read_bytes() == whole


def test_damage_elsewhere_is_told_with_its_line(tmp_path):
    path = tmp_path / "a.jsonl"
    list(respond(PROMPTS, double, Answers(path, {})))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "garbage", *lines[2:]]) + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl line 2 cannot be read"):
        Answers(path, {})


@pytest.mark.parametrize("token", [1.9, -1, 2**40, 1e30, True, "7", None])
def test_a_token_that_is_none_is_refused_whatever_the_checksum(tmp_path, token):
    path = tmp_path / "a.jsonl"
    path.write_bytes(with_checksum({"key": "0" * 64, "ids": [1, token]}))
    with pytest.raises(DataError, match=r"a\.jsonl line 1 is damaged \(ids\.1: .*; delete that line"):
        Answers(path, {})


def test_an_edited_answer_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    list(respond(PROMPTS, double, Answers(path, {})))
    first = json.loads(path.read_text().splitlines()[0])["ids"]
    path.write_text(path.read_text().replace(f'"ids": {first}', f'"ids": {[*first, 5]}', 1))
    with pytest.raises(DataError, match=r"a\.jsonl line 1 cannot be read: it does not match its checksum"):
        Answers(path, {})


def test_other_settings_are_other_answers(tmp_path):
    path = tmp_path / "a.jsonl"
    list(respond(PROMPTS, double, Answers(path, {"temperature": 0})))
    asked = []
    list(respond(PROMPTS, lambda p: asked.extend(p) or double(p), Answers(path, {"temperature": 1})))
    assert len(asked) == 4


def test_the_file_is_plain_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    answers = Answers(path, {})
    list(respond([[1]], double, answers))
    line = json.loads(path.read_text())
    assert line == {"key": answers.key([1]), "ids": [2], "sha256": line["sha256"]}

"""The needle grid: every prompt of its length, the value at its depth, and a target that finds it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from longtrain.data.retrieval.wording import PRETRAIN
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.harness.protocol import protocol_of
from longtrain.evaluation.suites import needle

SMALL = {"lengths": [512, "1k"], "depths": [0, 30, 100], "needles": [1, 4], "prompts": 3}


def built(target, settings_of, *, seed=0, sampling=Sampling(), **changed):  # noqa: B008 (frozen)
    return needle.build(settings_of("needle", **{**SMALL, **changed}), target, seed=seed, sampling=sampling)


@pytest.fixture(scope="module")
def suite(tiny, settings_of):
    return built(tiny, settings_of)


def text_of(task, example, target) -> str:
    return target.tokenizer.decode(task.encode(example, target.tokenizer, max_tokens=10**6).ids)


def test_a_cell_for_every_length_depth_and_count(suite) -> None:
    assert [task.name for task in suite.tasks] == ["needles_1", "needles_4"]
    for task in suite.tasks:
        cells = [tuple(task.facets(one).values()) for one in task.examples()]
        assert {cell: cells.count(cell) for cell in cells} == {
            (length, depth): 3 for length in (512, 1024) for depth in (0, 30, 100)
        }


def test_prompts_have_their_length_and_hold_their_answer_once(suite, tiny) -> None:
    for task in suite.tasks:
        for one in task.examples():
            prompt = task.encode(one, tiny.tokenizer, max_tokens=10**6)
            assert len(prompt.ids) == one.fields["length"] == task.size(one) and not prompt.cut
            text = tiny.tokenizer.decode(prompt.ids)
            (value,) = task.references(one)
            key = re.search(r"magic numbers for (\S+) mentioned in", text)[1]
            assert text.count(value) == 1 and f"for {key} is: {value}." in text
            assert len(set(re.findall(r"is: (\d{7})\.", text))) == one.fields["needles"]


@pytest.mark.parametrize("needles", [1, 4])
def test_the_value_asked_for_stands_at_its_depth(tiny, settings_of, needles: int) -> None:
    depths = list(range(0, 101, 10))
    suite = built(tiny, settings_of, lengths=[2048], depths=depths, needles=[needles], prompts=4)
    (task,) = suite.tasks
    found = {depth: [] for depth in depths}
    for one in task.examples():
        text = text_of(task, one, tiny)
        start, end = text.index("\n") + 1, text.rindex("\nWhat are all")
        found[one.fields["depth"]].append((text.index(task.references(one)[0]) - start) / (end - start))
    off = {depth: np.abs(np.array(shares) - depth / 100) for depth, shares in found.items()}
    assert max(some.max() for some in off.values()) < 0.1  # needles stand where a sentence ends
    assert np.mean(list(off.values())) < 0.02


def test_answers_are_right_if_the_value_is_in_them_and_exact_if_no_other_number_is(suite) -> None:
    (task, *_) = suite.tasks
    one = next(task.examples())
    (value,) = task.references(one)
    for text, score, exact in (
        (f"The special magic numbers are {value}.", 1.0, 1.0),
        (f"{value} or {value}", 1.0, 0.0),
        (f"1. {value}\n2. 1234567", 1.0, 0.0),
        (f"0{value}", 1.0, 0.0),  # RULER looks for the string
        (value[:-1], 0.0, 0.0),
        ("", 0.0, 0.0),
    ):
        assert (task.score(text, one), task.measures(text, one)) == (score, {"exact": exact}), text


def test_other_targets_are_asked_as_ruler_asks(tiny, settings_of, monkeypatch) -> None:
    monkeypatch.delitem(tiny.tokenizer.init_kwargs, "retrieval_wording")
    suite = built(tiny, settings_of)
    for task in suite.tasks:
        for one in task.examples():
            text = text_of(task, one, tiny)
            key = re.search(r"What is the special magic number for (\S+) mentioned in", text)[1]
            begun = f"<|assistant|> The special magic number for {key} mentioned in the provided text is"
            assert text.startswith("<|user|>A special magic number is hidden") and text.endswith(begun)
            assert f"for {key} is: {task.references(one)[0]}." in text
    assert "What is the special magic number for KEY" in task.settings()["template"]
    monkeypatch.setattr(tiny.tokenizer, "chat_template", None)
    (task, *_) = built(tiny, settings_of).tasks
    text = text_of(task, one, tiny)
    assert (
        text.startswith("<|endoftext|>A special magic") and "provided text? The special magic number" in text
    )


def test_the_chat_template_can_be_left_out_and_asked_for(tiny, settings_of, monkeypatch) -> None:
    suite = built(tiny, settings_of, chat=False)
    (task, *_) = suite.tasks
    assert "<|user|>" not in text_of(task, next(task.examples()), tiny) and not task.chat
    assert suite.summary({}).notes[0] == "without chat template: suite.chat=false"
    monkeypatch.setattr(tiny.tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match=r"suite\.chat=true and the tokenizer has no chat template"):
        built(tiny, settings_of, chat=True)


def test_the_same_seed_gives_the_same_prompts(suite, tiny, settings_of) -> None:
    again, other = built(tiny, settings_of), built(tiny, settings_of, seed=1)
    for task, same, different in zip(suite.tasks, again.tasks, other.tasks, strict=True):
        rows = list(task.examples())
        assert [task.written(one) for one in rows] == [same.written(one) for one in reversed(rows)][::-1]
        assert all(task.written(one) != different.written(one) for one in rows)
    hashes = [protocol_of(one, tiny, Sampling()).hash for one in (suite, again, other)]
    assert hashes[0] == hashes[1] != hashes[2]
    assert hashes[0] != protocol_of(built(tiny, settings_of, depths=[0]), tiny, Sampling()).hash


def test_other_text_is_another_protocol(suite, tiny, settings_of, tmp_path) -> None:
    file = tmp_path / "sea.txt"
    file.write_text("The sea was calm that day. A boat came in, and the men went home. " * 200)
    other = built(tiny, settings_of, text=str(file), kinds=[])
    assert "sea was calm" in text_of(other.tasks[0], next(other.tasks[0].examples()), tiny)
    hashes = [protocol_of(one, tiny, Sampling()).hash for one in (suite, other)]
    assert hashes[0] != hashes[1]
    with pytest.raises(DataError, match="no held-out text"):
        built(tiny, settings_of, text=str(tmp_path / "nothing"))


def test_the_bundled_target_finds_needles(bundled, settings_of, run_suite) -> None:
    suite = built(bundled, settings_of, lengths=[512], depths=[0, 50, 100], needles=[2], prompts=2)
    records = run_suite(suite, bundled, batch=6)
    summary = suite.summary(records)
    assert summary.title == "Needle grid" and summary.tasks["needles_2"] > 60
    assert summary.notes == ("prompts in the target's chat template", PRETRAIN.about)
    assert [record.prompt_tokens for record in records["needles_2"]] == [512] * 6


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"depths": [101]}, r"suite.depths=\[101\]; allowed: .* from 0 to 100"),
        ({"depths": []}, r"suite.depths=\[\]; allowed: one or more"),
        ({"depths": [5, 5]}, "one or more different percentages"),
        ({"lengths": ["16k"]}, "16384"),
        ({"lengths": ["x"]}, r"suite.lengths=\['x'\]; allowed: .*token counts"),
        ({"lengths": [200], "needles": [8]}, "suite.lengths holds 200 and suite.needles 8: .*too few"),
        ({"needles": [0]}, r"suite.needles=\[0\]; allowed: .*from 1"),
        ({"prompts": True}, "suite.prompts=true"),
        ({"max_new_tokens": None}, "suite.max_new_tokens=null"),
    ],
)
def test_settings_that_cannot_be(tiny, settings_of, changed, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(tiny, settings_of, **changed)

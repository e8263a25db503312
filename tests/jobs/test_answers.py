"""`longtrain answers`: full batches, resumed runs, parts, and data that can be trained on."""

import hashlib
import json
import sys
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest

from longtrain import cli
from longtrain.data.chat.asked import Asking, Unanswered
from longtrain.data.config import DataConfig
from longtrain.data.packing.prepared import Prepared
from longtrain.data.read import encoder
from longtrain.errors import ConfigError, DataError
from longtrain.jobs import answers as job
from longtrain.jobs.answering.batches import AnswerBatches
from longtrain.jobs.answering.files import AnswerFiles
from longtrain.targets.loading import load_target

SETTINGS = {"target": "fake", "seed": 0}
END = 7


def prompts(n=80, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for number in range(n):
        ids_T = rng.integers(10, 99, rng.integers(3, 60)).astype(np.int32)
        key = hashlib.sha256(f"{number}".encode()).hexdigest()
        made.append(Unanswered(str(number), "chat", ({"role": "user", "content": f"q{number}"},), ids_T, key))
    return made


class Fake:
    """Writes tokens that depend on the whole batch, as the rounding of a GPU's results does.

    Answers have `least` to 100 tokens. Call number `stop` is interrupted.
    """

    def __init__(self, stop=None, least=1):
        self.least = least
        self.stop, self.calls, self.sizes, self.tokens = stop, 0, [], []

    def __call__(self, contexts, tokens, sequence_ids):
        if self.calls == self.stop:
            raise KeyboardInterrupt
        self.calls += 1
        self.sizes.append(len(contexts))
        self.tokens.append(len(contexts) * (max(map(len, contexts)) + tokens))
        batch = hashlib.sha256(json.dumps([contexts, sequence_ids]).encode()).digest()
        news, ended = [], []
        for context, one in zip(contexts, sequence_ids, strict=True):
            rng = np.random.default_rng([*batch[:8], one % 2**32, len(context)])
            new = rng.integers(10, 99, tokens).tolist()
            at = int(rng.integers(self.least, 100))
            over = at < tokens
            news.append([*new[:at], END] if over else new)
            ended.append(over)
        return news, ended


def answered(
    folder, write, *, n=80, most=100, batch=8, batch_tokens=10**6, part=(0, 1), stopping=lambda: False
):
    files = AnswerFiles(folder, SETTINGS, part=part)
    made = AnswerBatches(
        files,
        write,
        lambda ids: " ".join(map(str, ids)),
        answer_tokens=most,
        batch=batch,
        batch_tokens=batch_tokens,
    )
    try:
        made.run((one for one in prompts(n) if int(one.key[-8:], 16) % part[1] == part[0]), stopping)
    finally:
        files.close()
    return made


def content(folder):
    return (folder / "rows" / "part-0-of-1.jsonl").read_bytes()


def test_every_prompt_gets_one_answer_with_its_conversation(tmp_path):
    made = answered(tmp_path, Fake())
    rows = [json.loads(line) for line in content(tmp_path).splitlines()]
    assert sorted(row["name"] for row in rows) == sorted(str(n) for n in range(80)) and made.n_answers == 80
    for row in rows:
        asked, answer = row["messages"]
        assert asked == {"role": "user", "content": f"q{row['name']}"} and answer["role"] == "assistant"
        count = len(answer["content"].split())
        assert row["tokens"] == count + (row["finish"] == "stop_id") <= 100
    assert made.n_cut == Counter(row["finish"] for row in rows)["length"]


@pytest.mark.parametrize("stop", range(0, 16, 3))
def test_a_run_that_was_stopped_writes_what_one_that_was_not_writes(tmp_path, stop):
    whole = Fake()
    answered(tmp_path / "whole", whole)
    assert whole.calls > 16
    with pytest.raises(KeyboardInterrupt):
        answered(tmp_path / "cut", Fake(stop))
    rest = Fake()
    answered(tmp_path / "cut", rest)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert rest.calls == whole.calls - stop  # finished turns are not repeated
    assert not list((tmp_path / "cut" / "state").glob("part-*.json"))


def test_a_run_killed_while_it_stored_a_turn_stores_the_rest(tmp_path):
    answered(tmp_path / "whole", Fake())
    with pytest.raises(KeyboardInterrupt):
        answered(tmp_path / "cut", Fake(8))
    state = next((tmp_path / "cut" / "state").glob("part-*.json"))
    before = state.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        answered(tmp_path / "cut", Fake(1))  # one more turn is stored
    state.write_bytes(before)  # but the state of the next turn was not
    path = tmp_path / "cut" / "rows" / "part-0-of-1.jsonl"
    path.write_bytes(path.read_bytes()[:-5])  # and the last line not to its end
    answered(tmp_path / "cut", Fake())
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_a_blank_answer_is_left_out_and_not_asked_for_again(tmp_path):
    def blank(contexts, tokens, sequence_ids):
        return [[END] for _ in contexts], [True for _ in contexts]

    made = answered(tmp_path, blank)
    assert made.n_empty == 80 and not list((tmp_path / "rows").iterdir())
    again = Fake()
    answered(tmp_path, again)
    assert again.calls == 0


def test_a_stop_that_was_asked_for_comes_after_a_turn(tmp_path):
    answered(tmp_path / "whole", Fake())
    asked = iter([False, False, True])
    first = Fake()
    answered(tmp_path / "cut", first, stopping=lambda: next(asked))
    assert first.calls == 2
    answered(tmp_path / "cut", Fake())
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_the_batch_stays_full_until_the_prompts_end(tmp_path):
    write = Fake()
    made = answered(tmp_path, write, n=200, batch=8)
    assert set(write.sizes[:-12]) == {8} and made.n_answers == 200


def test_a_run_that_is_stopped_early_has_answered_short_prompts_too(tmp_path):
    every = prompts(200)
    short = sorted(every, key=lambda asked: len(asked.ids_T))[:100]
    asked = iter([False] * 12 + [True])
    made = answered(tmp_path, Fake(), n=200, stopping=lambda: next(asked))
    names = {json.loads(line)["name"] for line in content(tmp_path).splitlines()}
    assert made.n_answers < 60 and len(names & {one.name for one in short}) > made.n_answers / 4


def test_batches_stay_within_their_tokens(tmp_path):
    write = Fake()
    answered(tmp_path, write, batch=8, batch_tokens=400)
    assert all(n <= 400 or size == 1 for n, size in zip(write.tokens, write.sizes, strict=True))
    assert max(write.sizes) > 1


def test_parts_answer_together_what_one_process_does(tmp_path):
    for number in range(3):
        answered(tmp_path, Fake(), part=(number, 3))
    names = [json.loads(line)["name"] for path in (tmp_path / "rows").iterdir() for line in path.open()]
    assert sorted(names, key=int) == [str(n) for n in range(80)]
    again = Fake()
    answered(tmp_path, again)  # in one part: all is there
    assert again.calls == 0


def test_answers_of_other_settings_are_refused(tmp_path):
    answered(tmp_path, Fake())
    with pytest.raises(
        ConfigError, match=r"holds answers with seed=0, and this run has seed=1; pass name=OTHER"
    ):
        AnswerFiles(tmp_path, {**SETTINGS, "seed": 1}, part=(0, 1))


def test_a_damaged_state_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        answered(tmp_path, Fake(3))
    state = next((tmp_path / "state").glob("part-*.json"))
    state.write_text(state.read_text().replace("[", "[ ", 1)[:-9])
    with pytest.raises(DataError, match="is damaged"):
        answered(tmp_path, Fake())


def run(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["longtrain", *words, "quiet=true"])
    cli.main()


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    rows = [{"prompt": f"What is {n % 5} and {n % 5}?", "response": "unknown"} for n in range(7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer_chats(monkeypatch, tmp_path, chats, *words, home="one"):
    run(
        monkeypatch, "answers", "target=tiny", "data=conversations", f"data.conversations={chats}", "name=a",
        f"home={tmp_path / home}", "decode.max_new_tokens=40", "batch=2", *words,
    )  # fmt: skip
    folder = tmp_path / home / "runs" / "a" / "answers" / "rows"
    return folder, [json.loads(line) for path in sorted(folder.iterdir()) for line in path.open()]


def test_the_answers_are_the_targets_own_and_are_read_as_conversations(monkeypatch, tmp_path, chats):
    from longtrain.data.chat.mask import render_prompt
    from longtrain.decoding.engine import PLAIN, Engine
    from longtrain.decoding.sampling import Sampling

    folder, rows = answer_chats(monkeypatch, tmp_path, chats)
    assert len(rows) == 5  # of seven prompts, two were asked before
    target = load_target("tiny")
    for row in rows:
        ids = render_prompt(target.tokenizer, row["messages"][:1], name="x").tolist()
        whole = Engine(target).generate(
            [ids], max_new_tokens=40, sampling=Sampling(temperature=0.8), shape=PLAIN,
            sequence_ids=[int(row["key"][:15], 16)],
        )  # fmt: skip
        # in turns and in batches, the text is that of one call for this prompt alone
        assert row["tokens"] == len(whole.tokens[0]) and row["messages"][1]["content"] == (
            target.tokenizer.decode(
                [one for one in whole.tokens[0] if one not in target.info.eos_ids], skip_special_tokens=True
            )
        )
    home = f"home={tmp_path / 'one'}"
    run(
        monkeypatch,
        "prepare",
        "target=tiny",
        "data=conversations",
        f"data.conversations={folder}",
        home,
        "name=a",
    )
    data = Prepared.open(next(path for path in (tmp_path / "one" / "data").iterdir() if path.is_dir()))
    assert len(data.start) == len(rows)
    shown = target.tokenizer.decode(np.asarray(data.ids)[np.asarray(data.mask) == 1].tolist())
    assert all(row["messages"][1]["content"].strip() in shown for row in rows) and "What is" not in shown


def test_a_resumed_run_of_the_engine_writes_the_same_files(monkeypatch, tmp_path, chats):
    whole, rows = answer_chats(monkeypatch, tmp_path, chats)
    real, calls = job._writer, []

    def stops(cfg, target):
        write = real(cfg, target)

        def once(*args):
            calls.append(args)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return write(*args)

        return once

    monkeypatch.setattr(job, "_writer", stops)
    with pytest.raises(SystemExit) as stopped:
        answer_chats(monkeypatch, tmp_path, chats, home="two")
    assert stopped.value.code == 130
    cut, again = answer_chats(monkeypatch, tmp_path, chats, home="two")
    assert again == rows and len(calls) > 3
    assert [path.name for path in cut.iterdir()] == [path.name for path in whole.iterdir()]


def test_prompts_of_all_sources_are_asked_in_turn(tmp_path, chats):
    for kind, count in (("book", 9), ("paper", 3)):
        (tmp_path / kind).mkdir()
        for number in range(count):
            text = f"{kind} {number}. " + " ".join(f"It was day {day} of {kind}." for day in range(60))
            (tmp_path / kind / f"{number}.txt").write_text(text)
    sources = [{"text": str(tmp_path / kind), "kind": kind} for kind in ("book", "paper")]
    config = DataConfig.parse(
        {"name": "mixed", "sources": [*sources, {"conversations": str(chats), "kind": "chat"}]}
    )
    tokenizer = load_target("tiny").tokenizer

    def asked():
        return list(Asking(config, tokenizer, 600, (20, 60), {"text": ["What?"]}, {}).prompts())

    kinds = [one.kind for one in asked()]
    # five of the seven chats differ; a source that has ended is left out
    assert kinds == ["book", "paper", "chat"] * 3 + ["book", "chat"] * 2 + ["book"] * 4
    assert [one.key for one in asked()] == [one.key for one in asked()]


def test_first_prompts_do_not_wait_for_much_text(tmp_path, monkeypatch):
    tokenizer, tokenised = load_target("tiny").tokenizer, []

    def encode(_, texts):
        tokenised.extend(texts)
        return [np.arange(100, 400, dtype=np.int32) for _ in texts]

    monkeypatch.setattr(encoder, "encode", encode)
    sources = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        for number in range(20):
            (tmp_path / name / f"{name}{number}.txt").write_text("word " * (encoder.SLICE_CHARS // 10))
        sources.append({"text": str(tmp_path / name)})
    config = DataConfig.parse({"name": "two", "sources": sources})
    asking = Asking(config, tokenizer, 600, (20, 60), {"text": ["What?", "Why?"]}, {}).prompts()
    for n in range(4):
        next(asking)
        assert len(tokenised) == (2, 4, 4, 4)[n]  # of 40: those of the first batch of each source


def test_a_stopped_run_keeps_its_answers_and_is_no_success(monkeypatch, tmp_path, chats, capsys):
    asked = iter([False, False, False])
    monkeypatch.setattr(job.parts, "stopping", lambda: nullcontext(lambda: next(asked, True)))
    with pytest.raises(SystemExit) as stopped:
        answer_chats(monkeypatch, tmp_path, chats)
    assert stopped.value.code == 1 and "the same command goes on" in capsys.readouterr().err
    kept = len((tmp_path / "one/runs/a/answers/rows/part-0-of-1.jsonl").read_text().splitlines())
    monkeypatch.undo()
    _, rows = answer_chats(monkeypatch, tmp_path, chats)
    assert 0 < kept < len(rows) == 5


def test_prompts_need_no_answer_to_be_asked(monkeypatch, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Name a bird."}\n{"instruction": "Name a fish.", "output": null}\n')
    _, rows = answer_chats(monkeypatch, tmp_path, path)
    asked = sorted(row["messages"][0]["content"] for row in rows)
    assert asked == ["Name a bird.", "Name a fish."] and all(len(row["messages"]) == 2 for row in rows)


def test_data_without_a_prompt_is_refused(monkeypatch, tmp_path, capsys):
    path = tmp_path / "chats.jsonl"
    for text, said in (("", "documents=0"), ('{"messages": []}\n', "1 conversations without a question")):
        path.write_text(text)
        with pytest.raises(SystemExit):
            answer_chats(monkeypatch, tmp_path, path)
        shown = capsys.readouterr().err
        assert "the data gives no prompt to answer: documents=" in shown and said in shown


def test_documents_are_asked_about_with_a_question(monkeypatch, tmp_path):
    text = " ".join(f"Word {n} of a long document." for n in range(400))
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text(text)
    run(
        monkeypatch, "answers", "target=tiny", "data=text", f"data.text={tmp_path}/books", "data.prompts=3",
        f"home={tmp_path}", "name=a", "decode.max_new_tokens=8", "document_tokens=[64,200]",
        "ask={text: [What is it?]}",
    )  # fmt: skip
    (path,) = (tmp_path / "runs" / "a" / "answers" / "rows").iterdir()
    rows = [json.loads(line) for line in path.open()]
    assert 1 <= len(rows) <= 3 and len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        piece, _, question = row["messages"][0]["content"].rpartition("\n\n")
        assert question == "What is it?" and len(piece) > 50 and piece in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["document_tokens=[9,3]"], "document_tokens=[9, 3]; allowed: [SHORTEST, LONGEST]"),
        (["ask.text=[]"], "questions for the kind `text`"),
        (["shards=2", "shard=2"], "shard=2 shards=2; allowed: 0 to 1"),
        (["batch=0"], "batch=0; allowed:"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(monkeypatch, tmp_path, chats, capsys, words, said):
    with pytest.raises(SystemExit):
        answer_chats(monkeypatch, tmp_path, chats, "dry_run=true", *words)
    assert said in capsys.readouterr().err and not (tmp_path / "one").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="starts processes")
def test_parts_run_in_processes_of_their_own(monkeypatch, tmp_path, chats, caplog):
    _, rows = answer_chats(monkeypatch, tmp_path, chats)
    folder, parted = answer_chats(monkeypatch, tmp_path, chats, "shards=2", home="two")
    keys = [sorted(row["key"] for row in some) for some in (rows, parted)]
    assert keys[0] == keys[1] and len(list(folder.iterdir())) <= 2

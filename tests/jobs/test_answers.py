"""`longtrain answers`: full batches, resumed runs, parts, and data that can be trained on."""

import hashlib
import itertools
import json
import random
import sys
import threading
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from longtrain import cli
from longtrain.data.chat import mask as masks
from longtrain.data.chat.asked import Asking, Unanswered, WeightedQuestions
from longtrain.data.config import DataConfig
from longtrain.data.packing.prepared import Prepared
from longtrain.data.read import encoder, processes
from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, DataError, LongtrainError
from longtrain.jobs import answers as job
from longtrain.jobs import parts
from longtrain.jobs.answering import batches
from longtrain.jobs.answering.ahead import Ahead
from longtrain.jobs.answering.batches import AnswerBatches, Conversation
from longtrain.jobs.answering.files import AnswerFiles
from longtrain.jobs.answering.places import Places
from longtrain.journals import Journal
from longtrain.targets.loading import load_target, random_target
from longtrain.targets.shapes import SHAPES
from tests.families import usual
from tests.helpers import PROCESSES
from tests.targets.test_window_layers import shape_of

SETTINGS = {"target": "fake", "seed": 0}
END = 7


def prompts(n=80, seed=0, more=()):
    rng = np.random.default_rng(seed)
    made = []
    for number in range(n):
        ids_T = rng.integers(10, 99, rng.integers(3, 60)).astype(np.int32)
        key = hashlib.sha256(f"{number}".encode()).hexdigest()
        made.append(
            Unanswered(
                str(number),
                "chat",
                ({"role": "user", "content": f"q{number}"},),
                ids_T,
                key,
                more,
                4 * len(more),
            )
        )
    return made


class Fake:
    """Places that write tokens which depend on the sequence's id and tokens alone, a step late.

    Answers have `least` to 100 tokens. Step number `stop` is interrupted.
    """

    def __init__(self, stop=None, least=1):
        self.least, self.interrupted = least, stop
        self.steps = self.prefilled = self.prefills = 0
        self.prefill_s, self.taken, self.reads, self.asked, self.held = 0.0, [], [], [], {}

    def make(self, n, slots):
        self.n, self.slots, self.text, self.late = n, slots, {}, []
        return self

    @property
    def busy(self):
        return len(self.text)

    def begin(self, places, texts, ids, *, most, cached=None):
        assert not set(places) & set(self.text) and max(places) < self.n
        assert max(map(len, texts)) + most <= self.slots
        if cached is None:
            self.reads.append([len(text) for text in texts])
        else:
            self.asked.append((self.steps, len(texts)))
        for place, text, known, one in zip(places, texts, cached or [0] * len(texts), ids, strict=True):
            assert known < len(text) and self.held.get(place, [])[:known] == list(text[:known])
            self.prefilled += len(text) - 1 - known
            self.held[place] = list(text)
            self.text[place] = self.written(place, text, one)

    def written(self, place, text, one):
        rng = np.random.default_rng([*hashlib.sha256(json.dumps([list(text), one]).encode()).digest()])
        at = int(rng.integers(self.least, 100))
        return iter([*rng.integers(10, 99, at).tolist(), END, *[1] * 200])

    def stop(self, place, *, kept=0):
        self.text.pop(place, None)
        self.held[place] = self.held[place][:kept]

    def step(self):
        if self.steps == self.interrupted:
            raise KeyboardInterrupt
        self.steps += 1
        self.taken.append(len(self.text))
        arrived, self.late = self.late, [(place, text, next(text)) for place, text in self.text.items()]
        made = [(place, token) for place, text, token in arrived if self.text.get(place) is text]
        for place, token in made:
            self.held[place].append(token)
        return made


def render(messages, before, name):
    """The earlier prompt, the answer's tokens, and 3 tokens of the next question."""
    answer, question = messages[-2]["content"], messages[-1]["content"]
    return [*before, *map(int, answer.split()), END, 5, len(question), 6]


def answered(
    folder, write, *, n=80, most=100, batch=8, part=(0, 1), stopping=lambda: False, more=(), places=None
):
    files = AnswerFiles(folder, SETTINGS, part=part)
    made = AnswerBatches(
        files,
        write.make,
        lambda ids: " ".join(map(str, ids)),
        render,
        frozenset({END}),
        answer_tokens=most,
        batch=batch,
        places=places,
    )
    given = (one for one in prompts(n, more=more) if int(one.key[-8:], 16) % part[1] == part[0])
    try:
        made.run(given, stopping)
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


def lines(folder):
    return sorted(content(folder).splitlines())


@pytest.mark.corners
@pytest.mark.parametrize("stop", [0, 1, 40, 111, 300])
@pytest.mark.parametrize("more", [(), ("b", "cc")])
def test_a_run_that_was_stopped_writes_what_one_that_was_not_writes(tmp_path, stop, more):
    answered(tmp_path / "whole", whole := Fake(), more=more)
    assert whole.steps > 300
    with pytest.raises(KeyboardInterrupt):
        answered(tmp_path / "cut", Fake(stop), more=more)
    before = content(tmp_path / "cut").count(b"\n") if list((tmp_path / "cut" / "rows").iterdir()) else 0
    answered(tmp_path / "cut", rest := Fake(), more=more)
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    assert before or stop < 111
    if not more:  # finished conversations are not read again
        assert sum(map(len, rest.reads)) == 80 - before


def test_a_line_that_a_kill_left_incomplete_is_written_again(tmp_path):
    answered(tmp_path / "whole", Fake())
    with pytest.raises(KeyboardInterrupt):
        answered(tmp_path / "cut", Fake(111))
    path = tmp_path / "cut" / "rows" / "part-0-of-1.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    answered(tmp_path / "cut", Fake())
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")


def test_a_conversation_goes_on_in_its_place_and_only_what_is_new_is_read(tmp_path):
    given = prompts(80)
    made = answered(tmp_path, write := Fake(least=5), more=("b", "cc"), most=120)
    rows = [json.loads(line) for line in content(tmp_path).splitlines()]
    assert len(rows) == 80 and made.n_answers == 240 and made.n_cut == 0
    for row in rows:
        users = [turn["content"] for turn in row["messages"][::2]]
        assert users == [f"q{row['name']}", "b", "cc"]
        assert row["tokens"] == sum(len(turn["content"].split()) + 1 for turn in row["messages"][1::2])
    read = sum(len(one.ids_T) - 1 for one in given)
    # of a question: the end of the answer before it, and its tokens but the last, which the next step takes
    assert write.prefilled == read + 80 * 2 * (4 - 1)


def test_questions_are_read_together_at_steps_that_do_not_depend_on_the_host(tmp_path):
    answered(tmp_path / "one", write := Fake(), n=300, batch=64, more=("b", "cc"))
    asked = write.asked
    rest = [step for step, _ in asked[:-20] if step % batches.NEXT_STEPS]
    assert not rest and sum(count for _, count in asked) == 600
    assert sum(count for _, count in asked[:20]) > 20 * 4
    real = answered.__globals__["render"]

    def slow(*args):
        threading.Event().wait(0.002)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "render", slow)
        answered(tmp_path / "other", again := Fake(), n=300, batch=64, more=("b", "cc"))
    assert again.asked == asked and lines(tmp_path / "one") == lines(tmp_path / "other")


def test_another_rendering_of_the_answer_is_read_from_where_it_differs(tmp_path, monkeypatch):
    rendered = render

    def changed(messages, before, name):
        ids = rendered(messages, before, name)
        return [*ids[:-6], 3, *ids[-6:]]  # a token more within the answer

    monkeypatch.setattr(sys.modules[__name__], "render", changed)
    answered(tmp_path, write := Fake(least=90), more=("b",), n=3, most=120)
    assert write.prefilled == sum(len(one.ids_T) - 1 for one in prompts(3)) + 3 * 6


def test_of_a_prompt_that_its_place_holds_the_last_token_is_still_to_come(tmp_path, monkeypatch):
    """A template that shortens the conversation: the step that takes the token draws the answer's first."""
    rendered = render
    monkeypatch.setattr(sys.modules[__name__], "render", lambda *given: rendered(*given)[:-6])
    answered(tmp_path, write := Fake(least=90), more=("b",), n=3, most=120)
    assert write.prefilled == sum(len(one.ids_T) - 1 for one in prompts(3))
    assert sum(count for _, count in write.asked) == 3


def test_answers_that_are_cut_or_blank_end_as_they_say(tmp_path):
    made = answered(tmp_path, Fake(least=20), more=("b", "cc"), most=30)
    rows = [json.loads(line) for line in content(tmp_path).splitlines()]
    assert {row["finish"] for row in rows} == {"length"} or made.n_cut < made.n_answers
    for row in rows:
        cut = any(len(turn["content"].split()) == 30 for turn in row["messages"][1::2])
        assert (row["finish"] == "length") == cut and row["messages"][-1]["role"] == "assistant"


def test_a_blank_answer_is_left_out_and_not_asked_for_again(tmp_path):
    class Blank(Fake):
        def written(self, place, text, one):
            return iter([END] * 9)

    made = answered(tmp_path, Blank(), more=("b",))
    assert made.n_empty == 80 and not list((tmp_path / "rows").iterdir())
    answered(tmp_path, again := Fake(), more=("b",))
    assert again.steps == 0


def test_a_later_blank_answer_ends_the_conversation_before_its_question(tmp_path):
    class Later(Fake):
        def written(self, place, text, one):
            return iter([END] * 9) if END in text else super().written(place, text, one)

    made = answered(tmp_path, Later(least=60), more=("b",), most=120)
    rows = [json.loads(line) for line in content(tmp_path).splitlines()]
    assert len(rows) == 80 == made.n_answers == made.n_empty
    assert all([turn["role"] for turn in row["messages"]] == ["user", "assistant"] for row in rows)


def test_a_stop_that_was_asked_for_comes_after_a_step(tmp_path):
    answered(tmp_path / "whole", Fake())
    asked = iter([False] * 50 + [True])
    answered(tmp_path / "cut", first := Fake(), stopping=lambda: next(asked))
    assert first.steps == 50
    answered(tmp_path / "cut", Fake())
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")


@pytest.mark.parametrize(("n", "batch"), [(200, 8), (7, 33), (50, 1), (300, 32)])
def test_the_places_stay_full_until_the_prompts_end(tmp_path, n, batch):
    write = Fake()
    write.make(min(n, batch), 200)  # large enough for all
    made = answered(tmp_path, write, n=n, batch=batch, places=write)
    assert made.n_answers == n
    # but for those that a group of prompts waits for
    least = write.n - max(1, write.n // 16) + 1
    assert min(write.taken[:-110], default=least) >= least


def test_a_run_that_goes_on_has_as_many_places_as_a_new_one(tmp_path):
    class Counted(Fake):
        made = ()

        def make(self, n, slots):
            self.made = (*self.made, n)
            return super().make(n, slots)

    given = prompts(40)
    files = AnswerFiles(tmp_path, SETTINGS, part=(0, 1))
    for number in (*range(7), 12, 20):
        files.skip(given[number])
    files.close()
    made = answered(tmp_path, write := Counted(), n=40)
    assert made.n_answers == 31 and write.made[0] == 8


def test_the_last_prompts_are_answered_though_no_place_has_room_for_them(tmp_path, monkeypatch):
    """One place for a batch of four: it is free when only two longer prompts are left."""

    class Single(Fake):
        def make(self, n, slots):
            return super().make(1, slots)

    given = sorted(prompts(6), key=lambda asked: len(asked.ids_T))
    monkeypatch.setattr(sys.modules[__name__], "prompts", lambda *_, **__: given)
    assert answered(tmp_path, Single(), n=6, batch=4).n_answers == 6


def test_prompts_are_read_in_groups_of_similar_length(tmp_path):
    answered(tmp_path, write := Fake(), n=200, batch=64)
    assert max(map(len, write.reads)) == 4
    assert sum(max(some) * len(some) for some in write.reads) < 1.3 * sum(map(sum, write.reads))


def test_longer_prompts_get_larger_places_when_the_others_are_done(tmp_path):
    class Tight(Fake):
        made = ()

        def make(self, n, slots):
            self.made = (*self.made, slots)
            return super().make(n, slots)

    answered(tmp_path, write := Tight(), n=60, batch=4)
    assert list(write.made) == sorted(write.made) and len(write.made) > 1
    assert content(tmp_path).count(b"\n") == 60


def test_items_are_read_ahead_in_order_and_errors_come_where_they_were():
    read = []

    def source():
        for n in range(9):
            read.append(n)
            yield n
        raise DataError("broken")

    with Ahead(source(), 3, threading.Event()) as items:
        assert [next(items) for _ in range(9)] == list(range(9))
        with pytest.raises(DataError, match="broken"):
            next(items)
        assert list(items) == []
    read.clear()
    closed = []

    def endless():
        try:
            yield from iter(int, 1)
        finally:
            closed.append(True)

    with Ahead(endless(), 3, threading.Event()) as items:
        assert next(items) == 0
    assert closed == [True] and not [one for one in threading.enumerate() if one.name == "prompts"]


def test_a_source_that_finds_nothing_more_ends_as_it_is_left(tmp_path):
    closing = threading.Event()
    path = tmp_path / "chats.jsonl"
    path.write_text('{"prompt": "Name a bird."}\n')
    config = DataConfig.parse({"name": "x", "sources": [{"conversations": str(path)}]})
    asking = Asking(config, load_target("tiny").tokenizer, 600, (1, 9), {}, {}, stopping=closing.is_set)

    def source():
        yield 0
        while list(asking.prompts()):  # as text does whose pieces are all too short
            pass

    with pytest.raises(KeyboardInterrupt), Ahead(source(), 3, closing) as items:
        assert next(items) == 0
        raise KeyboardInterrupt
    assert closing.is_set() and not [one for one in threading.enumerate() if one.name == "prompts"]


def test_a_stop_that_comes_while_prompts_are_sought_is_no_end(tmp_path):
    files = AnswerFiles(tmp_path, SETTINGS, part=(0, 1))
    made = AnswerBatches(files, Fake().make, str, render, frozenset({END}), answer_tokens=9, batch=2)
    came = []

    def sought():
        came.append(True)
        yield from ()

    assert not made.run(sought(), lambda: bool(came))
    files.close()


def test_parts_answer_together_what_one_process_does(tmp_path):
    for number in range(3):
        answered(tmp_path, Fake(), part=(number, 3))
    names = [json.loads(line)["name"] for path in (tmp_path / "rows").iterdir() for line in path.open()]
    assert sorted(names, key=int) == [str(n) for n in range(80)]
    answered(tmp_path, again := Fake())  # in one part: all is there
    assert again.steps == 0


def test_answers_of_other_settings_are_refused(tmp_path):
    answered(tmp_path, Fake())
    with pytest.raises(
        ConfigError, match=r"holds answers with seed=0, and this run has seed=1; pass name=OTHER"
    ):
        AnswerFiles(tmp_path, {**SETTINGS, "seed": 1}, part=(0, 1))


def test_a_damaged_state_is_refused(tmp_path):
    answered(tmp_path, Fake(), n=2)
    state = tmp_path / "state" / "part-0-of-1.json"
    state.write_text('{"blank": [')
    with pytest.raises(DataError, match="is damaged"):
        answered(tmp_path, Fake())


def run(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["longtrain", *words, "quiet=true"])
    cli.main()


@pytest.fixture
def chats(tmp_path):
    return write_chats(tmp_path / "chats.jsonl")


@pytest.fixture(scope="module")
def answered_whole(tmp_path_factory, chat_target):
    """The folder and the rows of a run that nobody stops."""
    home = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        return answer_chats(patch, home, chat_target, write_chats(home / "chats.jsonl"))


def write_chats(path):
    rows = [{"prompt": f"What is {n % 5} and {n % 5}?", "response": "unknown"} for n in range(7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer_chats(monkeypatch, tmp_path, target, chats, *words, home="one"):
    run(
        monkeypatch, "answers", f"target.path={target}", "data=conversations", f"data.conversations={chats}",
        "name=a", f"home={tmp_path / home}", "decode.max_new_tokens=40", "batch=2", *words,
    )  # fmt: skip
    folder = tmp_path / home / "runs" / "a" / "answers" / "rows"
    return folder, [json.loads(line) for path in sorted(folder.iterdir()) for line in path.open()]


def test_the_answers_are_the_targets_own_and_are_read_as_conversations(
    monkeypatch, tmp_path, answered_whole, chat_target
):
    from longtrain.data.chat.mask import render_prompt

    folder, rows = answered_whole
    assert len(rows) == 5  # of seven prompts, two were asked before
    target = load_target(chat_target)
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
        f"target.path={chat_target}",
        "data=conversations",
        f"data.conversations={folder}",
        home,
        "name=a",
    )
    data = Prepared.open(next(path for path in (tmp_path / "one" / "data").iterdir() if path.is_dir()))
    assert len(data.start) == len(rows)
    shown = target.tokenizer.decode(np.asarray(data.ids)[np.asarray(data.mask) == 1].tolist())
    assert all(row["messages"][1]["content"].strip() in shown for row in rows) and "What is" not in shown


def test_a_resumed_run_of_the_engine_writes_the_same_rows(
    monkeypatch, tmp_path, chats, answered_whole, chat_target
):
    whole, rows = answered_whole
    real, calls = Places.step, []

    def stops(self):
        calls.append(self)
        if len(calls) == 50:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Places, "step", stops)
    with pytest.raises(SystemExit) as stopped:
        answer_chats(monkeypatch, tmp_path, chat_target, chats, home="two")
    assert stopped.value.code == 130
    cut, again = answer_chats(monkeypatch, tmp_path, chat_target, chats, home="two")
    by_key = lambda row: row["key"]  # noqa: E731
    assert sorted(again, key=by_key) == sorted(rows, key=by_key) and len(calls) > 51
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

    questions = {"text": WeightedQuestions(("What?",), (1,))}

    def asked():
        return list(Asking(config, tokenizer, 600, (20, 60), questions, {}).prompts())

    kinds = [one.kind for one in asked()]
    # five of the seven chats differ; a source that has ended is left out
    assert kinds == ["book", "paper", "chat"] * 3 + ["book", "chat"] * 2 + ["book"] * 4
    assert [one.key for one in asked()] == [one.key for one in asked()]


def test_first_prompts_do_not_wait_for_much_text(tmp_path, monkeypatch):
    tokenizer, tokenised = load_target("tiny").tokenizer, []

    def encode(_, texts):
        tokenised.extend(texts)
        return [np.arange(100, 400, dtype=np.int32) for _ in texts]

    monkeypatch.setattr("longtrain.data.chat.asked.encode", encode)
    sources = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        for number in range(20):
            (tmp_path / name / f"{name}{number}.txt").write_text("word " * (encoder.SLICE_CHARS // 10))
        sources.append({"text": str(tmp_path / name)})
    config = DataConfig.parse({"name": "two", "sources": sources})
    asking = Asking(
        config, tokenizer, 600, (20, 60), {"text": WeightedQuestions(("What?", "Why?"), (1, 1))}, {}
    ).prompts()
    for n in range(4):
        next(asking)
        assert len(tokenised) == (2, 4, 4, 4)[n]  # of 40: those of the first batch of each source


def test_a_stopped_run_keeps_its_answers_and_is_no_success(monkeypatch, tmp_path, chats, capsys, chat_target):
    asked = iter([False] * 60)
    monkeypatch.setattr(job.parts, "stopping", lambda: nullcontext(lambda: next(asked, True)))
    with pytest.raises(SystemExit) as stopped:
        answer_chats(monkeypatch, tmp_path, chat_target, chats)
    assert stopped.value.code == 1 and "the same command goes on" in capsys.readouterr().err
    kept = len((tmp_path / "one/runs/a/answers/rows/part-0-of-1.jsonl").read_text().splitlines())
    monkeypatch.undo()
    _, rows = answer_chats(monkeypatch, tmp_path, chat_target, chats)
    assert 0 < kept < len(rows) == 5


def test_prompts_need_no_answer_to_be_asked(monkeypatch, tmp_path, chat_target):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Name a bird."}\n{"instruction": "Name a fish.", "output": null}\n')
    _, rows = answer_chats(monkeypatch, tmp_path, chat_target, path)
    asked = sorted(row["messages"][0]["content"] for row in rows)
    assert asked == ["Name a bird.", "Name a fish."] and all(len(row["messages"]) == 2 for row in rows)


def test_data_without_a_prompt_is_refused(monkeypatch, tmp_path, capsys, chat_target):
    path = tmp_path / "chats.jsonl"
    for text, said in (("", "documents=0"), ('{"messages": []}\n', "1 conversations without a question")):
        path.write_text(text)
        with pytest.raises(SystemExit):
            answer_chats(monkeypatch, tmp_path, chat_target, path)
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


def test_several_questions_on_a_text_get_the_answers_of_fresh_prompts(monkeypatch, tmp_path, chat_target):
    from longtrain.data.chat.mask import render_prompt

    (tmp_path / "books").mkdir()
    text = " ".join(f"Word {n} of a long document." for n in range(400))
    (tmp_path / "books" / "a.txt").write_text(text)
    run(
        monkeypatch, "answers", f"target.path={chat_target}", "data=text", f"data.text={tmp_path}/books",
        "data.prompts=3", f"home={tmp_path}", "name=a", "decode.max_new_tokens=8", "decode.temperature=0",
        "document_tokens=[64,200]", "turns=[2,3]", "ask={text: [One?, Two?, {last: [Three?]}]}", "batch=2",
    )  # fmt: skip
    (path,) = (tmp_path / "runs" / "a" / "answers" / "rows").iterdir()
    rows, target = [json.loads(line) for line in path.open()], load_target(chat_target)
    assert len(rows) == 3
    for row in rows:
        turns = row["messages"]
        assert len(turns) in (4, 6) and [turn["role"] for turn in turns] == ["user", "assistant"] * (
            len(turns) // 2
        )
        asked = [turn["content"].rpartition("\n\n")[2] for turn in turns[::2]]
        assert len(set(asked)) == len(asked) and set(asked) <= {"One?", "Two?", "Three?"}
        for at in range(1, len(turns), 2):
            ids = render_prompt(target.tokenizer, turns[:at], name="x").tolist()
            (fresh,) = Engine(target).generate([ids], max_new_tokens=8, shape=PLAIN).tokens
            fresh = [one for one in fresh if one not in target.info.eos_ids]
            assert turns[at]["content"] == target.tokenizer.decode(fresh, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("sampling", "dtype", "batch"),
    [(Sampling(), torch.float32, 5), (Sampling(temperature=0.8, seed=3), torch.float64, 3)],
    ids=["greedy", "sampled"],
)
def test_conversations_are_those_of_fresh_prompts_in_any_batch_and_stopped_anywhere(
    tmp_path, sampling, dtype, batch
):
    """Questions of 1, 2 and 30 tokens; a sixth of all tokens ends an answer, and the last are cut."""
    target = random_target({**SHAPES["llama_micro"], "vocab_size": 128}, seed=1, dtype=dtype)
    most, asked = 12, ("2", "30", "1")
    ends = frozenset(range(0, target.info.vocab_size, 6))
    given = [replace(one, more=asked[number % 4 :], more_tokens=50) for number, one in enumerate(prompts(6))]

    def following(messages, before, name):
        answer, question = messages[-2]["content"], messages[-1]["content"]
        return [*before, *map(int, answer.split()), *range(50, 50 + int(question))]

    def write(folder, places, steps=None):
        files = AnswerFiles(tmp_path / folder, SETTINGS, part=(0, 1))
        made = AnswerBatches(
            files,
            lambda n, slots: Places(target, n, slots, sampling),
            lambda ids: " ".join(map(str, ids)),
            following,
            ends,
            answer_tokens=most,
            batch=places,
        )
        count = itertools.count()
        whole = made.run(iter(given), lambda: steps is not None and next(count) == steps)
        files.close()
        return whole

    assert write("whole", batch) and write("other", 6)
    rounds = [write("cut", batch, steps) for steps in (9, 20)]
    assert rounds == [False] * 2 and write("cut", batch)
    rows = {row["name"]: row["messages"] for row in map(json.loads, lines(tmp_path / "whole"))}
    assert lines(tmp_path / "other") == lines(tmp_path / "cut") == lines(tmp_path / "whole")
    lengths = Counter()
    for one in given:
        talk, ids, written = Conversation(one, [*one.messages], one.ids_T.tolist()), one.ids_T.tolist(), []
        for question in (*one.more, None):
            (tokens,) = Engine(target).generate(
                [ids], max_new_tokens=most, sampling=sampling, shape=PLAIN, sequence_ids=[talk.draws],
                stop_ids=ends,
            ).tokens  # fmt: skip
            kept = tokens[:-1] if tokens[-1] in ends else tokens
            if not kept:
                break
            lengths[len(kept)] += 1
            written.append(" ".join(map(str, kept)))
            talk.messages += [{"role": "assistant", "content": written[-1]}]
            talk.messages += [{"role": "user", "content": question}]
            ids = following(talk.messages, ids, "") if question else ids
        found = [turn["content"] for turn in rows.get(one.name, [])[1::2]]
        assert found == written
    assert len(lengths) > 4 and lengths[most]


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "olmo3", "smollm3"])
def test_texts_go_on_from_a_kept_prompt_in_layers_with_windows(family):
    """Each question on a prompt of several windows gets the text of the whole, read anew."""
    made = usual(family) if family == "gpt_oss" else shape_of(family, random.Random(2))
    shape = {**made, "sliding_window": 8}
    target = random_target(shape, seed=3, dtype=torch.float64)
    rng = torch.Generator().manual_seed(1)
    prompt, *questions = (
        torch.randint(2, target.info.vocab_size, (n,), generator=rng).tolist() for n in (50, 1, 8, 9)
    )
    places = Places(target, 2, 100, Sampling())
    places.begin([1], [prompt], [0], most=1)
    while not places.step():
        pass
    places.stop(1, kept=len(prompt))
    for cached in (len(prompt), len(prompt) - 5):  # the whole prompt stays, or a part of it
        for question in questions:
            whole = prompt[:cached] + question
            places.begin([1], [whole], [0], most=12, cached=[cached])
            found = []
            while len(found) < 12:
                found += [token for _, token in places.step()]
            places.stop(1, kept=cached)
            expected = Engine(target).generate([whole], max_new_tokens=12, shape=PLAIN, ignore_eos=True)
            assert found == expected.tokens[0]


def test_the_next_prompt_has_the_tokens_of_a_whole_rendering():
    from longtrain.data.chat.mask import render_next, render_prompt

    tokenizer = load_target("tiny").tokenizer
    for answer in ("No.", "\n\n two  lines\n", " a<|b|> ", "x" * 300, "é ñ 漢字"):
        turns = [{"role": "user", "content": "Is it?\n"}, {"role": "assistant", "content": answer}]
        turns += [{"role": "user", "content": "  Why?"}]
        before = render_prompt(tokenizer, turns[:1], name="x").tolist()
        whole = render_prompt(tokenizer, turns, name="x").tolist()
        assert render_next(tokenizer, turns, before, name="x") == whole
        # of other ids before it nothing is taken
        assert render_next(tokenizer, turns, [*before[:-1], 9, 9], name="x") == whole
        assert render_next(tokenizer, turns, [9], name="x") == whole


def test_forms_of_questions_are_drawn_by_weight_and_none_twice():
    asked = WeightedQuestions.of({"a": ("1", "2"), "b": ("3",), "c": ("4",)}, {"a": 3, "c": 0})
    assert dict(zip(asked.texts, asked.weights, strict=True)) == {"1": 1.5, "2": 1.5, "3": 1}
    rng = np.random.default_rng(0)
    first = Counter(asked.draw(rng, 1)[0] for _ in range(2000))
    assert 0.71 < (first["1"] + first["2"]) / 2000 < 0.79 and set(first) == {"1", "2", "3"}
    assert sorted(asked.draw(rng, 9)) == ["1", "2", "3"]
    twice = WeightedQuestions.of({"a": ("1", "2"), "b": ("1",)}, {})
    assert dict(zip(twice.texts, twice.weights, strict=True)) == {"1": 1.5, "2": 0.5}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["document_tokens=[9,3]"], "document_tokens=[9, 3]; allowed: [SHORTEST, LONGEST]"),
        (["ask.text=[]"], "questions for the kind `text`"),
        (["ask={text: [One?]}", "ask_weights={One?: 0}"], "a weight above 0 for a form of `ask.text`"),
        (["turns=[3,2]"], "turns=[3, 2]; allowed: [FEWEST, MOST]"),
        (["ask_weights={poems: 2}"], "ask_weights=poems; allowed: forms of questions: continuation, "),
        (["ask_weights={summary: -1}"], "each 0 or more"),
        (["shards=2", "shard=2"], "shard=2 shards=2; allowed: 0 to 1"),
        (["batch=0"], "batch=0; allowed:"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(
    monkeypatch, tmp_path, chats, capsys, words, said, chat_target
):
    with pytest.raises(SystemExit):
        answer_chats(monkeypatch, tmp_path, chat_target, chats, "dry_run=true", *words)
    assert said in capsys.readouterr().err and not (tmp_path / "one").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="its fork server was tried on Linux alone")
def test_parts_run_in_processes_of_their_own(monkeypatch, tmp_path, chats, answered_whole, chat_target):
    monkeypatch.setattr(parts, "multiprocessing", SimpleNamespace(get_context=lambda _: PROCESSES))
    folder, parted = answer_chats(monkeypatch, tmp_path, chat_target, chats, "shards=2", home="two")
    keys = [sorted(row["key"] for row in some) for some in (answered_whole[1], parted)]
    assert keys[0] == keys[1] and len(list(folder.iterdir())) <= 2


def test_speeds_are_told_from_the_start_and_while_places_are_refilled(tmp_path, monkeypatch):
    told, clock = [], iter(range(100_000))

    class Slow(Fake):
        """The first prompts come late, and the last answers have few places."""

        def step(self):
            arrived = super().step()
            told.append(len(arrived))
            return arrived

    monkeypatch.setattr(batches.time, "perf_counter", lambda: float(next(clock)))
    made = answered(tmp_path, Slow(), n=200, batch=8)
    assert made.tokens_per_s == pytest.approx(made.n_tokens / made.seconds)
    full = [count for count in told if count >= 7]
    assert made.steady_tokens_per_s > made.tokens_per_s > 0
    assert sum(told) == made.n_tokens and len(full) > len(told) / 2
    (began, first), (ended, last) = made._full
    assert 0 < first < last < made.n_tokens and 0 < began < ended < made.seconds
    assert made.steady_tokens_per_s == (last - first) / (ended - began)
    few = answered(tmp_path / "few", Fake(), n=3, batch=8)  # all begin before the first token
    assert few.steady_tokens_per_s > 0
    none = answered(tmp_path, Fake(), n=3, batch=8)
    assert none.steady_tokens_per_s == none.tokens_per_s == 0


def test_an_answer_that_cannot_be_written_ends_the_run(tmp_path, monkeypatch):
    def full(self, values):
        raise LongtrainError("the disk is full")

    monkeypatch.setattr(Journal, "append", full)
    with pytest.raises(LongtrainError, match="the disk is full"):
        answered(tmp_path, Fake())


@pytest.mark.parametrize("failing", [1, 2])
def test_of_rows_that_cannot_be_written_the_next_call_tells(tmp_path, monkeypatch, failing):
    """The one after it, or at the end `close`; the others are written."""
    files, real, calls = AnswerFiles(tmp_path, SETTINGS, part=(0, 1)), Journal.append, iter(range(1, 9))

    def full(self, values):
        if next(calls) == failing:
            raise LongtrainError("the disk is full")
        real(self, values)

    monkeypatch.setattr(Journal, "append", full)
    first, second, third = prompts(3)
    files.add(first, [], tokens=1, finish="stop_id")
    files._writing[0].exception()  # written, or not
    with pytest.raises(LongtrainError, match="disk is full") if failing == 1 else nullcontext():
        files.add(second, [], tokens=1, finish="stop_id")
    if failing == 1:
        files.add(third, [], tokens=1, finish="stop_id")
    with pytest.raises(LongtrainError, match="disk is full") if failing == 2 else nullcontext():
        files.close()
    assert len(content(tmp_path).splitlines()) == 1


def test_processes_make_the_prompts_of_one_process(tmp_path, chats, monkeypatch):
    monkeypatch.setattr(processes, "get_context", lambda _: PROCESSES)
    (tmp_path / "books").mkdir()
    for number in range(5):
        words = " ".join(f"Page {page} of book {number}." for page in range(50 * (number + 1)))
        (tmp_path / "books" / f"{number}.txt").write_text(words)
    sources = [{"text": str(tmp_path / "books"), "prompts": 3}, {"conversations": str(chats)}]
    tokenizer = load_target("tiny").tokenizer
    questions = {"text": WeightedQuestions(("A?", "B?", "C?"), (1, 2, 3))}

    def asked(workers):
        config = DataConfig.parse({"name": "x", "sources": sources, "tokenise_workers": workers})
        options = {"turns": (1, 3), "answer_tokens": 9}
        asking = Asking(config, tokenizer, 300, (20, 100), questions, {"seed": 1}, **options)
        return [(one.key, one.name, one.more, one.ids_T.tolist()) for one in asking.prompts()], asking.counts

    made = asked(0)
    assert made == asked(2) and made[1]["prompts"] > 15 and made[1]["long"] == 0


def test_an_error_of_a_document_comes_after_its_prompts(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(" ".join(f"Page {page} of a book." for page in range(300)))
    config = DataConfig.parse({"name": "x", "sources": [{"text": str(tmp_path / "a.txt"), "prompts": 4}]})
    tokenizer, questions = load_target("tiny").tokenizer, {"text": WeightedQuestions(("A?",), (1,))}
    real, calls, got = masks.render_prompt, [], []

    def refuses(*args, **options):
        calls.append(args)
        if len(calls) == 4:  # the question alone, two pieces, and the third
            raise DataError("the template refuses it")
        return real(*args, **options)

    monkeypatch.setattr(masks, "render_prompt", refuses)
    with pytest.raises(DataError, match="refuses it"):
        for one in Asking(config, tokenizer, 300, (20, 60), questions, {}).prompts():
            got.append(one.name)
    assert len(got) == 2

"""RULER as a suite: what its prompts hold, who can solve them by its own score, and what it is called."""

from __future__ import annotations

import hashlib
import json
import lzma
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.harness.protocol import protocol_of
from longtrain.evaluation.ruler.generate import Generator
from longtrain.evaluation.ruler.questions import DATASETS
from longtrain.evaluation.ruler.sizing import Framing, Material
from longtrain.evaluation.ruler.sources import SHA256, vocabulary
from longtrain.evaluation.ruler.tasks import TASKS
from longtrain.evaluation.suites import ruler
from tests.evaluation.ruler.conftest import TRADES, hotpot_rows, squad_rows  # noqa: F401 (fixtures)
from tests.evaluation.ruler.readers import ignorant, oracle

LENGTHS = [1280, 2048]


@pytest.fixture(scope="module")
def files(tmp_path_factory, squad_rows, hotpot_rows):  # noqa: F811 (fixtures)
    folder = tmp_path_factory.mktemp("questions")
    found = {"squad": folder / "dev-v2.0.json", "hotpotqa": folder / "hotpot.json"}
    found["squad"].write_text(json.dumps(squad_rows))
    found["hotpotqa"].write_text(json.dumps(hotpot_rows))
    return {name: str(path) for name, path in found.items()}


@pytest.fixture(scope="module", autouse=True)
def _counted_once():
    """Suites are built again and again, of mostly the same prompts: the tokens of each are counted once."""
    count, known = Framing._count, {}

    def once(self, text: str) -> int:
        key = id(self.tokenizer), self.chat, text
        if key not in known:
            known[key] = count(self, text), self.tokenizer  # kept, so that its id is no other's
        return known[key][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Framing, "_count", once)
        yield


@pytest.fixture(scope="module")
def build(tiny, settings_of, files):
    """`build(key=value)`: all 13 tasks, two lengths, two examples."""

    def make(sampling=Sampling(), **changed):  # noqa: B008 (frozen)
        return ruler.build(
            settings_of("ruler", **{"lengths": LENGTHS, "samples": 2, **files, **changed}),
            tiny,
            seed=0,
            sampling=sampling,
        )

    return make


@pytest.fixture(scope="module")
def suite(build):
    return build()


def test_an_oracle_reader_gets_everything(suite, answered) -> None:
    records = answered(suite, lambda task, one: oracle(task.name, task.written.made(one).input))
    summary = suite.summary(records)
    assert summary.tasks == dict.fromkeys(TASKS, 100.0) and summary.average == 100.0
    assert set(summary.extra["lengths"]) == set(map(str, LENGTHS))
    assert all(found["average"] == 100.0 for found in summary.extra["lengths"].values())


@pytest.mark.parametrize("samples", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_a_reader_without_the_context_gets_nothing(build, answered, samples) -> None:
    suite = build(lengths=[2048], samples=samples)
    words = list(vocabulary().pool)

    def blind(task, one) -> str:
        found = task.written.made(one)
        return ignorant(
            task.name, found.solved + found.input, found.answer_prefix, Random(one.id), words, TRADES
        )

    records = answered(suite, blind)
    tasks = suite.summary(records).tasks
    assert all(len(some) == samples for some in records.values())
    assert {
        name: figure for name, figure in tasks.items() if figure > (5 if name.startswith("qa") else 1)
    } == {}


def test_prompts_are_those_of_the_generator_and_fit_their_length(suite, tiny) -> None:
    tokenizer = tiny.tokenizer
    for task in suite.tasks:
        for one in task.examples():
            prompt = task.encode(one, tokenizer, max_tokens=10)
            found = task.written.made(one)
            assert len(prompt.ids) == found.prompt_tokens and not prompt.cut
            length = one.fields["length"]
            assert len(prompt.ids) + task.max_new_tokens == found.length_tokens <= length == task.size(one)
            message = [{"role": "user", "content": found.input}]
            chat = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            assert tokenizer.decode(prompt.ids) == found.solved + chat + found.answer_prefix
            assert task.facets(one) == {"length": length} and task.references(one) == list(found.answers)
            asked = found.input.rindex("\n")
            wanted = found.answers[:1] if task.name == "qa_1" else found.answers
            assert all(answer in found.input[:asked] for answer in wanted)


def test_the_same_settings_give_the_same_bytes_in_any_order(suite, build, tiny) -> None:
    again, other = build(), build(seed=43)
    for task, same, different in zip(suite.tasks, again.tasks, other.tasks, strict=True):
        rows = list(task.examples())
        assert [task.written(one) for one in rows] == [same.written(one) for one in reversed(rows)][::-1]
        assert all(task.written.made(one).input != different.written.made(one).input for one in rows)
        for length in LENGTHS:
            questions = {"qa_1": "squad", "qa_2": "hotpotqa"}.get(task.name)
            sources = task.written.generator(length).writer
            asked = sources.questions if questions else None
            material = Material(TASKS[task.name], length, Framing(tiny.tokenizer), questions=asked)
            made = list(map(Generator(material).example, range(2)))
            assert [task.written.made(one) for one in rows if one.fields["length"] == length] == made
    hashes = [protocol_of(one, tiny, Sampling()).hash for one in (suite, again, other)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_sources_are_part_of_the_protocol(suite, build, tiny, tmp_path, files) -> None:
    essays = tmp_path / "essays.json.xz"
    with lzma.open(essays, "wt") as file:
        file.write(json.dumps({"text": "One may write. Another may read what was written. " * 300}))
    words = tmp_path / "words.txt"
    words.write_text("alpha\nbeta\n")
    hashes = {protocol_of(suite, tiny, Sampling()).hash}
    for changed in ({"haystack": str(essays)}, {"more_words": str(words)}, {"samples": 3}, {"chat": False}):
        hashes.add(protocol_of(build(**changed), tiny, Sampling()).hash)
    assert len(hashes) == 5
    settings = {task.name: task.settings()["protocol"] for task in build(haystack=str(essays)).tasks}
    assert settings["niah_single_2"]["haystack"]["name"] == "essays.json.xz"
    assert "haystack" not in settings["niah_single_1"] and "questions" in settings["qa_1"]


def test_what_a_result_is_called(suite, build, answered, files, tmp_path, monkeypatch) -> None:
    summary = suite.summary(answered(suite, lambda task, one: ""))
    assert summary.title == "Variant of RULER" and summary.average == 0.0
    said = " ".join(summary.notes)
    for part in (
        "suite.samples=2 instead of 500",
        "not in Paul Graham's essays",
        "suite.words=longtrain instead of",
    ):
        assert part in said
    fewer = build(tasks=["vt", "cwe"], seed=1, chat=False)
    notes = fewer.summary(answered(fewer, lambda task, one: "")).notes
    assert (
        notes[0] == "2 of 13 tasks"
        and "suite.seed=1 instead of 42" in notes
        and "without chat template" in notes
    )
    assert not any("essays" in note for note in notes)  # none of the two has a haystack of essays
    essays = tmp_path / "essays.json"
    essays.write_text(json.dumps({"text": "One may write. Another may read what was written. " * 300}))
    monkeypatch.setattr(ruler, "vocabulary", lambda source: vocabulary())
    official = {**ruler.PUBLISHED.settings, "samples": 1}
    monkeypatch.setattr(ruler, "PUBLISHED", replace(ruler.PUBLISHED, settings=official))
    few = {"lengths": [4096], "samples": 1, "haystack": str(essays), "words": "wonderwords"}

    def called(sampling=Sampling(), **changed) -> tuple[str, tuple[str, ...]]:  # noqa: B008 (frozen)
        named = build(sampling, **{**few, **changed}).summary({})
        return named.title, named.notes

    chat = "prompts in the target's chat template"
    assert called() == (
        "Variant of RULER",
        (
            "needles hidden in essays.json, which is no known copy of RULER's PaulGrahamEssays.json",
            "questions of hotpotqa from hotpot.json, which is not the published file",
            "questions of squad from dev-v2.0.json, which is not the published file",
            chat,
        ),
    )
    for what, file in {**files, "haystack": str(essays)}.items():
        monkeypatch.setitem(SHA256, what, (hashlib.sha256(Path(file).read_bytes()).hexdigest(),))
    assert called() == ("RULER", (chat,))
    note = "lengths that are not published: 1536"
    assert called(lengths=[1536, 4096], tasks=list(TASKS)[:11])[1][1] == note
    packed = tmp_path / "essays.json.xz"
    packed.write_bytes(lzma.compress(essays.read_bytes()))
    assert called(haystack=str(packed)) == ("RULER", (chat,))
    words = tmp_path / "words.txt"
    words.write_text("alpha\nbeta\n")
    note = "more words from words.txt, which is not RULER's english_words.json"
    assert called(more_words=str(words)) == ("Variant of RULER", (note, chat))
    sampled = called(Sampling(1.0, top_k=50))
    assert sampled == ("Variant of RULER", ("sampled (temperature 1, top_k 50), not greedy", chat))


def test_a_lost_chat_template_is_said(build, tiny, monkeypatch) -> None:
    def notes(chat) -> list[str]:
        found = build(tasks=["vt"], lengths=[2048], chat=chat).summary({}).notes
        return [note for note in found if "chat template" in note]

    assert notes(None) == ["prompts in the target's chat template"]
    assert notes(False) == ["without chat template"]
    monkeypatch.setattr(tiny.tokenizer, "chat_template", None)
    (note,) = notes(None)
    assert note.startswith("without chat template: the tokenizer has none")
    assert notes(False) == []  # a base model, and it was said


def test_the_bundled_target_runs_it(build, bundled, run_suite) -> None:
    suite = build(lengths=[1100], samples=1, tasks=["niah_multivalue", "vt"])
    records = run_suite(suite, bundled)
    assert {task: len(some) for task, some in records.items()} == {"niah_multivalue": 1, "vt": 1}
    (found,) = records["niah_multivalue"]
    assert found.facets == {"length": 1100} and found.score == 1.0  # four values, all of them found


def test_the_hubs_rows_are_the_files_questions(files, squad_rows, hotpot_rows) -> None:  # noqa: F811
    flat = [
        {
            "title": article["title"],
            "context": paragraph["context"],
            "question": row["question"],
            "answers": {"text": [answer["text"] for answer in row["answers"]], "answer_start": []},
        }
        for article in squad_rows["data"]
        for paragraph in article["paragraphs"]
        for row in paragraph["qas"]
    ]
    got, expected = DATASETS["squad"].of_rows(flat, "x"), DATASETS["squad"].read(files["squad"])
    assert (got.documents, got.items, got.digest) == (expected.documents, expected.items, expected.digest)
    columns = [
        {
            "question": row["question"],
            "answer": row["answer"],
            "context": {
                "title": [title for title, _ in row["context"]],
                "sentences": [sentences for _, sentences in row["context"]],
            },
        }
        for row in hotpot_rows
    ]
    got, expected = DATASETS["hotpotqa"].of_rows(columns, "x"), DATASETS["hotpotqa"].read(files["hotpotqa"])
    assert (got.documents, got.items, got.digest) == (expected.documents, expected.items, expected.digest)


def test_tasks_that_cannot_be_run_here_are_left_out_with_the_reason(build, answered, caplog) -> None:
    suite = build(squad="rajpurkar/squad_v2", lengths=[1200], samples=1)
    left = [name for name in TASKS if name not in {task.name for task in suite.tasks}]
    assert "qa_1" in left and "vt" not in left
    summary = suite.summary(answered(suite, lambda task, one: ""))
    said = [note for note in summary.notes if " left out: " in note]
    assert [note.split()[0] for note in said] == left and summary.title == "Variant of RULER"
    assert "could not be read from the Hub" in next(note for note in said if note.startswith("qa_1"))
    assert all(note in caplog.text for note in said)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"lengths": ["32k"]}, ConfigError, "allowed: up to 16384"),
        ({"lengths": [200]}, ConfigError, "niah_single_1 does not fit a length of 200 .* at least"),
        ({"tasks": ["niah"]}, ConfigError, r"suite.tasks=\['niah'\]; allowed: each once of niah_single_1"),
        ({"squad": None}, ConfigError, "suite.squad=null.*dev-v2.0.json"),
        (
            {"squad": "rajpurkar/squad_v2", "tasks": ["qa_1"]},
            DataError,
            "could not be read from the Hub.*suite.squad=FILE",
        ),
        ({"hotpotqa": "/nowhere.json"}, DataError, "hotpotqa: nothing at /nowhere.json"),
        ({"haystack": "/nowhere"}, DataError, "haystack: nothing at /nowhere"),
        ({"words": "english"}, ConfigError, "suite.words=english; allowed: longtrain, wonderwords"),
        ({"samples": 0}, ConfigError, "suite.samples=0"),
        ({"samples": 400}, DataError, "question 399 of"),
    ],
)
def test_settings_that_cannot_be(build, changed, error, message: str) -> None:
    with pytest.raises(error, match=message):
        build(**changed)

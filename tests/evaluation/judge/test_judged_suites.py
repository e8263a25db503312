"""The suites mtbench and longbench_write: prompts, temperatures, names of results, early refusals."""

from __future__ import annotations

import json
import lzma
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from longtrain.assets import asset_dir
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, DataError, LongtrainError
from longtrain.evaluation.harness.protocol import prompt_room
from longtrain.evaluation.judge.prompts import mt_bench_prompts
from longtrain.evaluation.judge.rubrics import DIMENSIONS, MtBenchRubric
from longtrain.evaluation.records import Record, Turn
from longtrain.evaluation.suite import Suite
from longtrain.evaluation.suites import longbench_write, mtbench
from longtrain.evaluation.task import Example, rows_sha256

JUDGE = {
    "url": None,
    "model": None,
    "key_env": None,
    "prompts": None,
    "temperature": 0,
    "max_tokens": 2048,
    "body": None,
    "tries": 1,
    "retries": 6,
    "concurrency": 8,
    "timeout_s": 120,
}
WHERE = {"url": "http://localhost:1/v1", "model": "judge"}
HERE = {**JUDGE, **WHERE}
LONG_JUDGE = {**JUDGE, "temperature": 0.5, "max_tokens": 1024, "tries": 5}
GREEDY = Sampling()
CATEGORIES = list(mtbench.TEMPERATURES)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(asset_dir("bundled") / "tiny")


@pytest.fixture
def target(tokenizer: PreTrainedTokenizerBase) -> Any:
    return SimpleNamespace(
        info=SimpleNamespace(name="tiny", max_positions=4096),
        tokenizer=tokenizer,
        require_tokenizer=lambda: tokenizer,
    )


def questions() -> list[dict[str, Any]]:
    return [
        {"question_id": 81 + i, "category": name, "turns": [f"First {i} {{x}}?", f"Second {i}?"], "more": 1}
        for i, name in enumerate(name for name in CATEGORIES for _ in range(10))
    ]


def references() -> list[dict[str, Any]]:
    ids = [row["question_id"] for row in questions() if row["category"] in ("math", "reasoning", "coding")]
    return [{"question_id": i, "choices": [{"index": 0, "turns": [f"a{i}", f"b{i}"]}]} for i in ids]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(lzma.compress(text.encode()) if path.suffix == ".xz" else text.encode())
    return str(path)


@pytest.fixture(autouse=True)
def _published(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of these tests stand for the published ones."""
    rows = [
        Example(str(row["question_id"]), {key: row[key] for key in mtbench.FIELDS}) for row in questions()
    ]
    texts = {str(row["question_id"]): row["choices"][0]["turns"] for row in references()}
    sha256 = MtBenchRubric(mt_bench_prompts(), texts).settings()["references_sha256"]
    known = replace(mtbench.PUBLISHED, sha256={mtbench.NAME: rows_sha256(rows)[:16]})
    monkeypatch.setattr(mtbench, "PUBLISHED", known)
    monkeypatch.setattr(mtbench, "REFERENCES_SHA256", sha256)
    english = frozenset(longbench_write.row_hash(Example("", row)) for row in requests(60))
    monkeypatch.setattr(longbench_write, "ENGLISH", english)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    write(tmp_path / "mt_bench" / "question.jsonl.xz", questions())
    write(tmp_path / "mt_bench" / "reference_answer" / "gpt-4.jsonl", references())
    return str(tmp_path / "mt_bench")


def mt_bench(target: Any, data: str | None, sampling: Sampling = GREEDY, **changed: Any) -> Suite:
    settings = {
        "name": "mtbench",
        "data": data,
        "references": None,
        "limit": None,
        "chat": True,
        "temperature": None,
        "max_new_tokens": 1024,
        "judge": JUDGE,
    }
    return mtbench.build({**settings, **changed}, target, seed=0, sampling=sampling)


def long_write(target: Any, data: str | None, sampling: Sampling = GREEDY, **changed: Any) -> Suite:
    settings = {
        "name": "longbench_write",
        "data": data,
        "limit": None,
        "chat": True,
        "temperature": 0.5,
        "max_new_tokens": 32768,
        "judge": LONG_JUDGE,
    }
    return longbench_write.build({**settings, **changed}, target, seed=0, sampling=sampling)


def answered(suite: Suite, text: str, **values: Any) -> list[Record]:
    (task,) = suite.tasks
    n_turns = getattr(task, "n_turns", 1)
    turns = (Turn(text, (1,), "stop_id", 4, 4.0),) * n_turns
    return [
        Record("full", task.name, row.id, task.facets(row), turns=turns, **values) for row in task.examples()
    ]


def test_mt_bench_is_as_published(target: Any, folder: str) -> None:
    suite = mt_bench(target, folder, judge=HERE)
    (task,) = suite.tasks
    rows = list(task.examples())
    assert len(rows) == 80
    assert rows[0].id == "81"
    assert [task.temperature(row) for row in rows[::10]] == [0.7, 0.7, 0.0, 0.0, 0.0, 0.0, 0.1, 0.1]
    assert (task.max_new_tokens, task.n_turns, task.chat) == (1024, 2, True)
    assert task.score("x", rows[0]) is None
    assert task.facets(rows[35]) == {"category": "math"}
    assert task.references(rows[35]) == ["a116", "b116"]
    assert task.references(rows[0]) == []
    assert suite.scale.maximum == 10
    summary = suite.summary({task.name: answered(suite, "x")})
    assert summary.title == "MT-Bench"
    assert summary.notes[0] == "judged by judge"


def test_conversations(target: Any, folder: str, tokenizer: PreTrainedTokenizerBase) -> None:
    (task,) = mt_bench(target, folder).tasks
    row = next(task.examples())
    first = task.encode(row, tokenizer, max_tokens=100)
    assert tokenizer.decode(first.ids) == "<|user|>First 0 {x}?<|assistant|>"
    second = task.encode(row, tokenizer, max_tokens=100, answers=[" So it is. \n"])
    whole = "<|user|>First 0 {x}?<|assistant|>So it is.<|end|><|user|>Second 0?<|assistant|>"
    assert tokenizer.decode(second.ids) == whole
    assert not (first.cut or second.cut)
    (plain,) = mt_bench(target, folder, chat=False).tasks
    told = plain.encode(row, tokenizer, max_tokens=100, answers=["So"])
    assert "### User:\nFirst 0 {x}?\n\n### Assistant:\nSo\n\n### User:\n" in tokenizer.decode(told.ids)


@pytest.mark.parametrize("room", [20, 21, 30, 54, 90])
def test_a_conversation_that_is_too_long(
    target: Any, folder: str, tokenizer: PreTrainedTokenizerBase, room: int
) -> None:
    (task,) = mt_bench(target, folder, max_new_tokens=10).tasks
    row = next(task.examples())
    answer = " ".join(f"word{i}" for i in range(90))
    made = task.encode(row, tokenizer, max_tokens=room, answers=[answer])
    text = tokenizer.decode(made.ids)
    assert made.cut
    assert room + 10 - 8 <= len(made.ids) <= room + 10  # an earlier answer has its own room
    assert text.startswith("<|user|>First 0 {x}?<|assistant|>w")
    assert text.endswith("9<|end|><|user|>Second 0?<|assistant|>")
    with pytest.raises(ConfigError, match="does not fit into 12 tokens"):
        task.encode(row, tokenizer, max_tokens=2, answers=[answer])


def test_departures_of_mt_bench_are_in_its_name(target: Any, folder: str) -> None:
    suite = mt_bench(target, folder, Sampling(top_k=7), limit=3, temperature=0, max_new_tokens=64, chat=False)
    summary = suite.summary({"mt_bench": answered(suite, "x")})
    assert summary.title == "Variant of MT-Bench"
    assert summary.notes[:5] == (
        "3 of 80 rows of mt_bench",
        "suite.temperature=0.0 instead of null",
        "suite.max_new_tokens=64 instead of 1024",
        "without chat template",
        "answers drawn with top_k 7, which the benchmark does not set",
    )


@pytest.mark.parametrize("top_k", [0, 50])
def test_the_default_top_k_of_the_official_programs_keeps_the_name(
    target: Any, folder: str, tmp_path: Path, top_k: int
) -> None:
    sampling = Sampling(0.7, top_k=top_k)
    questions_, requests_ = (
        mt_bench(target, folder, sampling),
        long_write(target, write(tmp_path / "all.jsonl", requests()), sampling),
    )
    for suite, title in ((questions_, "MT-Bench"), (requests_, "LongBench-Write")):
        (task,) = suite.tasks
        assert suite.summary({task.name: answered(suite, "x")}).title == title


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        ({"temperature": 0.7}, "suite.judge.temperature=0.7 instead of {temperature:.1f}"),
        ({"temperature": None}, "suite.judge.temperature=null instead of {temperature:.1f}"),
        ({"max_tokens": 512}, "suite.judge.max_tokens=512 instead of {max_tokens}"),
        ({"max_tokens": None}, "suite.judge.max_tokens=null instead of {max_tokens}"),
        ({"tries": 3}, "suite.judge.tries=3 instead of {tries}"),
        ({"body": {"top_p": 0.1}}, "judge asked with further fields: top_p"),
    ],
)
def test_another_judging_is_in_the_name(
    target: Any, folder: str, tmp_path: Path, judge: dict[str, Any], said: str
) -> None:
    data = write(tmp_path / "all.jsonl", requests())
    for suite, usual in (
        (mt_bench(target, folder, judge={**HERE, **judge}), JUDGE),
        (long_write(target, data, judge={**LONG_JUDGE, **WHERE, **judge}), LONG_JUDGE),
    ):
        (task,) = suite.tasks
        summary = suite.summary({task.name: answered(suite, "x")})
        assert summary.title.startswith("Variant of ")
        assert summary.notes[0].startswith(said.format(**usual))


def test_a_judge_made_to_work_as_meant_keeps_the_name(target: Any, folder: str) -> None:
    body = {"chat_template_kwargs": {"enable_thinking": False}, "max_completion_tokens": 2048}
    suite = mt_bench(target, folder, judge={**HERE, "max_tokens": None, "body": body})
    summary = suite.summary({"mt_bench": answered(suite, "x")})
    assert summary.title == "MT-Bench"
    assert summary.notes[0] == "judged by judge, chat_template_kwargs: {'enable_thinking': False}"


def test_other_rows_do_not_have_the_name(target: Any, tmp_path: Path) -> None:
    """As many questions, requests and reference answers as published, in the same categories, and others."""
    rows = [{**row, "turns": ["Say a word.", "And one more."]} for row in questions()]
    write(tmp_path / "question.jsonl", rows)
    texts = [{**row, "choices": [{"turns": ["a", "b"]}]} for row in references()]
    write(tmp_path / "reference_answer" / "gpt-4.jsonl", texts)
    suite = mt_bench(target, str(tmp_path), judge=HERE)
    summary = suite.summary({"mt_bench": answered(suite, "x")})
    assert summary.title == "Variant of MT-Bench"
    assert summary.notes[:2] == (
        "rows of mt_bench that are not the published ones",
        "reference answers that are not the published ones",
    )
    other = [{**row, "prompt": f"{row['prompt']}!"} for row in requests()]
    suite = long_write(target, write(tmp_path / "other.jsonl", other))
    summary = suite.summary({"longbench_write": answered(suite, "x")})
    assert summary.title == "Variant of LongBench-Write"
    assert summary.notes[0] == "requests that are not the published ones"


def test_own_prompts_and_short_contexts_are_in_the_name(target: Any, folder: str, tmp_path: Path) -> None:
    texts = mt_bench_prompts().texts
    rows = [{"name": name, "system_prompt": "", "prompt_template": text} for name, (_, text) in texts.items()]
    own = write(tmp_path / "own.jsonl", rows)
    suite = mt_bench(target, folder, judge={**HERE, "prompts": own})
    summary = suite.summary({"mt_bench": answered(suite, "x", cut=True)})
    assert summary.title == "Variant of MT-Bench"
    assert summary.notes[0] == "judge prompts that are not the published ones"
    assert summary.notes[1] == "80 of 80 prompts cut in the middle"


def test_without_a_judge_the_result_says_what_to_pass(target: Any, folder: str) -> None:
    suite = mt_bench(target, folder)
    assert suite.marker is None
    summary = suite.summary({"mt_bench": answered(suite, "x")})
    assert any("suite.judge.url=" in note for note in summary.notes)
    assert summary.tasks == {}
    assert summary.average is None
    assert summary.extra == {"judge": None}


def test_figures_of_mt_bench(target: Any, folder: str) -> None:
    suite = mt_bench(target, folder, judge=HERE)
    judged = {"answered_as": "j", "reply": "well", "late": False}
    marks = [
        {"judgements": [{**judged, "mark": {"rating": 8.0}}, {**judged, "mark": None, "unjudged": "odd"}]},
        {"judgements": [{**judged, "mark": {"rating": 3.0}}, {**judged, "mark": {"rating": 5.0}}]},
    ]
    records = [r.marked(0.8, marks[0]) for r in answered(suite, "x")[:40]]
    records += [r.marked(0.4, marks[1]) for r in answered(suite, "x")[40:]]
    summary = suite.summary({"mt_bench": records})
    assert summary.tasks == {
        "mt_bench": round((40 * 8 + 40 * 8) / 120, 2)
    }  # over ratings, as FastChat has it
    assert summary.extra["judge"]["unjudged_reasons"] == {"odd": 40}
    assert summary.extra["mt_bench"]["turns"] == {"turn 1": 5.5, "turn 2": 5.0}
    assert any(
        "40 of 160 ratings of full could not be judged; the mean over the rest is 5.33" in note
        for note in summary.notes
    )
    assert "judged by judge" in summary.notes


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        ({"url": "localhost:8000"}, r"suite\.judge\.url=localhost:8000; allowed: an address"),
        ({"url": "http://x:99999/v1"}, r"suite\.judge\.url="),
        ({"url": "http://me:pw@x/v1"}, r"holds a user name or password"),
        ({"model": None}, r"suite\.judge\.model is not"),
        ({"key_env": "NO_SUCH_VARIABLE"}, r"key_env=NO_SUCH_VARIABLE and no such variable.*key_env=null"),
        ({"prompts": "nowhere.jsonl"}, r"suite\.judge\.prompts=nowhere\.jsonl is no file"),
        ({"temperature": 3}, r"suite\.judge\.temperature=3; allowed"),
        ({"max_tokens": 0}, r"suite\.judge\.max_tokens=0; allowed"),
        ({"tries": 0}, r"suite\.judge\.tries=0; allowed"),
        ({"concurrency": 0}, r"suite\.judge\.concurrency=0; allowed"),
        ({"timeout_s": 0}, r"suite\.judge\.timeout_s=0; allowed"),
        ({"body": "x"}, r"suite\.judge\.body=x; allowed"),
        ({"body": {"model": "y"}}, r"suite\.judge\.body\.model cannot be set"),
        ({"keyenv": "x"}, r"unknown key 'suite\.judge\.keyenv'; known: url"),
    ],
)
def test_a_wrong_judge_is_refused_before_anything_runs(
    target: Any, folder: str, judge: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        mt_bench(target, folder, judge={**HERE, **judge})


def test_the_client_package_is_asked_for(target: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    assert mt_bench(target, folder).marker is None
    with pytest.raises(ConfigError, match=r"pip install 'longtrain\[judge\]'"):
        mt_bench(target, folder, judge=HERE)


def test_the_key_comes_from_the_environment(
    target: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", " k3y\n")
    suite = mt_bench(target, folder, judge={**HERE, "key_env": "MY_KEY"})
    assert suite.marker is not None
    assert suite.marker.judge.key == "k3y"  # type: ignore[attr-defined]


def test_wrong_questions(target: Any, tmp_path: Path) -> None:
    rows = questions()
    cases = [
        ([{**rows[0], "turns": ["one"]}], r"row 1: field 'turns' must hold two texts"),
        ([rows[0], {"question_id": 1, "turns": ["a", "b"]}], r":2: field 'category' is missing"),
        ([{**rows[0], "category": 3}], r"field 'category' is an int; it must be str"),
        ([rows[0], rows[0]], r"two examples named '81'"),
        ([], r"holds no row"),
    ]
    for number, (bad, said) in enumerate(cases):
        with pytest.raises(DataError, match=said):
            mt_bench(target, write(tmp_path / f"{number}.jsonl", bad))
    with pytest.raises(ConfigError, match=r"suite\.data=FOLDER with question\.jsonl"):
        mt_bench(target, None)
    with pytest.raises(LongtrainError, match="nowhere"):
        mt_bench(target, str(tmp_path / "nowhere.jsonl"))


def test_reference_answers(target: Any, folder: str, tmp_path: Path) -> None:
    alone = write(tmp_path / "alone.jsonl", questions())
    assert mt_bench(target, alone).marker is None  # nobody needs them yet
    with pytest.raises(DataError, match=r"question 111 \(math\) is judged against.*suite\.references=FILE"):
        mt_bench(target, alone, judge=HERE)
    good = write(tmp_path / "good.jsonl", references())
    one, two = mt_bench(target, alone, judge=HERE, references=good), mt_bench(target, folder, judge=HERE)
    assert one.marker is not None
    assert two.marker is not None
    assert one.marker.settings() == two.marker.settings()  # type: ignore[attr-defined]
    short = write(tmp_path / "short.jsonl", [{"question_id": 1, "choices": [{"turns": ["a"]}]}])
    with pytest.raises(DataError, match=r"short\.jsonl:1: field 'choices' must hold two texts"):
        mt_bench(target, alone, references=short)


def requests(count: int = 120) -> list[dict[str, Any]]:
    lengths = [100, 499, 500, 1999, 2000, 3999, 4000, 12000]
    return [
        {
            "prompt": f"Write “text” {i} {{x}}" + ("" if i < 60 else " 文"),
            "type": "News",
            "length": lengths[i % 8],
        }
        for i in range(count)
    ]


def test_longbench_write_is_as_published(target: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "all.jsonl", requests())
    suite = long_write(target, data)
    (task,) = suite.tasks
    rows = list(task.examples())
    assert (len(rows), task.max_new_tokens, task.temperature(rows[0])) == (120, 32768, 0.5)
    assert task.prompt(rows[3]) == "Write “text” 3 {x}"
    groups = [task.facets(row)["wanted"] for row in rows[:8]]
    assert groups == ["0-500"] * 2 + ["500-2000"] * 2 + ["2000-4000"] * 2 + ["4000-"] * 2
    summary = suite.summary({task.name: answered(suite, "Some words here")})
    assert summary.title == "LongBench-Write"
    assert summary.tasks == {}
    assert any("suite.judge.url=" in note for note in summary.notes)
    assert summary.notes[0] == longbench_write.UNVERIFIED
    assert summary.extra["longbench_write"]["length"] is not None  # needs no judge
    assert summary.extra["longbench_write"]["quality"] is None


def test_texts_as_long_as_the_context_allows(
    target: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = write(tmp_path / "half.jsonl", requests(60))
    suite = long_write(target, data, max_new_tokens=None)
    (task,) = suite.tasks
    assert task.max_new_tokens < 4096
    room = prompt_room(task, target)  # what the harness gives prompts: the longest one just fits
    assert room == max(len(tokenizer(task.prompt(row)).input_ids) for row in task.examples())
    assert not any(task.encode(row, tokenizer, max_tokens=room).cut for row in task.examples())
    summary = suite.summary({task.name: answered(suite, "x")})
    assert summary.title == "Variant of LongBench-Write"
    assert summary.notes[0] == "60 of 120 rows of longbench_write"
    assert summary.notes[1] == f"suite.max_new_tokens={task.max_new_tokens} instead of 32768"
    assert summary.notes[2] == "the requests are the English ones"
    target.info.max_positions = 5
    with pytest.raises(ConfigError, match="the target's context is 5"):
        long_write(target, data, max_new_tokens=None)


def test_figures_of_longbench_write(target: Any, tmp_path: Path) -> None:
    data = write(tmp_path / "all.jsonl", [{**row, "length": 4} for row in requests()])
    judge = {**LONG_JUDGE, **WHERE}
    suite = long_write(target, data, judge=judge, temperature=0)
    judged = {"answered_as": "j", "reply": "well", "late": False}
    mark = {"judgements": [{**judged, "mark": {name: 4.0 for name in DIMENSIONS}}]}
    none = {"judgements": [{**judged, "mark": None, "unjudged": "odd"}]}
    records = answered(suite, "two words")
    records = [r.marked(0.625, mark) for r in records[:90]] + [r.marked(None, none) for r in records[90:]]
    summary = suite.summary({"longbench_write": records})
    assert summary.title == "Variant of LongBench-Write"
    assert "suite.temperature=0.0 instead of 0.5" in summary.notes
    found = summary.extra["longbench_write"]
    assert (found["quality"], found["length"], found["dimensions_mean"], found["marked"]) == (75, 50, 4, 90)
    assert summary.tasks == {"longbench_write": 62.5}
    assert any("30 of 120 texts of full could not be judged" in note for note in summary.notes)
    assert summary.extra["judge"]["temperature"] == 0.5


def test_wrong_requests(target: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 1: field 'length' is 0; it must be 1 or more"):
        long_write(target, write(tmp_path / "a.jsonl", [{"prompt": "x", "type": "y", "length": 0}]))
    with pytest.raises(DataError, match=r"field 'length' is missing"):
        long_write(target, write(tmp_path / "b.jsonl", [{"prompt": "x", "type": "y"}]))
    with pytest.raises(ConfigError, match=r"suite\.data=FILE \(LongWriter's"):
        long_write(target, None)

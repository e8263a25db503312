"""The judged suites from end to end: the eval job, the bundled target, a judge on this machine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from judge_server import Answer, Judge, in_turn, serve

from longtrain import cli
from longtrain.assets import asset_dir
from longtrain.errors import LongtrainError
from longtrain.evaluation.judge.rubrics import DIMENSIONS
from longtrain.jobs import eval as eval_job

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Write of the sea.", "Now shorter."]},
    {"question_id": 111, "category": "math", "turns": ["What is 2+2?", "And one more?"]},
    {"question_id": 131, "category": "extraction", "turns": ["Who is it: 'I am Ann'?", "And 'I am Bob'?"]},
]
REFERENCES = [{"question_id": 111, "choices": [{"turns": ["4", "5"]}]}]
REQUESTS = [{"prompt": f"Write {n} words of a ship.", "type": "Story", "length": n} for n in (5, 20, 40)]


def rows(path: Path, values: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def evaluate(home: Path, suite: str, judge: Judge | None, *overrides: str) -> dict[str, Any]:
    """Run the job; gives what it wrote."""
    data = home / "data"
    rows(data / "question.jsonl", QUESTIONS)
    rows(data / "reference_answer" / "gpt-4.jsonl", REFERENCES)
    requests = rows(data / "requests.jsonl", REQUESTS)
    where = data if suite == "mtbench" else requests
    common = ["target=tiny", "target.device=cpu", f"suite={suite}", f"suite.data={where}", f"home={home}"]
    common += ["suite.max_new_tokens=8", "suite.batch=2", "suite.bootstrap=20", "suite.judge.key_env=null"]
    if judge is not None:
        common += [f"suite.judge.url={judge.url}", "suite.judge.model=fake", "suite.judge.retries=0"]
    GlobalHydra.instance().clear()
    cli.mount()
    with initialize_config_dir(str(asset_dir("conf")), version_base="1.3"):
        cfg = compose("eval", overrides=[*common, *overrides])
    eval_job.run(cfg)
    return json.loads((folder_of(home, suite) / "results.json").read_text())


def folder_of(home: Path, suite: str) -> Path:
    return home / "runs" / "run" / "eval" / suite


def opinion(body: dict[str, Any], _: int) -> Answer:
    """A rating, or six marks, that depends on what was asked alone."""
    digest = hashlib.sha256(json.dumps(body["messages"]).encode()).digest()
    if "Reading Experience" in body["messages"][-1]["content"]:
        marks = {name: 1 + digest[i] % 5 for i, name in enumerate(DIMENSIONS)}
        return Answer(f"```json\n{json.dumps({'Analysis': 'so so', **marks}, indent=2)}\n```")
    return Answer(f"It is so. Rating: [[{1 + digest[0] % 10}]]")


def systems(results: dict[str, Any]) -> dict[str, Any]:
    return {system["name"]: system for system in results["systems"]}


def test_mt_bench_unjudged_interrupted_and_judged(tmp_path: Path) -> None:
    """A run gets a judge later, loses it half-way and goes on; its result is that of one without trouble."""
    home, other = tmp_path / "one", tmp_path / "two"
    both = ("suite.systems=[streaming_llm]", "suite.budgets=[8]")
    unjudged = evaluate(home, "mtbench", None, *both)
    assert any("suite.judge.url=" in note for note in unjudged["notes"])
    assert [task["unjudged"] for system in unjudged["systems"] for task in system["tasks"]] == [3, 3]
    ledgers = {path: path.read_bytes() for path in (folder_of(home, "mtbench") / "ledger").glob("*.jsonl")}

    def failing(body: dict[str, Any], number: int) -> Answer:
        return opinion(body, number) if number < 4 else Answer(status=503, body=b"restarting")

    with serve(failing) as judge:
        with pytest.raises(LongtrainError, match=r"status 503 \(restarting\).*4 of \d+ judgements are kept"):
            evaluate(home, "mtbench", judge, *both, "suite.judge.concurrency=1")
    with serve(opinion) as judge:
        resumed = evaluate(home, "mtbench", judge, *both)
        left = len(judge.requests)
        evaluate(other, "mtbench", judge, *both)
        assert 6 < left + 4 <= 12  # twelve answers, those that both systems gave once
        assert len(judge.requests) == left + (left + 4)
    assert all(path.read_bytes() == content for path, content in ledgers.items())  # texts were kept

    for name in ("results.json", "examples.jsonl", "table.md"):
        here, there = (folder_of(one, "mtbench") / name for one in (home, other))
        assert here.read_bytes() == there.read_bytes(), name
    timings = [json.loads((folder_of(one, "mtbench") / "timings.json").read_text()) for one in (home, other)]
    assert [len(one["judge"]["hosts"]) for one in timings] == [2, 1]  # judged at two places, and at one
    assert resumed["protocol"]["settings"]["judge"]["model"] == "fake"
    assert resumed["protocol"]["hash"] != unjudged["protocol"]["hash"]
    full = systems(resumed)["full"]
    assert full["extra"]["judge"]["judgements"] == 6
    assert full["tasks"][0]["official"] == pytest.approx(full["tasks"][0]["score"]["value"], abs=0.005)
    assert {cell["facets"]["category"] for cell in resumed["cells"]} == {"writing", "math", "extraction"}
    table = (folder_of(home, "mtbench") / "table.md").read_text()
    assert "| system | all ratings | turn 1 | turn 2 |" in table
    assert f"| full | {full['extra']['mt_bench']['score']:.2f} | " in table
    examples = [
        json.loads(line) for line in (folder_of(home, "mtbench") / "examples.jsonl").read_text().splitlines()
    ]
    assert [len(one["outputs"]["full"]["texts"]) for one in examples] == [2, 2, 2]
    assert {one["example"]: one["references"] for one in examples}["111"] == ["4", "5"]


def test_another_judge_reads_the_same_texts(tmp_path: Path) -> None:
    with serve(opinion) as judge:
        one = evaluate(tmp_path, "mtbench", judge)
        ledger = next((folder_of(tmp_path, "mtbench") / "ledger").glob("full*.jsonl"))
        before = ledger.read_bytes()
        two = evaluate(tmp_path, "mtbench", judge, "suite.judge.temperature=0.3")
    assert ledger.read_bytes() == before
    assert len(judge.requests) == 12
    assert one["protocol"]["hash"] != two["protocol"]["hash"]


def test_a_judge_that_talks_nonsense_gives_no_score(tmp_path: Path) -> None:
    with serve(in_turn(Answer("Lovely\nanswers!"))) as judge:
        said = r"6 of 6 judgements of full without a mark \(6 x no mark.*'Lovely answers!'\).*asks again"
        with pytest.raises(LongtrainError, match=said):
            evaluate(tmp_path, "mtbench", judge, "suite.judge.tries=2")
        assert len(judge.requests) == 12
    results = json.loads((folder_of(tmp_path, "mtbench") / "results.json").read_text())
    (full,) = results["systems"]
    assert full["tasks"][0]["unjudged"] == 3
    assert full["tasks"][0]["official"] is None
    assert full["tasks"][0]["score"]["value"] is None
    assert full["extra"]["judge"]["unjudged"] == 6
    assert "6 of 6 ratings of full could not be judged; there is no score" in results["notes"]
    with serve(opinion) as judge:  # the same command, and the judge is well again
        results = evaluate(tmp_path, "mtbench", judge, "suite.judge.tries=2")
        assert len(judge.requests) == 6
    assert results["systems"][0]["tasks"][0]["score"]["value"] is not None
    again = "6 ratings of full were had by asking again in a later run, after 2 replies without a mark"
    assert again in results["notes"]


def test_some_nonsense_is_told_loudly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def moody(body: dict[str, Any], number: int) -> Answer:
        return Answer("Hm.") if number == 0 else opinion(body, number)

    with serve(moody) as judge:
        results = evaluate(tmp_path, "mtbench", judge, "suite.judge.concurrency=1")
    assert results["systems"][0]["extra"]["judge"]["unjudged"] == 1
    (told,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "left 1 of 6 judgements of full without a mark" in told
    assert "'Hm.'" in told


def test_longbench_write(tmp_path: Path) -> None:
    with serve(opinion) as judge:
        results = evaluate(tmp_path, "longbench_write", judge)
    assert len(judge.requests) == 3
    assert {request["temperature"] for request in judge.requests} == {0.5}
    (full,) = results["systems"]
    found = full["extra"]["longbench_write"]
    assert found["quality"] == pytest.approx(sum((v - 1) * 25 for v in found["dimensions"].values()) / 6)
    assert full["tasks"][0]["official"] == pytest.approx((found["quality"] + found["length"]) / 2, abs=0.005)
    assert full["tasks"][0]["score"]["value"] == pytest.approx(full["tasks"][0]["official"], abs=0.005)
    assert "the requests are the English ones" not in results["notes"]
    assert "3 of 120 rows of longbench_write" in results["notes"]
    table = (folder_of(tmp_path, "longbench_write") / "table.md").read_text()
    assert "| S (official) | S_q | S_l | raw mean | Relevance | " in table
    figures = [found[key] for key in ("score", "quality", "length", "dimensions_mean")]
    assert " | ".join(["| full", *(f"{figure:.2f}" for figure in figures)]) in table

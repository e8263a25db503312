"""Figures and report of the eviction suite from answers written by hand."""

import math

import pytest

from longtrain.decoding.evict import Budget
from longtrain.decoding.sampling import Sampling
from longtrain.errors import DataError
from longtrain.evaluation.eviction_protocol import ARTIFACT, BASELINE, FULL_CACHE, ORACLE, Contender, Protocol
from longtrain.evaluation.eviction_report import accuracy_picture, overhead_picture, summary, table
from longtrain.evaluation.eviction_scores import Figures
from longtrain.evaluation.figures.statistics import paired_quotient, wilson

TASKS = ("needles", "table")


def make(budget: Budget) -> None:
    raise AssertionError("figures run nothing")


CONTENDERS = [
    FULL_CACHE,
    Contender("oracle", ORACLE, make),
    Contender("mine", ARTIFACT, make, {"weights": "abc"}),
    Contender("snapkv", BASELINE, make, {"policy": "snapkv"}),
]


def row(budget: str | None, right: str, share: float = 0.5) -> dict:
    """Answers right (1) or wrong (0), the two tasks in turn."""
    answers = [{"task": TASKS[i % 2], "right": int(r), "share": share} for i, r in enumerate(right)]
    rows = {"kept_rows": 8.0 * len(right), "prompt_rows": 64 * len(right)}
    sizes = {"bytes_before": 1000 * len(right), "bytes_after": 250 * len(right)}
    return {"budget": budget, "answers": answers, "wrong": [], **rows, **sizes}


def piece(*rows: dict, tau: float | None = None, times: tuple[list, list] = ((), ())) -> dict:
    ranks = (
        []
        if tau is None
        else [
            {"recall": {**dict.fromkeys(("64", "128", "256"), t), "512": None}, "tau": t}
            for t in (tau, None or tau + 0.2)
        ]
    )
    return {
        "budgets": list(rows),
        "ranks": ranks,
        "times": {"budget": "8", "first_token_s": list(times[0]), "full_s": list(times[1])},
    }


PIECES = {
    ("full", 64): piece(row(None, "11111100")),
    ("oracle", 64): piece(row("8", "11111000"), row("16", "11111110"), tau=0.8),
    ("mine", 64): piece(
        row("8", "11110000"), row("16", "11111100"), tau=0.5, times=([1.1, 1.3, 1.2], [1.0] * 3)
    ),
    ("snapkv", 64): piece(row("8", "10000000"), row("16", "11111100"), tau=0.1, times=([1.05], [1.0])),
}
PROTOCOL = Protocol((64,), (Budget(tokens=8), Budget(tokens=16)), prompts=8, tasks=TASKS)


@pytest.fixture
def figures() -> Figures:
    return Figures(CONTENDERS, PROTOCOL, PIECES, resamples=400)


def test_shares_by_hand(figures: Figures) -> None:
    scores = figures.scores()
    found = {policy["name"]: policy["lengths"][0] for policy in scores["policies"]}
    mine = found["mine"]["budgets"][0]
    assert mine["exact"] == wilson(4, 8).to_json() and mine["of_full"]["value"] == 4 / 6
    assert mine["of_full"]["low"] < 4 / 6 < mine["of_full"]["high"] <= 1.0
    assert {task: found_["value"] for task, found_ in mine["by_task"].items()} == {
        "needles": 0.5,
        "table": 0.5,
    }
    assert (mine["kept_rows"], mine["kept_share"]) == (8, 0.125)
    assert (mine["bytes_before"], mine["bytes_after"], mine["share"]["value"]) == (1000, 250, 0.5)
    assert found["oracle"]["budgets"][1]["of_full"]["value"] == pytest.approx(7 / 6)
    assert found["mine"]["ranks"]["tau"] == pytest.approx(0.6)
    assert found["mine"]["ranks"]["recall"]["256"] == pytest.approx(0.6) and found["full"]["ranks"] is None
    assert found["mine"]["ranks"]["recall"]["512"] is None  # of prompts with no more tokens than that


def test_artifacts_are_compared_with_each_baseline_over_the_same_prompts(figures: Figures) -> None:
    first, second = figures.scores()["differences"]
    assert (first["first"], first["second"], first["budget"]) == ("mine", "snapkv", "8")
    assert first["exact"]["value"] == pytest.approx(3 / 8) and first["exact"]["low"] >= 0
    assert second["budget"] == "16" and set(second["exact"].values()) == {0.0, 8}


def test_times_are_medians_against_the_full_cache(figures: Figures) -> None:
    mine, snapkv = figures.timings()["rows"]
    assert mine["first_token_s"] == 1.2 and mine["overhead_share"] == pytest.approx(0.2)
    assert snapkv["name"] == "snapkv" and snapkv["overhead_s"] == pytest.approx(0.05)


def test_several_answers_a_prompt_are_pooled() -> None:
    protocol = Protocol(
        (64,), (Budget(tokens=8),), prompts=2, samples=4, tasks=TASKS, sampling=Sampling(temperature=1.0)
    )
    some = {("full", 64): piece(row(None, "31"))}
    cell = Figures([FULL_CACHE], protocol, some, resamples=50).scores()["policies"][0]["lengths"][0][
        "budgets"
    ][0]
    assert cell["exact"]["value"] == 0.5 and cell["exact"]["n"] == 2 and cell["share"]["value"] == 0.125
    assert (cell["exact"]["low"], cell["exact"]["high"]) == (0.25, 0.75)


def test_the_report(figures: Figures) -> None:
    scores, timings = {"target": "t", **figures.scores()}, {"device": "cpu", **figures.timings()}
    report = table(scores, timings)
    assert "| mine | 64 | 0.500 [" in report and "| mine | snapkv | 64 | 8 | 0.375 [" in report
    assert "| full | 64 | 0.750 [0.409, 0.929] | 0.750 [0.409, 0.929] |" in report
    assert "| mine | 64 | 8 | 3 | 1200.00 | 1000.00 | 200.00 | 20.00% |" in report
    assert "| mine | 64 | 2 | 0.600 | 0.600 | 0.600 | - | 0.600 |" in report
    assert "launched one by one" in report and "answer's rows alone" not in report
    said = "Exact match means exactly the values asked for, in any order"
    assert f"{said}." in report and "Exact match means" not in table(
        {**scores, "tasks": ["continue"]}, timings
    )
    assert f"{said}; or a quotation's first 8 words." in table(
        {**scores, "tasks": ["chains", "quote"]}, timings
    )
    assert summary(scores)[2] == ["mine", "64", "0.500", "0.750"]
    assert accuracy_picture(scores) == accuracy_picture(scores)
    assert overhead_picture(scores, timings).startswith(b"\x89PNG")


def test_a_quotient_of_paired_figures() -> None:
    found = paired_quotient([1, 0, 1, 0], [1, 1, 1, 1])
    assert (found.value, found.n) == (0.5, 4) and 0 <= found.low <= 0.5 <= found.high <= 1
    same = paired_quotient([1, 0, 1], [1, 0, 1])
    assert same.value == 1.0 and math.isnan(same.low)  # three that agree tell no interval
    assert paired_quotient([1, 1], [0, 0]).n == 0 and paired_quotient([], []).n == 0
    assert paired_quotient([1, 1], [1, 0]).value == 2.0  # a prompt that only the first got right counts
    with pytest.raises(DataError, match="2 and 1"):
        paired_quotient([1, 1], [1])

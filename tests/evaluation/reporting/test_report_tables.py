import copy
import re

import pytest

from longtrain.evaluation.analysis.acceptance import ACCEPTANCE
from longtrain.evaluation.reporting.comparisons import card_table, speed_table
from longtrain.evaluation.reporting.document import ReportTable, difference
from longtrain.evaluation.reporting.pictures import budget_rank, by_budget, headline, pictures
from longtrain.evaluation.reporting.tables import summary, table
from longtrain.tables import escaped


def lines_of(text, title):
    """Cells of the table below a heading."""
    part = text.split(f"## {title}\n\n", 1)[1].split("\n\n")[0]
    return [[one.strip() for one in re.split(r"(?<!\\)\|", line)[1:-1]] for line in part.splitlines()]


def test_the_table_says_title_notes_protocol_and_every_system(made):
    text = table(made.results)
    assert text.startswith("# Variant of LongBench: llama31_8b\n")
    assert "\n- 5 of 16 tasks; 10 rows of each, fewer than published\n" in text
    assert "protocol 3f9a1c0be27d4456." in text
    rows = lines_of(text, "Systems")
    assert [row[0] for row in rows[2:]] == [system.name for system in made.systems]
    assert all(len(row) == len(rows[0]) for row in rows)


def test_bold_is_larger_than_noise_and_nothing_else(made):
    rows = {row[0]: row for row in lines_of(table(made.results), "Systems")}
    for system in made.results["systems"]:
        if system["versus_full"] is not None:
            assert ("**" in rows[system["name"]][2]) == system["versus_full"]["larger_than_noise"]
    found = [system["versus_full"]["larger_than_noise"] for system in made.results["systems"][1:]]
    assert {True, False} == set(found)


def test_points_by_task_are_those_of_the_results(made):
    head, _, *rows = lines_of(table(made.results), "Score by task")
    for system, row in zip(made.results["systems"], rows, strict=True):
        points = {task["task"]: task["score"]["value"] for task in system["tasks"]}
        shown = {name: float(text.strip("*")) for name, text in zip(head[1:], row[1:], strict=True)}
        assert shown == pytest.approx(points, abs=0.0051)


def test_columns_that_nobody_fills_are_left_out(made):
    results = copy.deepcopy(made.results)
    results["systems"] = [system for system in results["systems"] if system["acceptance"] is None]
    header, rows = summary(results)
    assert header == ["system", "average score", "vs full", "cache kept"]
    assert all(len(row) == 4 for row in rows)


def test_with_many_tasks_and_few_systems_the_systems_are_columns(made):
    results = copy.deepcopy(made.results)
    results["systems"] = results["systems"][:2]
    for system in results["systems"]:
        system["tasks"] = [{**system["tasks"][0], "task": f"task{i}"} for i in range(12)]
    head, _, *rows = lines_of(table(results), "Score by task")
    assert head == ["task", "full", "streaming_llm@64"]
    assert len(rows) == 12


def test_what_differs_from_plain_decoding_is_named(made):
    results = copy.deepcopy(made.results)
    draft = next(system for system in results["systems"] if system["name"] == "longspec_llama8b")
    exact = draft["tasks"][0]["exactness"]
    exact.update(different=2, first=[{"example": "narrativeqa-3", "turn": 1, "position": 17}])
    text = table(results)
    assert "narrativeqa: 2 of 10 texts differ; narrativeqa-3 at token 17" in text
    assert "78/80 the same" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a|b", r"a\|b"),
        ("line\nbreak", "line break"),
        ("<script>", r"\<script\>"),
        ("snake_case", "snake_case"),
        ("_not_ *this*", r"\_not\_ \*this\*"),
        ("[x](y)", r"\[x\](y)"),
    ],
)
def test_names_cannot_break_a_table(text, shown):
    assert escaped(text) == shown


def test_a_difference_in_words():
    versus = {"difference": {"value": -3.1, "low": -4.2, "high": -2.0, "n": 9}, "larger_than_noise": True}
    assert difference(versus).markdown() == "**-3.10** [-4.20, -2.00]"
    assert difference(versus).plain() == "-3.10* [-4.20, -2.00]"
    assert difference(versus).html() == (
        '<td data-value="-3.1"><b>-3.10</b> <span class="range">[-4.20, -2.00]</span></td>'
    )
    assert difference({**versus, "larger_than_noise": False}).markdown() == "-3.10 [-4.20, -2.00]"
    assert difference(None) == "-"


def test_names_from_outside_are_escaped_in_every_form():
    made = ReportTable.of("<t>", [("<b>|", lambda one: one)], ["<img src=x>|*y*"])
    assert made.plain() == (["<b>|"], [["<img src=x>|*y*"]])
    assert made.markdown() == "## \\<t\\>\n\n| \\<b\\>\\| |\n| --- |\n| \\<img src=x\\>\\|\\*y\\* |"
    assert "&lt;img src=x&gt;|*y*" in made.html() and "<img" not in made.html()


@pytest.fixture(scope="module")
def drawn(made):
    return pictures(made.results)


def test_pictures_say_what_they_are_of(made, drawn):
    results = copy.deepcopy(made.results)
    results["target"]["name"] = "/models/some_$target/"
    lengths = [{"facets": {"length": length}} for length in (8192, 512, 2048)]
    assert headline({**results, "title": "Needle", "cells": lengths}) == (
        "Needle: some_$target, context of 512 to 8k tokens"
    )
    assert headline({**results, "title": "Needle", "cells": lengths[1:2]}).endswith("context of 512 tokens")
    assert headline({**results, "title": "Needle", "cells": []}) == "Needle: some_$target"
    others = pictures(results)
    assert all(others[name] != picture for name, picture in drawn.items())


def test_pictures_are_made_for_what_there_is(made, drawn):
    assert set(drawn) == {"budget.png", "acceptance.png", "needle.png"}
    assert all(content.startswith(b"\x89PNG") for content in drawn.values())
    assert drawn == pictures(made.results)
    plain = copy.deepcopy(made.results)
    plain["systems"], plain["cells"] = plain["systems"][:1], []
    assert pictures(plain) == {}


def test_budgets_are_lines_of_families_in_order(made):
    lines = by_budget(made.results)
    assert [place for place, _ in lines["snapkv"]] == ["64", "128", "256", "512"]
    assert "full" not in lines and "longspec_llama8b" not in lines
    assert sorted(["10%", "512", "5%", "64"], key=budget_rank) == ["64", "512", "5%", "10%"]


def test_an_acceptance_length_has_one_interval(made):
    """Where the score is the acceptance length, no second column or table says it again."""
    results = copy.deepcopy(made.results)
    results["scale"]["name"] = ACCEPTANCE
    header, rows = summary(results)
    assert "τ" in summary(made.results)[0] and "τ" not in header and len(rows) == len(made.systems)
    again = "## Acceptance length τ by task"
    assert again in table(made.results) and again not in table(results)


def test_a_card_has_scores_by_prompt_length_and_the_range_of_speeds(made):
    name = made.results["systems"][-1]["name"]
    timings = {"speed": [{"metrics": {"full": {"ratio": 1.0}, name: {"ratio": 1 + i / 2}}} for i in (1, 2)]}
    header, rows = card_table(made.results, timings)
    assert header == [
        *("system", "score", "vs full", "at 1k", "at 2k", "at 4k", "at 8k"), "τ", "accepted", "speed",
    ]  # fmt: skip
    assert [row[0] for row in rows] == [system["name"] for system in made.results["systems"]]
    assert rows[0][-1] == "1.00 ×" and rows[-1][-1] == "1.50 to 2.00 ×" and rows[1][-1] == "-"
    facets = made.results["systems"][1]["facets"]
    at = {one["value"]: one["score"] for one in facets if one["facet"] == "length"}
    assert rows[1][3].startswith(f"{at[1024]['value']:.2f} [")
    assert "speed" not in card_table(made.results, None)[0]


def timed(ratios, *, batch, task="lcc", peak=None):
    """A row of timings; a ratio of None means that memory ran out."""
    metrics = {
        name: {"failed": "out of memory"}
        if ratio is None
        else {
            "ratio": ratio, "ratio_range": [ratio, ratio], "tokens": 100, "decode_s": 10 / ratio,
            "first_token_s": 0.25 * batch, "first_token_overhead": 0.1, "peak_device_bytes": peak,
            "tokens_per_s": 10 * ratio, "end_to_end_tokens_per_s": 9.0, "end_to_end_ratio": 1.0,
            "ms_per_cycle": 2.0, "cache_bytes": 1 << 21, "draft_bytes": 0,
        }
        for name, ratio in ratios.items()
    }  # fmt: skip
    return {
        "task": task, "length": None, "prompts": 2, "batch": batch, "max_new_tokens": 64, "metrics": metrics,
    }  # fmt: skip


def test_speed_first_token_and_memory_stand_beside_the_scores(made):
    draft = made.results["systems"][-1]["name"]
    rows = [
        timed({"full": 1.0, draft: 2.0}, batch=1),
        timed({"full": 1.0, draft: 3.0}, batch=1, task="qmsum"),
        timed({"full": 1.0, draft: 0.9}, batch=8, peak=3 << 29),
        timed({"full": 1.0, draft: None}, batch=32),
    ]
    timings = {"device": "cuda:0", "speed": rows}
    header, lines = summary(made.results, timings)
    first = header.index("speed, batch 1")
    assert header[first : first + 4] == [
        "speed, batch 1", "speed, batch 8", "speed, batch 32", "ms to the first token, batch 1",
    ]  # fmt: skip
    assert lines[0][first : first + 4] == ["1.00 ×", "1.00 ×", "1.00 ×", "250.0 (250 to 250)"]
    # pooled: 200 tokens in 10 / 2 + 10 / 3 s, over 200 in 20 s
    assert lines[-1][first : first + 3] == ["2.40 × (2.00 to 3.00)", "0.90 ×", "out of memory"]
    assert lines[1][first : first + 3] == ["-", "-", "-"]  # systems that were not timed
    at_eight = {"device": "cuda:0", "speed": rows[2:3]}
    header, lines = summary(made.results, at_eight)
    assert "speed" in header and lines[-1][header.index("peak memory")] == "1.50 GiB"
    shown = table(made.results, timings)
    assert "Timed on cuda:0: speed is tokens/s without prefill over that of full;" in shown
    assert "CPU" not in shown and pictures(made.results, timings)["speed.png"].startswith(b"\x89PNG")
    assert "speed.png" not in pictures(made.results, at_eight)
    assert "| out of memory |" in speed_table(made.results, timings)
    assert card_table(made.results, timings)[1][-1][-1] == "2.00 to 3.00 ×"  # of the smallest batch
    on_cpu = table(made.results, {"device": "cpu", "speed": rows[:1]})
    assert "Peak memory is measured on CUDA devices only." in on_cpu and "peak memory |" not in on_cpu
    assert table(made.results, {}) == table(made.results)

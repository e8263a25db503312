"""Reports of systems timed in turn (`speed.md`) and of two runs (`compare.md`), and an artifact's card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longtrain.evaluation.analysis.acceptance import ACCEPTANCE
from longtrain.evaluation.reporting.document import (
    Bullets,
    Cell,
    Column,
    Paragraph,
    Part,
    ReportTable,
    columns_of,
    difference,
    interval,
    number,
    to_markdown,
)
from longtrain.evaluation.reporting.speeds import CPU_NOTE, first_batch, memory, of_first_tokens, times
from longtrain.evaluation.reporting.tables import FULL, NAME, PLAIN, acceptance_rate, score_digits, tau
from longtrain.tables import DASH, tokens

Json = dict[str, Any]
Plain = tuple[list[str], list[list[str]]]
"""Headings and table lines as strings."""
FIRST_TOKEN: list[Column] = [
    ("ms to the first token", lambda one: number(_ms(one.get("first_token_s")), 1)),
    ("more than the full cache", lambda one: _more(one.get("first_token_overhead"))),
]
"""Columns for one-token answers, whose time shows the cost of eviction or selection on top of the prefill."""


def compare_table(compared: Json) -> str:
    """The Markdown report of a comparison, of `compare.compare`."""
    return to_markdown(compare_report(compared))


def compare_summary(compared: Json) -> Plain:
    """Headings and lines of a comparison for the terminal, one line for each pair of systems."""
    return _pairs(compared).plain()


def compare_report(compared: Json) -> list[Part]:
    """Build the report of a comparison.

    Args:
        compared: the output of `compare.compare`.
    """
    first, second = (run["label"] for run in compared["runs"])
    pairs, digits = compared["pairs"], score_digits(compared["scale"])
    scores = {(pair["name"], task["task"]): task["score"] for pair in pairs for task in pair["tasks"]}
    names = dict.fromkeys(task for _, task in scores)
    own = dict.fromkeys(name for pair in pairs for name in pair["metrics"])
    metrics = columns_of(own, lambda pair, name: difference(pair["metrics"].get(name), digits=4))
    tasks = columns_of(names, lambda pair, task: difference(scores.get((pair["name"], task)), digits=digits))
    return [
        Paragraph(f"{compared['title']}: {first} and {second}", title=True),
        Paragraph(
            f"Difference: {second} minus {first}, over the examples that both have; bold where larger than "
            f"noise. Protocol {compared['protocol']['hash']}."
        ),
        Bullets(compared["notes"]),
        _pairs(compared),
        ReportTable.of("Further metrics", [NAME, *metrics], pairs if own else []),
        ReportTable.of("By task", [NAME, *tasks], pairs if len(names) > 1 else []),
    ]


def _pairs(compared: Json) -> ReportTable:
    """One line for each pair: both scores, their difference, and the difference in acceptance length."""
    scale, (first, second) = compared["scale"]["name"], (run["label"] for run in compared["runs"])
    digits = score_digits(compared["scale"])
    columns: list[Column] = [
        NAME,
        (f"{scale}, {first}", lambda pair: interval(pair["average"]["first"], digits)),
        (f"{scale}, {second}", lambda pair: interval(pair["average"]["second"], digits)),
        ("difference", lambda pair: difference(pair["average"], digits=digits)),
        ("difference of τ", lambda pair: difference(pair["acceptance"])),
        ("examples", lambda pair: str(pair["examples"])),
    ]
    return ReportTable.of("", columns, compared["pairs"]).without_empty(kept=(0, 5))


def speed_table(results: Json, timings: Json) -> str:
    """The Markdown report of `timings["speed"]`, systems timed alternately; empty if nothing was timed.

    Args:
        results: the output of `results.assemble`.
        timings: the content of timings.json.
    """
    if not timings.get("speed"):
        return ""
    about = f"Speed: {results['title']}, {results['target']['name']} on {timings['device']}"
    return to_markdown([Paragraph(about, title=True), *speed_report(results, timings)])


def speed_report(results: Json, timings: Json, *, title: str = "") -> list[Part]:
    """The table of timed systems and an explanation of its numbers; empty if none was timed."""
    timed = timings.get("speed", [])
    if not timed:
        return []
    batches = list(dict.fromkeys(row["batch"] for row in timed))
    several = len(batches) > 1
    columns: list[Column] = [
        ("task", lambda one: one["task"]),
        ("prompt", lambda one: DASH if one["length"] is None else tokens(one["length"])),
        ("batch", lambda one: str(one["batch"]) if several else DASH),
        ("system", lambda one: one["system"]),
        *(FIRST_TOKEN if of_first_tokens(timings) else _decoding(results)),
        ("cache", lambda one: memory(one.get("cache_bytes", 0) + one.get("draft_bytes", 0))),
        ("peak memory", lambda one: memory(one.get("peak_device_bytes"))),
        ("failed", lambda one: one.get("failed", DASH)),
    ]
    lines = [f"{row['prompts']} of {_place(row)} ({_answers(row['max_new_tokens'])} each)" for row in timed]
    prompts = ", ".join(dict.fromkeys(lines))
    first = next(iter(timed[0]["metrics"]))
    base = f"{FULL} ({PLAIN})" if first == FULL else first
    meaning = (
        f"Compared with {base}; medians over batches."
        if of_first_tokens(timings)
        else f"Speeds are ratios to {base}; tokens/s and its ratio leave out prefill (a draft's own "
        "included); in brackets the smallest and the largest ratio of a batch. τ is over all prompts of "
        "the run."
    )
    return [
        ReportTable.of(title, columns, _timed_systems(timings)).without_empty(),
        Paragraph(
            f"Every system in turn on the same prompts, {', '.join(map(str, batches))} at a time, in one "
            f"process: {prompts}. {meaning}"
        ),
        *([Paragraph(CPU_NOTE)] if str(timings["device"]).startswith("cpu") else []),
    ]


def speed_summary(timings: Json) -> Plain:
    """Headings and one line for each timed system, for the terminal; no lines if nothing was timed."""
    rows = timings.get("speed", [])
    several = len({_place(row) for row in rows}) > 1
    batches = len({row["batch"] for row in rows})
    first = next(iter(rows[0]["metrics"])) if rows else ""
    columns: list[Column] = [
        ("system", lambda one: f"{one['system']}, {_place(one)}" if several else str(one["system"])),
        ("batch", lambda one: str(one["batch"]) if batches > 1 else DASH),
    ]
    if of_first_tokens(timings):
        columns += FIRST_TOKEN
    else:
        columns += [
            ("tokens/s", lambda one: number(one.get("tokens_per_s"), 1)),
            (f"speed over {PLAIN if first == FULL else first}", _ratio),
            ("ms a cycle", lambda one: number(one.get("ms_per_cycle"), 1)),
        ]
    columns.append(("failed", lambda one: one.get("failed", DASH)))
    return ReportTable.of("", columns, _timed_systems(timings)).without_empty().plain()


def card_table(results: Json, timings: Json | None) -> Plain:
    """The table of an artifact's card: one line for each system, with its score by prompt length and its
    speed.

    Args:
        results: the output of `results.assemble`.
        timings: the content of timings.json; speeds are ratios to the first system of each timed prompt.
    """
    scale, systems = results["scale"]["name"], results["systems"]
    digits = score_digits(results["scale"])
    scores = {
        (system["name"], one["value"]): one["score"]
        for system in systems
        for one in system["facets"]
        if one["facet"] == "length" and one["score"]["value"] is not None
    }
    lengths = sorted({length for _, length in scores})
    timed = [row["metrics"] for row in first_batch(timings or {})]
    columns: list[Column] = [
        NAME,
        (scale, lambda one: interval(one["average"], digits)),
        ("vs full", lambda one: difference(one["versus_full"])),
        *columns_of(
            lengths if len(lengths) > 1 else (),
            lambda one, length: interval(scores.get((one["name"], length)), digits),
            lambda length: f"at {tokens(length)}",
        ),
        ("τ", lambda one: DASH if scale == ACCEPTANCE else tau(one)),
        ("accepted", acceptance_rate),
        ("speed", lambda one: _between([row.get(one["name"], {}).get("ratio") for row in timed])),
    ]
    return ReportTable.of("", columns, systems).without_empty().plain()


def _timed_systems(timings: Json) -> list[Json]:
    """One entry for each timed system of each task or length and batch."""
    rows = timings.get("speed", [])
    return [{**row, "system": name, **one} for row in rows for name, one in row["metrics"].items()]


def _decoding(results: Json) -> list[Column]:
    """Columns for answers of several tokens."""
    return [
        ("τ", lambda one: number(_tau_at(results, one))),
        ("tokens/s", lambda one: number(one.get("tokens_per_s"), 1)),
        ("speed", _ratio),
        ("with prefill", lambda one: number(one.get("end_to_end_tokens_per_s"), 1)),
        ("speed with prefill", lambda one: times(one.get("end_to_end_ratio"))),
        ("ms a cycle", lambda one: number(one.get("ms_per_cycle"), 1)),
        ("ms to the first token", lambda one: number(_ms(one.get("first_token_s")), 1)),
    ]


def _tau_at(results: Json, row: Json) -> float | None:
    """The acceptance length of a system in a task, or at one of the task's prompt lengths."""
    if row["length"] is not None:
        place = (row["system"], row["task"], {"length": row["length"]})
        found = [one for one in results["cells"] if (one["system"], one["task"], one["facets"]) == place]
        if found or row["task"] != str(row["length"]):  # otherwise the task consists of this length only
            return found[0]["acceptance"]["value"] if found and found[0]["acceptance"] else None
    systems = [system for system in results["systems"] if system["name"] == row["system"]]
    tasks = [task for system in systems for task in system["tasks"] if task["task"] == row["task"]]
    return tasks[0]["acceptance"]["tau"]["value"] if tasks and tasks[0]["acceptance"] else None


def _ratio(one: Json) -> Cell | str:
    """A system's speed ratio, with the range over batches if they differ."""
    return times(one.get("ratio"), one.get("ratio_range"))


def _between(ratios: Sequence[float | None]) -> Cell | str:
    """The range of the known ratios."""
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return DASH
    low, high = (f"{end:.2f}" for end in (min(known), max(known)))
    return f"{low} ×" if low == high else f"{low} to {high} ×"


def _answers(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _place(row: Mapping[str, Any]) -> str:
    task, length = str(row["task"]), row["length"]
    return task if length is None or task == tokens(length) else f"{task} at {tokens(length)}"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _more(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:+.1f}%"

"""What is set side by side: systems timed in turn (`speed.md`), two runs (`compare.md`), a card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longtrain.evaluation.figures.acceptance import ACCEPTANCE
from longtrain.evaluation.reporting.tables import (
    FULL,
    PLAIN,
    Column,
    Sheet,
    difference,
    joined,
    section,
    sheet,
)
from longtrain.tables import DASH, escaped, fixed, interval, markdown, percent, tokens, without_empty

Json = dict[str, Any]
CPU_NOTE = (
    "Measured on a CPU, where other work and the number of threads change a time by a factor from run to "
    "run: these figures say nothing about speed on a GPU."
)
"""What stands below speeds of a CPU."""
FIRST_TOKEN: list[Column] = [
    ("ms to the first token", lambda one: fixed(1e3 * one["first_token_s"], 1)),
    ("more than the full cache", lambda one: f"{100 * one['first_token_overhead']:+.1f}%"),
]
"""Figures of answers of one token, which are timed for what choosing entries adds to the prefill."""


def compare_table(compared: Json) -> str:
    """The Markdown report of a comparison, of `compare.compare`."""
    first, second = (escaped(run["label"]) for run in compared["runs"])
    pairs = compared["pairs"]
    own = dict.fromkeys(name for pair in pairs for name in pair["figures"])
    by = {id(pair): {task["task"]: task["score"] for task in pair["tasks"]} for pair in pairs}
    names = dict.fromkeys(name for found in by.values() for name in found)
    name_of: Column = ("system", lambda pair: escaped(pair["name"]))
    figures = [
        (name, lambda pair, name=name: difference(pair["figures"].get(name), digits=4)) for name in own
    ]
    tasks = [(name, lambda pair, name=name: difference(by[id(pair)].get(name))) for name in names]
    return joined(
        f"# {escaped(compared['title'])}: {first} and {second}",
        f"Difference: {second} minus {first}, over the examples that both have; bold where larger than "
        f"noise. Protocol `{compared['protocol']['hash']}`.",
        "\n".join(f"- {escaped(note)}" for note in compared["notes"]),
        markdown(*compare_summary(compared, plain=False)),
        section("Further figures", sheet([name_of, *figures], pairs)) if own else "",
        section("By task", sheet([name_of, *tasks], pairs)) if len(names) > 1 else "",
    )


def compare_summary(compared: Json, *, plain: bool = True) -> Sheet:
    """Head and a line a pair: both figures, their difference, and that of the acceptance length."""
    scale, (first, second) = compared["scale"]["name"], (run["label"] for run in compared["runs"])
    columns: list[Column] = [
        ("system", lambda pair: pair["name"] if plain else escaped(pair["name"])),
        (f"{scale}, {first}", lambda pair: interval(pair["average"]["first"])),
        (f"{scale}, {second}", lambda pair: interval(pair["average"]["second"])),
        ("difference", lambda pair: difference(pair["average"], plain=plain)),
        ("difference of τ", lambda pair: difference(pair["acceptance"], plain=plain)),
        ("examples", lambda pair: str(pair["examples"])),
    ]
    header, rows = without_empty(*sheet(columns, compared["pairs"]), kept=(0, 5))
    return (header if plain else list(map(escaped, header))), rows


def speed_table(results: Json, timings: Json) -> str:
    """The Markdown table of `timings["speed"]`, systems timed in turn; empty where nothing was timed.

    Args:
        results: of `results.assemble`.
        timings: as they are written.
    """
    timed = timings.get("speed", [])
    things = [{**row, "system": name, **one} for row in timed for name, one in row["figures"].items()]
    if not things:
        return ""
    columns: list[Column] = [
        ("task", lambda one: escaped(one["task"])),
        ("prompt", lambda one: DASH if one["length"] is None else tokens(one["length"])),
        ("system", lambda one: escaped(one["system"])),
        *(FIRST_TOKEN if of_first_tokens(timings) else _decoding(results)),
        ("cache", lambda one: _bytes(one["cache_bytes"] + one["draft_bytes"])),
        ("peak memory", lambda one: _bytes(one["peak_device_bytes"])),
    ]
    prompts = ", ".join(
        f"{row['prompts']} of {_place(row)} ({_answers(row['max_new_tokens'])} each)" for row in timed
    )
    first = next(iter(timed[0]["figures"]))
    if of_first_tokens(timings):
        meaning = f"Compared with {_plainly(first)}; medians over batches."
    else:
        meaning = (
            f"Speeds are ratios to {_plainly(first)}; tokens/s and its ratio leave out prefill (a draft's "
            "own included); in brackets the smallest and the largest ratio of a batch. τ is that of all "
            "prompts of the run."
        )
    return joined(
        f"# Speed: {escaped(results['title'])}, {escaped(results['target']['name'])} on {timings['device']}",
        markdown(*without_empty(*sheet(columns, things))),
        f"Every system in turn on the same prompts, {timed[0]['batch']} at a time, in one process: "
        f"{prompts}. {meaning}",
        CPU_NOTE if str(timings["device"]).startswith("cpu") else "",
    )


def speed_summary(timings: Json) -> Sheet:
    """Head and a line for each system that was timed, for the terminal; no lines where nothing was timed."""
    rows = timings.get("speed", [])
    several = len(rows) > 1
    things = [{**row, "system": name, **one} for row in rows for name, one in row["figures"].items()]
    first = next(iter(rows[0]["figures"])) if rows else ""
    columns: list[Column] = [
        ("system", lambda one: f"{one['system']}, {_place(one)}" if several else str(one["system"])),
    ]
    if of_first_tokens(timings):
        return sheet([*columns, *FIRST_TOKEN], things)
    columns += [
        ("tokens/s", lambda one: fixed(one["tokens_per_s"], 1)),
        (
            f"speed over {PLAIN if first == FULL else first}",
            lambda one: _times(one["ratio"], one.get("ratio_range")),
        ),
        ("ms a cycle", lambda one: fixed(one["ms_per_cycle"], 1)),
    ]
    return sheet(columns, things)


def card_table(results: Json, timings: Json | None) -> Sheet:
    """The table of an artifact's card: a row for each system, its score by prompt length, and its speed.

    Args:
        results: of `results.assemble`.
        timings: as they are written; speeds are ratios to the first system of each timed prompt.
    """
    scale, systems = results["scale"]["name"], results["systems"]
    scores = {
        (system["name"], one["value"]): one["score"]
        for system in systems
        for one in system["facets"]
        if one["facet"] == "length" and one["score"]["value"] is not None
    }
    lengths = sorted({length for _, length in scores})
    timed = [row["figures"] for row in (timings or {}).get("speed", [])]
    columns: list[Column] = [
        ("system", lambda one: one["name"]),
        (scale, lambda one: interval(one["average"])),
        ("vs full", lambda one: difference(one["versus_full"], plain=True)),
        *[
            (f"at {tokens(length)}", lambda one, at=length: interval(scores.get((one["name"], at))))
            for length in (lengths if len(lengths) > 1 else ())
        ],
        ("τ", lambda one: DASH if scale == ACCEPTANCE or not one["acceptance"] else _tau(one)),
        ("accepted", lambda one: percent(_rate(one))),
        ("speed", lambda one: _between([row.get(one["name"], {}).get("ratio") for row in timed])),
    ]
    return without_empty(*sheet(columns, systems))


def _tau(system: Json) -> str:
    return interval(system["acceptance"]["tau"])


def _rate(system: Json) -> float | None:
    return system["acceptance"]["acceptance_rate"]["value"] if system["acceptance"] else None


def _between(ratios: Sequence[float | None]) -> str:
    """The smallest and the largest of some ratios, those that are missing left out."""
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return DASH
    low, high = (f"{end:.2f}" for end in (min(known), max(known)))
    return f"{low} ×" if low == high else f"{low} to {high} ×"


def of_first_tokens(timings: Json) -> bool:
    """Whether answers of one token were timed: their speed is that of the prefill alone."""
    rows = timings.get("speed", [])
    return bool(rows) and all(row["max_new_tokens"] == 1 for row in rows)


def _decoding(results: Json) -> list[Column]:
    """Figures of answers of several tokens."""
    return [
        ("τ", lambda one: fixed(_tau_at(results, one))),
        ("tokens/s", lambda one: fixed(one["tokens_per_s"], 1)),
        ("speed", lambda one: _times(one["ratio"], one.get("ratio_range"))),
        ("with prefill", lambda one: fixed(one["end_to_end_tokens_per_s"], 1)),
        ("speed with prefill", lambda one: _times(one["end_to_end_ratio"])),
        ("ms a cycle", lambda one: fixed(one["ms_per_cycle"], 1)),
    ]


def _answers(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _plainly(system: str) -> str:
    """A system by its name in tables; the full cache's is said to be plain decoding."""
    return f"`{FULL}`, {PLAIN}" if system == FULL else escaped(system)


def _tau_at(results: Json, row: Json) -> float | None:
    """Acceptance length of a system in a task, or at one of its prompt lengths."""
    if row["length"] is not None:
        place = (row["system"], row["task"], {"length": row["length"]})
        found = [one for one in results["cells"] if (one["system"], one["task"], one["facets"]) == place]
        if found or row["task"] != str(row["length"]):  # else the task is this length
            return found[0]["acceptance"]["value"] if found and found[0]["acceptance"] else None
    systems = [system for system in results["systems"] if system["name"] == row["system"]]
    tasks = [task for system in systems for task in system["tasks"] if task["task"] == row["task"]]
    return tasks[0]["acceptance"]["tau"]["value"] if tasks and tasks[0]["acceptance"] else None


def _place(row: Json) -> str:
    return str(row["task"]) if row["length"] is None else f"{row['task']} at {tokens(row['length'])}"


def _times(ratio: float | None, between: Sequence[float] | None = None) -> str:
    """A ratio, and between which ratios single batches were where they differ."""
    if ratio is None:
        return DASH
    spread = "" if between is None or between[0] == between[1] else f" ({between[0]:.2f} to {between[1]:.2f})"
    return f"{ratio:.2f} ×{spread}"


def _bytes(count: int | None) -> str:
    if not count:
        return DASH
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"

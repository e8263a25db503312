"""`speed.md`: systems timed in turn on the same prompts, beside how much of their drafts was accepted."""

from __future__ import annotations

from typing import Any

from longtrain.tables import DASH, escaped, fixed, markdown, tokens, without_empty

Json = dict[str, Any]

HEADER = [
    "task",
    "prompt",
    "system",
    "τ",
    "tokens/s",
    "speed",
    "with prefill",
    "speed with prefill",
    "ms a cycle",
    "cache",
    "peak memory",
]


def speed_table(results: Json, timings: Json) -> str:
    """The Markdown table of `timings["speed"]`; empty where nothing was timed.

    Args:
        results: of `results.assemble`.
        timings: as they are written.
    """
    rows = [
        _row(results, row, name, one)
        for row in timings.get("speed", [])
        for name, one in row["figures"].items()
    ]
    if not rows:
        return ""
    table = markdown(*without_empty(HEADER, rows))
    some = timings["speed"][0]
    first = next(iter(some["figures"]))
    prompts = ", ".join(
        f"{row['prompts']} of {_place(row)} ({row['max_new_tokens']} tokens each)" for row in timings["speed"]
    )
    title, target = escaped(results["title"]), escaped(results["target"]["name"])
    return (
        f"# Speed: {title}, {target} on {timings['device']}\n\n"
        f"{table}\n\n"
        f"Every system in turn on the same prompts, {some['batch']} at a time, in one process: {prompts}. "
        f"Speeds are ratios to {first}; tokens/s and its ratio leave out prefill (a draft's own included). "
        "τ is that of all prompts of the run.\n"
    )


def _row(results: Json, row: Json, name: str, one: Json) -> list[str]:
    return [
        escaped(row["task"]),
        DASH if row["length"] is None else tokens(row["length"]),
        escaped(name),
        fixed(_tau(results, row, name)),
        fixed(one["tokens_per_s"], 1),
        _times(one["ratio"]),
        fixed(one["end_to_end_tokens_per_s"], 1),
        _times(one["end_to_end_ratio"]),
        fixed(one["ms_per_cycle"], 1),
        _bytes(one["cache_bytes"] + one["draft_bytes"]),
        _bytes(one["peak_device_bytes"]),
    ]


def _tau(results: Json, row: Json, name: str) -> float | None:
    """Acceptance length of a system in a task, or at one of its prompt lengths."""
    if row["length"] is not None:
        for one in results["cells"]:
            place = (one["system"], one["task"], one["facets"])
            if place == (name, row["task"], {"length": row["length"]}) and one["acceptance"]:
                return one["acceptance"]["value"]
        return None
    for system in results["systems"]:
        for task in system["tasks"]:
            if (system["name"], task["task"]) == (name, row["task"]) and task["acceptance"]:
                return task["acceptance"]["tau"]["value"]
    return None


def _place(row: Json) -> str:
    return str(row["task"]) if row["length"] is None else f"{row['task']} at {tokens(row['length'])}"


def _times(ratio: float | None) -> str:
    return DASH if ratio is None else f"{ratio:.2f} ×"


def _bytes(count: int | None) -> str:
    if not count:
        return DASH
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"

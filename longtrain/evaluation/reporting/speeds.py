"""Speed and memory beside the scores: columns of the table of systems, where systems were timed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from longtrain.evaluation.reporting.document import Cell, Column
from longtrain.tables import DASH

Json = dict[str, Any]
CPU_NOTE = (
    "Measured on a CPU, where other work and the number of threads change a time by a factor from run to "
    "run: these times do not predict speed on a GPU."
)
"""Note below speeds measured on a CPU."""


def of_first_tokens(timings: Json) -> bool:
    """True if one-token answers were timed, whose speed is that of the prefill."""
    rows = timings.get("speed", [])
    return bool(rows) and all(row["max_new_tokens"] == 1 for row in rows)


def first_batch(timings: Json) -> list[Json]:
    """The rows of the smallest batch that was timed."""
    rows = timings.get("speed", [])
    least = min((row.get("batch", 1) for row in rows), default=1)
    return [row for row in rows if row.get("batch", 1) == least]


def columns(timings: Json) -> list[Column]:
    """Columns of the table of systems: speed over plain decoding for each batch, the time to the first token
    at the smallest batch, and peak memory at the largest. Empty if nothing was timed.

    Args:
        timings: the content of timings.json.
    """
    rows = timings.get("speed", [])
    if not rows:
        return []
    batches = sorted({row["batch"] for row in rows})

    def column(what: str, batch: int, show: Any) -> Column:
        mine = [row for row in rows if row["batch"] == batch]
        heading = f"{what}, batch {batch}" if len(batches) > 1 else what
        return heading, lambda system: show(mine, system["name"])

    return [
        *([] if of_first_tokens(timings) else [column("speed", batch, _speed) for batch in batches]),
        column("ms to the first token", batches[0], _first_token),
        column("peak memory", batches[-1], _peak),
    ]


def headline(timings: Json) -> list[str]:
    """Sentences on the meaning of `columns`; empty if nothing was timed."""
    rows = timings.get("speed", [])
    if not rows:
        return []
    first = next(iter(rows[0]["metrics"]))
    words = [] if of_first_tokens(timings) else [f"speed is tokens/s without prefill over that of {first}"]
    if len({(row["task"], row["length"]) for row in rows}) > 1:
        words.append("tasks and lengths are pooled, with their range in brackets (speed.md has each)")
    device = str(timings["device"])
    lines = [f"Timed on {device}{': ' if words else ''}{'; '.join(words)}."]
    if device.startswith("cpu"):
        lines.append(f"{CPU_NOTE} Peak memory is measured on CUDA devices only.")
    return lines


def times(ratio: float | None, between: Sequence[float] | None = None) -> Cell | str:
    """A ratio of speeds, with its range if it has one."""
    if ratio is None:
        return DASH
    spread = "" if between is None or between[0] == between[1] else f"({between[0]:.2f} to {between[1]:.2f})"
    return Cell(f"{ratio:.2f} ×", spread, value=ratio)


def memory(count: int | None) -> Cell | str:
    """Bytes as GiB or MiB; a dash for none."""
    if not count:
        return DASH
    shown = f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"
    return Cell(shown, value=count)


def _speed(rows: Sequence[Json], name: str) -> Cell | str:
    """Pooled tokens/s over that of plain decoding on the same prompts, with the range over the rows."""
    mine = [row["metrics"].get(name, {}) for row in rows]
    if any("failed" in one for one in mine):
        return "out of memory"
    plain = [next(iter(row["metrics"].values())) for row in rows]
    pairs = [(a, b) for a, b in zip(mine, plain, strict=True) if a.get("ratio") is not None]
    if not pairs:
        return DASH
    ours, theirs = (
        sum(pair[side]["tokens"] for pair in pairs) / sum(pair[side]["decode_s"] for pair in pairs)
        for side in (0, 1)
    )
    ratios = [one["ratio"] for one, _ in pairs]
    return times(ours / theirs, (min(ratios), max(ratios)) if len(ratios) > 1 else None)


def _first_token(rows: Sequence[Json], name: str) -> Cell | str:
    found = [row["metrics"].get(name, {}).get("first_token_s") for row in rows]
    known = [1e3 * seconds for seconds in found if seconds is not None]
    if not known:
        return DASH
    spread = f"({min(known):.0f} to {max(known):.0f})" if len(known) > 1 else ""
    return Cell(f"{fmean(known):.1f}", spread, value=fmean(known))


def _peak(rows: Sequence[Json], name: str) -> Cell | str:
    return memory(max(row["metrics"].get(name, {}).get("peak_device_bytes") or 0 for row in rows))

"""Tables and pictures of `bench suite=quantspec` with `suite.shape`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from longtrain import plots
from longtrain.tables import of_rows, tokens

Rows = Sequence[Mapping[str, Any]]

COLUMNS = {
    "what": "name",
    "prompt tokens": "prompt_tokens",
    "batch": "batch",
    "tokens a cycle": "tokens_per_cycle",
    "cycle ms": "cycle_ms",
    "model ms": "expected_ms",
    "least ms": "roofline_ms",
    "of roofline": "roofline_share",
    "of read bandwidth": "read_share",
    "idle ms": "idle_ms.median",
    "tok/s": "tokens_per_s",
    "speed": "speed",
    "model's": "expected_speed",
    "over INT8 plain": "int8_speed",
    "cache GiB": "cache_gib",
    "of full": "cache_share",
    "draft GiB": "draft_gib",
    "peak GiB": "peak_gib",
    "failed": "failed",
}
STEP_COLUMNS = {
    "what": "name",
    "prompt tokens": "prompt_tokens",
    "batch": "batch",
    "cycle ms": "cycle_ms",
    "draft ms": "steps.propose_ms.median",
    "target attention ms": "steps.attention_ms.median",
    "target linear ms": "steps.linear_ms",
    "verification ms": "steps.accept_ms.median",
    "commit ms": "steps.commit_ms.median",
    "idle ms": "idle_ms.median",
}
PHASES = {
    "draft": "propose_ms",
    "target attention": "attention_ms",
    "target linear": "linear_ms",
    "verification": "accept_ms",
    "commit": "commit_ms",
}


def markdown(rows: Rows) -> str:
    """A table of all rows, and one of the cycles that were taken apart."""
    apart = [row for row in rows if "steps" in row]
    shown = [of_rows(rows, COLUMNS), *([of_rows(apart, STEP_COLUMNS)] if apart else [])]
    return "\n\n".join(shown) + "\n"


def pictures(rows: Rows) -> dict[str, bytes]:
    """Speed by drafted tokens, one step taken apart, and tokens a second by batch, as far as measured."""
    rows = [row for row in rows if "failed" not in row]
    chains = [row for row in rows if row["shape"] and "acceptance" in row["accepted"] and row["batch"] == 1]
    apart = [row for row in rows if "steps" in row]
    batched = [row for row in rows if row["batch"] > 1]
    made = {}
    if chains:
        made["quantspec_speed.png"] = _speed(chains)
    if apart:
        made["quantspec_steps.png"] = _steps(apart)
    if batched:
        shortest, names = min(row["prompt_tokens"] for row in batched), {row["name"] for row in batched}
        same = [row for row in rows if row["prompt_tokens"] == shortest and row["name"] in names]
        made["quantspec_batches.png"] = _batches(same, tokens(shortest))
    return made


def _lines(
    axes: Any, rows: Rows, x: str, y: str, name: Callable[[Mapping[str, Any]], str], style: str = "-"
) -> None:
    """One line a name, its points in order."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.get(y) is not None:
            found.setdefault(name(row), []).append((row[x], row[y]))
    for label, points in found.items():
        axes.plot(*zip(*sorted(points), strict=True), linestyle=style, marker="o", markersize=3, label=label)
    axes.set_xticks(sorted({row[x] for row in rows}))


def _speed(rows: Rows) -> bytes:
    figure, (left, right) = plots.panels(2, size=(5.5, 3.8))
    _lines(left, rows, "drafted", "speed", _with_length)
    left.set_prop_cycle(None)
    _lines(
        left, rows, "drafted", "expected_speed", lambda row: f"model, {tokens(row['prompt_tokens'])}", "--"
    )
    _lines(right, rows, "drafted", "int8_speed", _with_length)
    for axes, cache in ((left, "full cache"), (right, "the same INT8 cache")):
        axes.axhline(1, color="black", linewidth=0.8)
        title = f"over plain decoding, {cache}"
        plots.label(axes, "drafted tokens a cycle", "speed", title=title, legend=False)
    return plots.png(figure, legend=True)


def _steps(rows: Rows) -> bytes:
    figure, (axes,) = plots.panels(1, size=(11, 3.8))
    places, below = range(len(rows)), [0.0] * len(rows)
    for label, key in PHASES.items():
        values = [_median(row["steps"][key]) for row in rows]
        axes.bar(places, values, 0.6, bottom=below, label=label)
        below = [a + b for a, b in zip(below, values, strict=True)]
    names = [f"{row['name']}\n{tokens(row['prompt_tokens'])}" for row in rows]
    axes.set_xticks(list(places), names, fontsize=7)
    plots.label(axes, y="ms a cycle", legend=False)
    return plots.png(figure, legend=True)


def _batches(rows: Rows, context: str) -> bytes:
    figure, panels = plots.panels(2, size=(5.5, 3.8))
    keys = {"tokens_per_s": "tokens/s", "tokens_per_cycle": "committed tokens a cycle"}
    for axes, (key, title) in zip(panels, keys.items(), strict=True):
        _lines(axes, rows, "batch", key, lambda row: str(row["name"]))
        plots.label(axes, f"batch, {context} tokens each", title, legend=False)
        axes.set_ylim(bottom=0)
    return plots.png(figure, legend=True)


def _with_length(row: Mapping[str, Any]) -> str:
    return f"{row['system']}, {tokens(row['prompt_tokens'])}"


def _median(value: Any) -> float:
    return float(value["median"] if isinstance(value, Mapping) else value)

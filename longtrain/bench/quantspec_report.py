"""Tables and pictures of `bench suite=quantspec`."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]

SHAPE_COLUMNS = {
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
TEXT_COLUMNS = {
    "what": "system",
    "prompt tokens": "prompt_tokens",
    "drafted": "drafted",
    "acceptance": "acceptance_rate",
    "tokens a cycle": "tokens_per_cycle",
    "tok/s": "tokens_per_s",
    "speed": "speed",
    "over its cache": "same_cache_speed",
    "same texts": "same_texts",
    "cache GiB": "cache_gib",
    "draft GiB": "draft_gib",
    "peak GiB": "peak_gib",
    "failed": "failed",
}
PARTS = {
    "draft": "propose_ms",
    "target attention": "attention_ms",
    "target linear": "linear_ms",
    "verification": "accept_ms",
    "commit": "commit_ms",
}


def shape_pictures(rows: Rows) -> dict[str, bytes]:
    """File name -> PNG: speed by drafted tokens, one step taken apart, tokens a second by batch."""
    made = {
        "quantspec_speed.png": _picture(_speed, rows),
        "quantspec_steps.png": _picture(_steps, rows),
        "quantspec_batches.png": _picture(_batches, rows),
    }
    return {name: png for name, png in made.items() if png is not None}


def text_pictures(rows: Rows) -> dict[str, bytes]:
    """File name -> PNG: acceptance by context, acceptance and speed by drafted tokens."""
    made = {
        "quantspec_contexts.png": _picture(_contexts, rows),
        "quantspec_drafted.png": _picture(_drafted, rows),
    }
    return {name: png for name, png in made.items() if png is not None}


def _picture(draw: Callable[[Any, Rows], bool], rows: Rows) -> bytes | None:
    """A PNG of two axes side by side; None where there was nothing to draw."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    if not draw(figure, [row for row in rows if "failed" not in row]):
        return None
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    known = {
        label: line
        for axes in figure.axes
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(known.values(), known, fontsize=8, frameon=False, loc="outside right upper")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


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
    axes.set_xticks(sorted({row[x] for row in rows}), [_short(v) for v in sorted({row[x] for row in rows})])


def _speed(figure: Any, rows: Rows) -> bool:
    chains = [row for row in rows if row["shape"] and "acceptance" in row["accepted"] and row["batch"] == 1]
    if not chains:
        return False
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, key, title in (
        (left, "speed", "over plain decoding, full cache"),
        (right, "int8_speed", "over plain decoding, the same INT8 cache"),
    ):
        _lines(axes, chains, "drafted", key, lambda row: f"{row['system']}, {_short(row['prompt_tokens'])}")
        if key == "speed":
            axes.set_prop_cycle(None)
            _lines(axes, chains, "drafted", "expected_speed", _model_named, "--")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("drafted tokens a cycle")
    left.set_ylabel("speed")
    return True


def _steps(figure: Any, rows: Rows) -> bool:
    rows = [row for row in rows if "steps" in row]
    if not rows:
        return False
    axes = figure.subplots()
    places, below = range(len(rows)), [0.0] * len(rows)
    for label, key in PARTS.items():
        values = [_median(row["steps"][key]) for row in rows]
        axes.bar(places, values, 0.6, bottom=below, label=label)
        below = [a + b for a, b in zip(below, values, strict=True)]
    names = [f"{row['name']}\n{_short(row['prompt_tokens'])}" for row in rows]
    axes.set_xticks(list(places), names, fontsize=7)
    axes.set_ylabel("ms a cycle")
    return True


def _batches(figure: Any, rows: Rows) -> bool:
    lengths = sorted({row["prompt_tokens"] for row in rows if row["batch"] > 1})
    if not lengths:
        return False
    names = {row["name"] for row in rows if row["batch"] > 1}
    rows = [row for row in rows if row["prompt_tokens"] == lengths[0] and row["name"] in names]
    left, right = figure.subplots(1, 2)
    for axes, key, title in (
        (left, "tokens_per_s", "tokens/s"),
        (right, "tokens_per_cycle", "committed tokens a cycle"),
    ):
        _lines(axes, rows, "batch", key, lambda row: str(row["name"]))
        axes.set_xlabel(f"batch, {_short(lengths[0])} tokens each")
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
    return True


def _contexts(figure: Any, rows: Rows) -> bool:
    drafted = [row for row in rows if row["drafted"]]
    if not drafted:
        return False
    left, right = figure.subplots(1, 2)
    counts: dict[str, set[int]] = {}
    for row in drafted:
        counts.setdefault(row["system"], set()).add(row["drafted"])
    shared = set.intersection(*counts.values())
    chosen = {name: max(shared or own) for name, own in counts.items()}
    some = [row for row in drafted if row["drafted"] == chosen[row["system"]]]
    _lines(left, some, "prompt_tokens", "acceptance_rate", _named)
    left.set_ylabel("accepted / drafted")
    _lines(right, some, "prompt_tokens", "speed", _named)
    right.set_ylabel("speed over plain decoding")
    right.axhline(1, color="black", linewidth=0.8)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        ticks = sorted({row["prompt_tokens"] for row in some})
        axes.set_xticks(ticks, [_short(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("context")
    return True


def _drafted(figure: Any, rows: Rows) -> bool:
    drafted = [row for row in rows if row["drafted"]]
    if not drafted:
        return False
    longest = max(row["prompt_tokens"] for row in drafted)
    some = [row for row in drafted if row["prompt_tokens"] == longest]
    left, right = figure.subplots(1, 2)
    _lines(left, some, "drafted", "acceptance_rate", lambda row: str(row["system"]))
    left.set_ylabel("accepted / drafted")
    _lines(right, some, "drafted", "speed", lambda row: str(row["system"]))
    right.set_ylabel("speed over plain decoding")
    right.axhline(1, color="black", linewidth=0.8)
    for axes in (left, right):
        axes.set_xlabel(f"drafted tokens a cycle, {_short(longest)} context")
    return True


def _named(row: Mapping[str, Any]) -> str:
    return f"{row['system']}, {row['drafted']} drafted"


def _model_named(row: Mapping[str, Any]) -> str:
    return f"model, {_short(row['prompt_tokens'])}"


def _median(value: Any) -> float:
    return float(value["median"] if isinstance(value, Mapping) else value)


def _short(count: float) -> str:
    return f"{int(count) // 1024}K" if count >= 1024 and count % 1024 == 0 else f"{count:g}"

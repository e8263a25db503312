"""A picture of `bench suite=kernels`: each call's milliseconds beside stock attention and the bound."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any


def picture(rows: Sequence[Mapping[str, Any]]) -> bytes | None:
    """A PNG with a group of bars a cell, on a logarithmic axis; None where nothing was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in rows if "ms" in row]
    if not rows:
        return None
    figure = Figure(figsize=(2 + 0.9 * len(rows), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = range(len(rows))
    low = [max(0.0, row["ms"]["median"] - row["ms"]["p10"]) for row in rows]
    high = [max(0.0, row["ms"]["p90"] - row["ms"]["median"]) for row in rows]
    middle = [row["ms"]["median"] for row in rows]
    axes.bar([x - 0.2 for x in places], middle, 0.4, yerr=[low, high], capsize=2, label="kernel")
    stock = [row.get("best", {}).get("ms", float("nan")) for row in rows]
    bars = axes.bar([x + 0.2 for x in places], stock, 0.4, color="lightgray", label="fastest stock attention")
    labels = [f"{row['best']['speed']:.2f} ×" if "best" in row else "" for row in rows]
    axes.bar_label(bars, labels, padding=3, fontsize=8)
    for x, row in zip(places, rows, strict=True):
        axes.plot([x - 0.42, x + 0.42], [row["bound_ms"]] * 2, color="black", linewidth=1)
    axes.plot([], [], color="black", linewidth=1, label="bound: bytes or multiplications at the peak rate")
    axes.set_yscale("log")
    axes.set_ylim(top=1.8 * max([*middle, *(y for y in stock if y == y)]))
    axes.set_xticks(list(places), [_name(row) for row in rows], fontsize=8)
    axes.set_ylabel("ms a layer")
    figure.legend(fontsize=8, frameon=False, loc="outside upper left", ncols=3)
    axes.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def _name(row: Mapping[str, Any]) -> str:
    keys = row["keys"]
    length = f"{keys // 1024}k" if keys % 1024 == 0 else str(keys)
    return f"{row['cache']}\n{row['heads']} heads\n{row['rows']} new\n{length}"

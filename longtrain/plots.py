"""Pictures without a display: panels, labels, and a PNG whose bytes are the same for the same figures."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from longtrain.tables import tokens

DPI = 110
CHARACTERS_PER_INCH = 12
"""How many characters of a title fit an inch of its picture."""


def panels(count: int, *, columns: int = 4, size: tuple[float, float] = (4.6, 3.6)) -> tuple[Any, list[Any]]:
    """A figure and its axes, from left to right and from top to bottom.

    Args:
        count: of axes.
        columns: most axes beside each other.
        size: inches of each, width and height.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wide = min(columns, count)
    high = -(-count // wide)
    figure = Figure(figsize=(size[0] * wide, size[1] * high), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(high, wide, squeeze=False).ravel())
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def png(figure: Any, *, legend: bool = False, title: str = "") -> bytes:
    """A figure as PNG.

    Args:
        figure: of `panels`.
        legend: put one legend for all axes beside them.
        title: above all axes, broken where the picture is too narrow for it.
    """
    if title:
        characters = max(24, int(CHARACTERS_PER_INCH * figure.get_figwidth()))
        figure.suptitle(plain(textwrap.fill(title, characters)), fontsize=10)
    if legend:
        known: dict[str, Any] = {}
        for axes in figure.axes:
            known |= {text: line for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(known.values(), known, fontsize=8, frameon=False, loc="outside right upper")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI, metadata={"Software": None})
    return content.getvalue()


def label(axes: Any, x: str = "", y: str = "", *, title: str = "", legend: bool = True) -> None:
    """Names and a grid for axes, and a legend where something has a name."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if title:
        axes.set_title(plain(title), fontsize=10)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


def points(
    axes: Any, x: Sequence[Any], figures: Sequence[Mapping[str, Any]], name: str, **style: Any
) -> None:
    """A line of figures with their intervals."""
    if len(x):
        how = {"marker": "o", "markersize": 4, "capsize": 2, **style}
        axes.errorbar(x, [one["value"] for one in figures], yerr=arms(figures), label=plain(name), **how)


def of_spread(spread: Mapping[str, float]) -> dict[str, float]:
    """A median between its 10th and its 90th percentile, as `points` takes figures."""
    return {"value": spread["median"], "low": spread["p10"], "high": spread["p90"]}


def lines(axes: Any, rows: Sequence[Mapping[str, Any]], x: str, y: str, name: str, **style: Any) -> None:
    """One line a name through measurements, in the order of `x`; those without `y` are left out.

    Args:
        axes: where they are drawn.
        rows: a point each.
        x: the key of the horizontal axis, which is marked where there are points.
        y: the key of the vertical axis.
        name: what a row's line is called, with keys of the row in braces.
        style: of the lines.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.get(y) is not None:
            found.setdefault(name.format(**row), []).append((row[x], row[y]))
    for title, places in found.items():
        axes.plot(*zip(*sorted(places), strict=True), marker="o", markersize=3, label=plain(title), **style)
    axes.set_xticks(sorted({row[x] for row in rows}))


def stacks(axes: Any, names: Sequence[str], layers: Mapping[str, Sequence[float]]) -> None:
    """Bars side by side, each made of layers on top of each other.

    Args:
        axes: where they are drawn.
        names: what each bar is called.
        layers: name of a layer -> its height in each bar.
    """
    places, below = range(len(names)), [0.0] * len(names)
    for title, heights in layers.items():
        axes.bar(places, heights, 0.6, bottom=below, label=title)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.set_xticks(list(places), list(map(plain, names)), fontsize=7)


def arms(figures: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """How far intervals reach below and above their figures; 0 where there is none."""
    below, above = [], []
    for one in figures:
        known = one["low"] is not None
        below.append(max(0.0, one["value"] - one["low"]) if known else 0.0)
        above.append(max(0.0, one["high"] - one["value"]) if known else 0.0)
    return below, above


def lengths_axis(axes: Any, lengths: Sequence[int]) -> None:
    """A logarithmic axis of context lengths, each with its name."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [tokens(length) for length in lengths])
    axes.minorticks_off()


def plain(name: str) -> str:
    """A name that matplotlib does not take for mathematics."""
    return name.replace("$", r"\$")

"""Draws lines, stacked bars and spreads for the plots of benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longtrain.plots import plain


def of_spread(spread: Mapping[str, float]) -> dict[str, float]:
    """Convert a spread to a median with its 10th and 90th percentile as interval, for `points`."""
    return {"value": spread["median"], "low": spread["p10"], "high": spread["p90"]}


def lines(axes: Any, rows: Sequence[Mapping[str, Any]], x: str, y: str, name: str, **style: Any) -> None:
    """Draw lines through measurements, in the order of `x`; rows without `y` are skipped.

    Args:
        axes: the axes.
        rows: the measurements, one point each.
        x: key of the horizontal axis, which gets a tick at each point.
        y: key of the vertical axis.
        name: name of a row's line, with keys of the row in braces.
        style: matplotlib options of the lines.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.get(y) is not None:
            found.setdefault(name.format(**row), []).append((row[x], row[y]))
    for title, places in found.items():
        axes.plot(*zip(*sorted(places), strict=True), marker="o", markersize=3, label=plain(title), **style)
    axes.set_xticks(sorted({row[x] for row in rows}))


def stacks(axes: Any, names: Sequence[str], layers: Mapping[str, Sequence[float]]) -> None:
    """Draw stacked bars.

    Args:
        axes: the axes.
        names: name of each bar.
        layers: name of a layer -> its height in each bar.
    """
    places, below = range(len(names)), [0.0] * len(names)
    for title, heights in layers.items():
        axes.bar(places, heights, 0.6, bottom=below, label=title)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.set_xticks(list(places), list(map(plain, names)), fontsize=7)

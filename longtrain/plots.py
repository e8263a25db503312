"""Draws plots without a display, as PNG files whose bytes are reproducible."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from longtrain.tables import tokens

DPI = 110
CHARACTERS_PER_INCH = 12
"""Characters of a title per inch of the picture's width."""


def panels(count: int, *, columns: int = 4, size: tuple[float, float] = (4.6, 3.6)) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, from left to right and from top to bottom.

    Args:
        count: number of axes.
        columns: largest number of axes in a row.
        size: width and height of each, in inches.
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
    """Return a figure as PNG bytes.

    Args:
        figure: a figure of `panels`.
        legend: draw one legend for all axes.
        title: title above all axes, wrapped to the picture's width.
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
    """Set the axes' labels and grid, and a legend if a line has a name."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if title:
        axes.set_title(plain(title), fontsize=10)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


def points(
    axes: Any, x: Sequence[Any], metrics: Sequence[Mapping[str, Any]], name: str, **style: Any
) -> None:
    """Draw a line through points with their confidence intervals."""
    if len(x):
        how = {"marker": "o", "markersize": 4, "capsize": 2, **style}
        axes.errorbar(x, [one["value"] for one in metrics], yerr=arms(metrics), label=plain(name), **how)


def arms(metrics: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Return the lengths of the error bars below and above each value; 0 if there is no interval."""
    below, above = [], []
    for one in metrics:
        known = one["low"] is not None
        below.append(max(0.0, one["value"] - one["low"]) if known else 0.0)
        above.append(max(0.0, one["high"] - one["value"]) if known else 0.0)
    return below, above


def lengths_axis(axes: Any, lengths: Sequence[int]) -> None:
    """Make the x axis logarithmic, with a tick for each context length."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [tokens(length) for length in lengths])
    axes.minorticks_off()


def plain(name: str) -> str:
    """Escape a name so that matplotlib does not read it as mathematics."""
    return name.replace("$", r"\$")

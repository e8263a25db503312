"""Pictures of a run for readers of `table.md`: score against budget, acceptance, needle maps."""

from __future__ import annotations

import io
from typing import Any

from longtrain.plots import arms
from longtrain.plots import label as label_axes
from longtrain.tables import tokens

Json = dict[str, Any]
Points = list[tuple[Any, Json]]
"""(place, interval) pairs that have a figure."""

MAPS = 12
"""Most needle maps in one picture: the full cache first, then the systems in their order."""


def pictures(results: Json) -> dict[str, bytes]:
    """File name -> PNG, for what there is to see; the same bytes for the same results.

    Args:
        results: of `results.assemble`.
    """
    made = {
        "budget.png": _budget(results),
        "acceptance.png": _acceptance(results),
        "needle.png": _needle(results),
    }
    return {name: content for name, content in made.items() if content is not None}


def by_budget(results: Json) -> dict[str, Points]:
    """Family -> (rows kept or what was asked for, average), for families that evict."""
    lines: dict[str, Points] = {}
    for system in results["systems"]:
        if system["budget"] is not None and system["average"]["value"] is not None:
            lines.setdefault(system["family"], []).append((system["budget"], system["average"]))
    return {name: sorted(points, key=lambda p: budget_rank(p[0])) for name, points in lines.items()}


def budget_rank(budget: str) -> tuple[bool, float]:
    """Budgets in order: rows, then shares."""
    return budget.endswith("%"), float(budget.rstrip("%"))


def _budget(results: Json) -> bytes | None:
    lines = by_budget(results)
    if not lines:
        return None
    budgets = sorted({place for points in lines.values() for place, _ in points}, key=budget_rank)
    figure, (axes,) = _figure(1, 1, (6.4, 4.2))
    full = next((s["average"] for s in results["systems"] if s["kind"] == "full"), None)
    if full is not None and full["value"] is not None:
        if full["low"] is not None:
            axes.axhspan(full["low"], full["high"], color="black", alpha=0.1, linewidth=0)
        axes.axhline(full["value"], color="black", linestyle="--", linewidth=1, label="full cache")
    for name, points in lines.items():
        _line(axes, [(budgets.index(place), one) for place, one in points], name)
    axes.set_xticks(range(len(budgets)), budgets)
    label_axes(axes, "budget", f"average {results['scale']['name']} (95% interval)")
    return _png(figure)


def _acceptance(results: Json) -> bytes | None:
    drafted = [system for system in results["systems"] if system["acceptance"] is not None]
    if not drafted:
        return None
    lengths = {s["name"]: _known(_facet(s, "length", "acceptance")) for s in drafted}
    places = sorted({place for points in lengths.values() for place, _ in points})
    panels = 2 + (len(places) > 1)
    figure, axes = _figure(1, panels, (4.6 * panels, 3.9))
    for system in drafted:
        found, name = system["acceptance"], system["name"]
        _line(axes[0], _known([(row["depth"], row["rate"]) for row in found["by_depth"]]), name)
        middles = [((row["from"] + row["below"]) / 2, row["tau"]) for row in found["by_position"]]
        _line(axes[1], _known(middles), name)
        if len(places) > 1:
            _line(axes[2], lengths[name], name)
    axes[0].set_ylim(0, 1)
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    label_axes(axes[0], "depth of the drafted token", "accepted, given that its parent was")
    label_axes(axes[1], "place in the generated text, tokens", "acceptance length τ")
    if len(places) > 1:
        axes[2].set_xscale("log", base=2)
        axes[2].set_xticks(places, [tokens(place) for place in places])
        axes[2].minorticks_off()
        label_axes(axes[2], "context length, tokens", "acceptance length τ")
    return _png(figure)


def _needle(results: Json) -> bytes | None:
    """A map a system: mean score over tasks by length and depth, weighed by examples."""
    grids: dict[str, dict[tuple[Any, Any], list[tuple[float, int]]]] = {}
    for cell in results["cells"]:
        facets, score = cell["facets"], cell["score"]
        if {"length", "depth"} <= set(facets) and score["value"] is not None:
            place = (facets["length"], facets["depth"])
            grids.setdefault(cell["system"], {}).setdefault(place, []).append((score["value"], score["n"]))
    if not grids:
        return None
    names = list(grids)[:MAPS]
    lengths = sorted({length for name in names for length, _ in grids[name]})
    depths = sorted({depth for name in names for _, depth in grids[name]})
    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    figure, panels = _figure(lines, columns, (3.1 * columns, 2.6 * lines))
    for axes, name in zip(panels, names, strict=False):
        values = [[_pooled(grids[name].get((length, depth))) for length in lengths] for depth in depths]
        axes.imshow(values, vmin=0, vmax=results["scale"]["maximum"], cmap="GnBu", aspect="auto")
        axes.set_xticks(range(len(lengths)), [tokens(length) for length in lengths], fontsize=7)
        axes.set_yticks(range(len(depths)), depths, fontsize=7)
        axes.set_title(name.replace("$", r"\$"), fontsize=8)
        axes.set_ylabel("depth, %", fontsize=7)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    return _png(figure)


def _facet(system: Json, facet: str, key: str) -> Points:
    return [(one["value"], one[key]) for one in system["facets"] if one["facet"] == facet and one[key]]


def _known(points: Points) -> Points:
    return [(place, one) for place, one in points if one["value"] is not None]


def _pooled(found: list[tuple[float, int]] | None) -> float:
    if not found:
        return float("nan")
    return sum(value * n for value, n in found) / sum(n for _, n in found)


def _line(axes: Any, points: Points, name: str) -> None:
    values = [one["value"] for _, one in points]
    places = [place for place, _ in points]
    if points:
        label = name.replace("$", r"\$")
        axes.errorbar(
            places,
            values,
            yerr=arms([one for _, one in points]),
            marker="o",
            markersize=4,
            capsize=2,
            label=label,
        )


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False).ravel()


def _png(figure: Any) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110, metadata={"Software": None})
    return picture.getvalue()

"""Pictures of a run for readers of `table.md`: score against budget, acceptance, needle maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from longtrain.evaluation.analysis.acceptance import ACCEPTANCE
from longtrain.evaluation.analysis.numbers import POSITION
from longtrain.evaluation.reporting.speeds import of_first_tokens
from longtrain.evaluation.suite import DIVERGENCE
from longtrain.plots import label, lengths_axis, panels, plain, png, points
from longtrain.tables import tokens

Json = dict[str, Any]
Points = list[tuple[Any, Json]]
"""(x, interval) pairs that have a value."""

FEW = 3
"""Maximum number of tasks that get their own panels beside the average."""
ASIDE = 0.04
"""Distance between the points of two families at one budget, so that their intervals can be told apart."""
MAPS = 12
"""Maximum number of needle maps in one picture: the full cache first, then the systems in order."""


def pictures(results: Json, timings: Json | None = None) -> dict[str, bytes]:
    """File name -> PNG, for pictures that have data; deterministic for equal results.

    Args:
        results: the output of `results.assemble`.
        timings: the content of timings.json; speeds at several batches are drawn.
    """
    made = {
        "budget.png": _budgets(results),
        "acceptance.png": _acceptance(results),
        "needle.png": _needle(results),
        "figures.png": _by_place(results, "length", "context length, tokens", score=False),
        "speed.png": _speeds(results, timings or {}),
        "positions.png": _by_place(results, POSITION, "new tokens up to", score=True),
    }
    return {name: content for name, content in made.items() if content is not None}


def headline(results: Json) -> str:
    """The title of a picture: the suite's title, the target and the context lengths."""
    target = Path(str(results["target"]["name"])).name
    lengths = sorted({one["facets"]["length"] for one in results["cells"] if "length" in one["facets"]})
    context = ""
    if lengths:
        context = f", context of {' to '.join(map(tokens, dict.fromkeys((lengths[0], lengths[-1]))))} tokens"
    return f"{results['title']}: {target}{context}"


def by_budget(
    results: Json, task: str | None = None, *, of: Callable[[Json, str | None], Json | None] | None = None
) -> dict[str, Points]:
    """Family -> (kept entries or the requested share, score), for families that evict.

    Args:
        results: the output of `results.assemble`.
        task: the task whose scores are used; None: the averages.
        of: (system, task) -> the value in place of the score.
    """
    lines: dict[str, Points] = {}
    for system in results["systems"]:
        score = (of or _score)(system, task)
        if system["budget"] is not None and score is not None and score["value"] is not None:
            lines.setdefault(system["family"], []).append((system["budget"], score))
    return {name: sorted(found, key=lambda p: budget_rank(p[0])) for name, found in lines.items()}


def budget_rank(budget: str) -> tuple[bool, float]:
    """Sort key for budgets: numbers of entries before shares."""
    return budget.endswith("%"), float(budget.rstrip("%"))


def _budgets(results: Json) -> bytes | None:
    """Score against budget: one panel, or one for each context length if the tasks are lengths; with few
    tasks, one panel per task as well.
    """
    if results["scale"]["name"] == ACCEPTANCE or not by_budget(results):
        return None
    names = [task["task"] for task in results["systems"][0]["tasks"]]
    lengths = {_length_of(results, name) for name in names}
    by_length = len(names) > 1 and len(lengths) == len(names) and None not in lengths
    tasks: list[str | None] = [None]
    if by_length:
        tasks = [*names]
    elif 1 < len(names) <= FEW:
        tasks = [None, *names]
    distances = results["scale"]["name"] == DIVERGENCE
    main = [metric for metric in results["metrics"] if metric.get("main") and distances]
    figure, axes = panels(len(tasks) + len(main), columns=2 if main else 4, size=(6.4, 4.2))
    score = f"{results['scale']['name']} (95% interval)"
    for one, task in zip(axes, tasks, strict=False):
        title = f"{task} tokens" if task and by_length else task or ""
        _by_budget(one, results, partial(_score, task=task))
        if distances:
            _decades(one, [v["value"] for found in by_budget(results, task).values() for _, v in found])
        label(one, "budget", f"{'' if task else 'average '}{score}", title=title, legend=not main)
    for one, metric in zip(axes[len(tasks) :], main, strict=True):
        scale = 100 if metric["unit"] == "percent" else 1
        _by_budget(one, results, partial(_metric, metric=metric["name"], scale=scale))
        unit = ", %" if metric["unit"] == "percent" else ""
        label(one, "budget", f"{metric['name']}{unit} (95% interval)", legend=False)
    return png(figure, legend=bool(main), title=headline(results))


def _by_budget(axes: Any, results: Json, of: Callable[[Json], Json | None]) -> None:
    """Draw a value against the budget: a line for each family, a level for systems without a budget."""
    lines = by_budget(results, of=lambda system, _: of(system))
    budgets = sorted({place for found in lines.values() for place, _ in found}, key=budget_rank)
    for system in results["systems"]:
        value = of(system)
        if system["budget"] is not None or value is None or value["value"] is None:
            continue
        if system["kind"] == "full":
            if value["low"] is not None:
                axes.axhspan(value["low"], value["high"], color="black", alpha=0.1, linewidth=0)
            axes.axhline(value["value"], color="black", linestyle="--", linewidth=1, label="full cache")
        elif system["acceptance"] is None:
            _line(axes, [(place, value) for place in range(len(budgets))], system["name"], linestyle=":")
    for place, (name, found) in enumerate(lines.items()):
        aside = ASIDE * (place - (len(lines) - 1) / 2)
        _line(axes, [(budgets.index(budget) + aside, value) for budget, value in found], name)
    axes.set_xticks(range(len(budgets)), budgets)


def _decades(axes: Any, values: Sequence[float]) -> None:
    """Make the y axis logarithmic down to the smallest value above 0, below it linear down to 0."""
    if drawn := [value for value in values if value > 0]:
        axes.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(min(drawn))))
    axes.set_ylim(bottom=0)


def _acceptance(results: Json) -> bytes | None:
    drafted = [system for system in results["systems"] if system["acceptance"] is not None]
    if not drafted:
        return None
    lengths = {s["name"]: _known(_facet(s, "length", "acceptance")) for s in drafted}
    places = sorted({place for found in lengths.values() for place, _ in found})
    figure, axes = panels(2 + (len(places) > 1), size=(4.6, 3.9))
    for system in drafted:
        found, name = system["acceptance"], system["name"]
        _line(axes[0], _known([(row["depth"], row["rate"]) for row in found["by_depth"]]), name)
        middles = [((row["from"] + row["below"]) / 2, row["tau"]) for row in found["by_position"]]
        _line(axes[1], _known(middles), name)
        if len(places) > 1:
            _line(axes[2], lengths[name], name)
    axes[0].set_ylim(0, 1)
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    label(axes[0], "depth of the drafted token", "accepted, given that its parent was")
    label(axes[1], "place in the generated text, tokens", "acceptance length τ")
    if len(places) > 1:
        lengths_axis(axes[2], places)
        label(axes[2], "context length, tokens", "acceptance length τ")
    return png(figure, title=headline(results))


def _speeds(results: Json, timings: Json) -> bytes | None:
    """Speed over plain decoding by batch: one panel per task or prompt length; None for a single batch."""
    rows = timings.get("speed", [])
    batches = sorted({row["batch"] for row in rows})
    places = list(dict.fromkeys((row["task"], row["length"]) for row in rows))
    if len(batches) < 2 or of_first_tokens(timings):
        return None
    figure, axes = panels(len(places), size=(4.6, 3.9))
    for one, (task, length) in zip(axes, places, strict=True):
        mine = [row for row in rows if (row["task"], row["length"]) == (task, length)]
        one.axhline(1, color="black", linestyle="--", linewidth=1)
        for name in list(mine[0]["metrics"])[1:]:
            found = [(row["batch"], row["metrics"][name]) for row in mine]
            _line(one, [(b, _ratio(m)) for b, m in found if m.get("ratio") is not None], name)
        lengths_axis(one, batches)
        where = task if length is None or task == tokens(length) else f"{task} at {tokens(length)}"
        label(one, "prompts decoded together", f"speed over {next(iter(mine[0]['metrics']))}", title=where)
    return png(figure, title=headline(results))


def _ratio(metrics: Json) -> Json:
    """A ratio of speeds, with the range over batches of prompts in place of an interval."""
    low, high = metrics.get("ratio_range") or (None, None)
    return {"value": metrics["ratio"], "low": low, "high": high}


def _needle(results: Json) -> bytes | None:
    """A heat map for each system: mean score over tasks by length and depth, weighted by examples."""
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
    figure, axes = panels(len(names), size=(3.1, 2.6))
    for one, name in zip(axes, names, strict=True):
        values = [[_pooled(grids[name].get((length, depth))) for length in lengths] for depth in depths]
        one.imshow(values, vmin=0, vmax=results["scale"]["maximum"], cmap="GnBu", aspect="auto")
        one.set_xticks(range(len(lengths)), [tokens(length) for length in lengths], fontsize=7)
        one.set_yticks(range(len(depths)), depths, fontsize=7)
        one.set_title(plain(name), fontsize=8)
        one.set_ylabel("depth, %", fontsize=7)
    return png(figure, title=headline(results))


def _by_place(results: Json, facet: str, label_x: str, *, score: bool) -> bytes | None:
    """The suite's plotted metrics by the values of a facet: one panel per metric, one line per system."""
    names = [metric["name"] for metric in results["metrics"] if metric["plotted"]]
    lines = {
        (system["name"], name): _known(_metric_by(system, facet, name))
        for system in results["systems"]
        for name in names
    }
    if score:
        names.insert(0, results["scale"]["name"])
        lines |= {
            (system["name"], names[0]): _known(_facet(system, facet, "score"))
            for system in results["systems"]
        }
    places = sorted({place for found in lines.values() for place, _ in found})
    if not places:
        return None
    figure, axes = panels(len(names), size=(6.4, 4.2))
    for one, name in zip(axes, names, strict=True):
        for system in results["systems"]:
            _line(one, lines[system["name"], name], system["name"])
        lengths_axis(one, places)
        label(one, label_x, f"{name} (95% interval)", legend=False)
    return png(figure, legend=True, title=headline(results))


def _score(system: Json, task: str | None = None) -> Json | None:
    """A system's average score, or its score in a task."""
    if task is None:
        return dict(system["average"])
    return next((one["score"] for one in system["tasks"] if one["task"] == task), None)


def _metric(system: Json, metric: str, scale: float) -> Json | None:
    """A system's metric beside the score, in its unit."""
    found = system["metrics"].get(metric)
    if found is None:
        return None
    return {key: None if found[key] is None else scale * found[key] for key in ("value", "low", "high")}


def _length_of(results: Json, task: str) -> int | None:
    """The context length of a task; None if it has several, or states none."""
    found = {cell["facets"].get("length") for cell in results["cells"] if cell["task"] == task}
    return found.pop() if len(found) == 1 else None


def _facet(system: Json, facet: str, key: str) -> Points:
    return [(one["value"], one[key]) for one in system["facets"] if one["facet"] == facet and one[key]]


def _metric_by(system: Json, facet: str, name: str) -> Points:
    """A metric beside the score, by the values of a facet."""
    return [
        (one["value"], one["metrics"][name])
        for one in system["facets"]
        if one["facet"] == facet and name in one["metrics"]
    ]


def _known(found: Points) -> Points:
    return [(place, one) for place, one in found if one["value"] is not None]


def _pooled(found: list[tuple[float, int]] | None) -> float:
    if not found:
        return float("nan")
    return sum(value * n for value, n in found) / sum(n for _, n in found)


def _line(axes: Any, found: Points, name: str, **style: Any) -> None:
    points(axes, [place for place, _ in found], [one for _, one in found], name, **style)

"""`table.md` and the short table of the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longtrain.evaluation.figures.acceptance import ACCEPTANCE
from longtrain.evaluation.figures.strata import LEAST
from longtrain.tables import DASH, escaped, fixed, interval, markdown, percent, without_empty

Json = dict[str, Any]

WIDE = 8
"""Most columns of tasks beside each other; with more, systems are the columns."""


def table(results: Json) -> str:
    """The Markdown report of a run.

    Args:
        results: of `results.assemble`.
    """
    parts = [_headline(results), _systems(results), _tasks(results), _own(results)]
    parts += [
        _depths(results),
        _positions(results),
        _figures(results),
        _facets(results),
        _rivals(results),
        _exactness(results),
        _footnote(results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary(results: Json) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a short table: a line a system."""
    return _columns(results, plain=True)


def difference(versus: Json | None, *, plain: bool = False, digits: int = 2) -> str:
    """`**-3.10** [-4.20, -2.00]`: bold (or starred) only where larger than noise."""
    if versus is None or versus["difference"]["value"] is None:
        return DASH
    gap = versus["difference"]
    value = f"{gap['value']:+.{digits}f}"
    if versus["larger_than_noise"]:
        value = f"{value}*" if plain else f"**{value}**"
    return value if gap["low"] is None else f"{value} [{gap['low']:.{digits}f}, {gap['high']:.{digits}f}]"


def kept_share(system: Json) -> float | None:
    """Mean over tasks of the share of the prompt's rows in the cache."""
    shares = [task["kept_share"] for task in system["tasks"] if task["kept_share"] is not None]
    return sum(shares) / len(shares) if shares else None


def same_texts(system: Json) -> str:
    """How many drafted texts are those of the same cache without a draft; a dash if none was compared."""
    found = [task["exactness"] for task in system["tasks"] if task["exactness"] is not None]
    if not found:
        return DASH
    compared = sum(one["compared"] for one in found)
    return f"{compared - sum(one['different'] for one in found)}/{compared} the same"


def _headline(results: Json) -> str:
    scale = results["scale"]
    notes = "".join(f"\n- {escaped(note)}" for note in results["notes"])
    better = "" if scale["higher_is_better"] else ", lower is better"
    rows = sum(task["rows"] for task in results["systems"][0]["tasks"])
    return (
        f"# {escaped(results['title'])}: {escaped(results['target']['name'])}\n\n"
        f"{_count(len(results['systems'][0]['tasks']), 'task')}, {_count(rows, 'example')}, "
        f"{scale['name']}{better}; protocol "
        f"`{results['protocol']['hash']}`." + (f"\n{notes}" if notes else "")
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _systems(results: Json) -> str:
    header, rows = _columns(results, plain=False)
    return "## Systems\n\n" + markdown(header, rows)


def _columns(results: Json, *, plain: bool) -> tuple[list[str], list[list[str]]]:
    """A line a system; columns that nobody fills are left out."""
    name = results["scale"]["name"]
    several = len(results["systems"][0]["tasks"]) > 1
    header = [
        "system",
        f"average {name}" if several else name,
        "vs full",
        "cache kept",
        "τ",
        "accepted",
        "texts",
    ]
    header.append("unjudged")
    rows = []
    for system in results["systems"]:
        found, kept = system["acceptance"], kept_share(system)
        unjudged = sum(task["unjudged"] for task in system["tasks"])
        rows.append(
            [
                system["name"] if plain else escaped(system["name"]),
                interval(system["average"]),
                difference(system["versus_full"], plain=plain),
                DASH if kept is None or system["budget"] is None else f"{100 * kept:.1f}%",
                interval(found["tau"]) if found else DASH,
                percent(found["acceptance_rate"]["value"]) if found else DASH,
                same_texts(system),
                str(unjudged) if unjudged and system["average"]["value"] is not None else DASH,
            ]
        )
    return without_empty(header, rows)


def _tasks(results: Json) -> str:
    """Point values by task; bold where the difference from the full cache is larger than noise."""
    systems = results["systems"]
    names = list(dict.fromkeys(task["task"] for system in systems for task in system["tasks"]))
    by = {(system["name"], task["task"]): task for system in systems for task in system["tasks"]}
    parts = []
    if any(task["score"]["value"] is not None for task in by.values()):
        title = f"## {results['scale']['name'].capitalize()} by task"
        parts.append(f"{title}\n\n{_grid(systems, names, by, _score)}")
    drafted = [system for system in systems if system["acceptance"] is not None]
    if drafted and len(names) > 1:
        parts.append(f"## Acceptance length τ by task\n\n{_grid(drafted, names, by, _tau)}")
    return "\n\n".join(parts)


def _grid(systems: Sequence[Json], names: Sequence[str], by: dict[tuple[str, str], Json], show: Any) -> str:
    def at(system: Json, name: str) -> str:
        task = by.get((system["name"], name))
        return DASH if task is None else show(task)

    if len(names) <= WIDE or len(systems) > len(names):
        rows = [[escaped(system["name"]), *(at(system, name) for name in names)] for system in systems]
        return markdown(["system", *map(escaped, names)], rows)
    rows = [[escaped(name), *(at(system, name) for system in systems)] for name in names]
    return markdown(["task", *(escaped(system["name"]) for system in systems)], rows)


def _score(task: Json) -> str:
    value = task["score"]["value"]
    if value is None:
        return DASH
    versus = task["versus_full"]
    bold = versus is not None and versus["larger_than_noise"]
    return f"**{value:.2f}**" if bold else f"{value:.2f}"


def _tau(task: Json) -> str:
    return interval(task["acceptance"]["tau"]) if task["acceptance"] else DASH


def _own(results: Json) -> str:
    """Figures that only this suite has, `extra.table` of its summary: a title, and a number a column."""
    found = {
        system["name"]: system["extra"]["table"]
        for system in results["systems"]
        if "table" in system["extra"]
    }
    if not found:
        return ""
    first = next(iter(found.values()))
    rows = [
        [
            escaped(name),
            *(fixed(own["columns"].get(column)) for column in first["columns"]),
        ]
        for name, own in found.items()
    ]
    return f"## {escaped(first['title'])}\n\n" + markdown(["system", *map(escaped, first["columns"])], rows)


def _depths(results: Json) -> str:
    drafted = [system for system in results["systems"] if system["acceptance"] is not None]
    deepest = max((len(system["acceptance"]["by_depth"]) for system in drafted), default=0)
    if not deepest:
        return ""
    rows = []
    for system in drafted:
        rates = [percent(row["rate"]["value"]) for row in system["acceptance"]["by_depth"]]
        rows.append([escaped(system["name"]), *rates, *[DASH] * (deepest - len(rates))])
    header = ["system", *(f"depth {depth}" for depth in range(1, deepest + 1))]
    return "## Acceptance by depth (of drafts whose parent was accepted)\n\n" + markdown(header, rows)


def _positions(results: Json) -> str:
    drafted = [system for system in results["systems"] if system["acceptance"] is not None]
    if not drafted:
        return ""
    places = drafted[0]["acceptance"]["by_position"]
    header = ["system", *(f"{place['from']} to {place['below'] - 1}" for place in places)]
    rows = [
        [escaped(system["name"]), *(interval(place["tau"]) for place in system["acceptance"]["by_position"])]
        for system in drafted
    ]
    return "## τ by place in the output (generated tokens)\n\n" + markdown(header, rows)


def figure(one: Json, found: Json | None) -> str:
    """A figure beside the score, as its suite wants it shown.

    Args:
        one: its declaration, of `results["figures"]`.
        found: value and interval.
    """
    if found is None or found["value"] is None:
        return DASH
    scale, unit = {"number": (1.0, ""), "percent": (100.0, "%"), "bytes": (1e-6, " MB")}[one["unit"]]
    keys = ("value", "low", "high")
    scaled = {key: None if found[key] is None else scale * found[key] for key in keys}
    return interval(scaled, 1 if one["unit"] == "percent" else 3) + unit


def _figures(results: Json) -> str:
    """What the suite reports beside its score: a line for each system and task, columns that nobody fills
    left out; by facet in results.json.
    """
    found = [
        (system["name"], task["task"], task["figures"])
        for system in results["systems"]
        for task in system["tasks"]
        if task["figures"]
    ]
    used = [one for one in results["figures"] if any(one["name"] in own for _, _, own in found)]
    if not used:
        return ""
    rows = [
        [escaped(system), escaped(task), *(figure(one, own.get(one["name"])) for one in used)]
        for system, task, own in found
    ]
    return "## Further figures\n\n" + markdown(["system", "task", *(one["name"] for one in used)], rows)


def _rivals(results: Json) -> str:
    """Differences between systems over the same prompts."""
    rows = [
        [
            escaped(one["first"]),
            escaped(one["second"]),
            escaped(one["task"]),
            difference(one["score"], digits=3),
        ]
        for one in results["differences"]
    ]
    header = ["system", "minus", "task", f"difference of {results['scale']['name']}"]
    return (
        "## Differences over the same prompts (paired bootstrap)\n\n" + markdown(header, rows) if rows else ""
    )


def _facets(results: Json) -> str:
    """A table a facet and figure: systems by values."""
    systems, parts = results["systems"], []
    for facet in dict.fromkeys(one["facet"] for system in systems for one in system["facets"]):
        for key, name in (("score", results["scale"]["name"]), ("acceptance", "τ")):
            found = {
                (system["name"], one["value"]): one[key]
                for system in systems
                for one in system["facets"]
                if one["facet"] == facet and one[key] is not None and one[key]["value"] is not None
            }
            values = sorted({value for _, value in found}, key=lambda v: (isinstance(v, str), v))
            if not 2 <= len(values) <= 2 * WIDE or (
                key == "acceptance" and results["scale"]["name"] == ACCEPTANCE
            ):
                continue
            rows = [
                [escaped(s["name"]), *(interval(found.get((s["name"], v), {"value": None})) for v in values)]
                for s in systems
                if any((s["name"], value) in found for value in values)
            ]
            header = ["system", *(escaped(value) for value in values)]
            parts.append(f"## {name.capitalize()} by {escaped(facet)}\n\n{markdown(header, rows)}")
    return "\n\n".join(parts)


def _exactness(results: Json) -> str:
    """The first places where drafted text leaves plain decoding, if any does."""
    lines = []
    for system in results["systems"]:
        for task in system["tasks"]:
            found = task["exactness"]
            if found and found["different"]:
                first = found["first"][0]
                lines.append(
                    f"- {escaped(system['name'])}, {escaped(task['task'])}: {found['different']} of "
                    f"{found['compared']} texts differ{_gap(found)}; {escaped(first['example'])} at token "
                    f"{first['position']}"
                )
    return "## Drafted texts that differ from plain decoding\n\n" + "\n".join(lines) if lines else ""


def _gap(found: Json) -> str:
    """What the gap of the logits says of texts that differ."""
    if not found.get("judged", True):
        return " (sampled)"
    gap = found.get("largest_gap")
    said = "" if gap is None else f" (gap of the logits up to {gap:.1g})"
    return said if found["violations"] is None else f"{said}, {found['violations']} beyond rounding"


def _footnote(results: Json) -> str:
    boot = results["bootstrap"]
    return (
        f"Intervals: {100 * boot['confidence']:g}% bootstrap over examples within each task "
        f"({boot['resamples']} resamples, seed {boot['seed']}); tasks of fewer than {LEAST} share their "
        "spread. Bold: the difference from the full cache over the same examples is larger than noise: its "
        f"interval leaves out 0, over {LEAST} examples or more."
    )

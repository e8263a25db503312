"""`table.md` and the short table of the terminal.

A table is described once, by its columns: a heading, and what stands there for one thing (a system, a task).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from longtrain.evaluation.figures.acceptance import ACCEPTANCE
from longtrain.evaluation.figures.outcomes import POSITION
from longtrain.evaluation.figures.statistics import LEAST
from longtrain.tables import DASH, escaped, fixed, interval, markdown, percent, without_empty

Json = dict[str, Any]
Column = tuple[str, Callable[[Any], str]]
"""A heading, and a thing -> its cell as Markdown."""
Sheet = tuple[list[str], list[list[str]]]
"""Headings and rows."""

FULL, PLAIN = "full", "plain decoding"
"""The system of plain decoding on the whole cache as tables name it, and in words."""
WIDE = 8
"""Most columns of tasks beside each other; with more, systems are the columns."""


def table(results: Json) -> str:
    """The Markdown report of a run.

    Args:
        results: of `results.assemble`.
    """
    drafted = [system for system in results["systems"] if system["acceptance"] is not None]
    return joined(
        _headline(results),
        section("Systems", _systems(results)),
        *_tasks(results, drafted),
        _own(results),
        *_drafts(drafted),
        section("Further figures", _figures(results)),
        *_facets(results),
        section("Differences over the same prompts (paired bootstrap)", _rivals(results)),
        _exactness(results),
        _exact_when(results),
        _footnote(results),
    )


def summary(results: Json) -> Sheet:
    """Head and rows of a short table: a line a system."""
    return _systems(results, plain=True)


def difference(versus: Json | None, *, plain: bool = False, digits: int = 2) -> str:
    """`**-3.10** [-4.20, -2.00]`: bold (or starred) only where larger than noise."""
    if versus is None or versus["difference"]["value"] is None:
        return DASH
    gap = versus["difference"]
    value = f"{gap['value']:+.{digits}f}"
    if versus["larger_than_noise"]:
        value = f"{value}*" if plain else f"**{value}**"
    return value if gap["low"] is None else f"{value} [{gap['low']:.{digits}f}, {gap['high']:.{digits}f}]"


def sheet(columns: Sequence[Column], things: Iterable[Any]) -> Sheet:
    """The table that its columns describe: a row for each thing."""
    return [heading for heading, _ in columns], [[cell(one) for _, cell in columns] for one in things]


def section(title: str, found: Sheet) -> str:
    """A table under its title; empty without rows. Headings are escaped: they may be names from outside."""
    header, rows = found
    return f"## {title}\n\n{markdown(list(map(escaped, header)), rows)}" if rows else ""


def joined(*parts: str) -> str:
    """A report from its parts, some of which may be empty."""
    return "\n\n".join(part for part in parts if part) + "\n"


def _name(system: Json) -> str:
    return escaped(system["name"])


def _headline(results: Json) -> str:
    scale, tasks = results["scale"], results["systems"][0]["tasks"]
    better = "" if scale["higher_is_better"] else ", lower is better"
    counts = f"{_count(len(tasks), 'task')}, {_count(sum(task['rows'] for task in tasks), 'example')}"
    return joined(
        f"# {escaped(results['title'])}: {escaped(results['target']['name'])}",
        f"{counts}, {scale['name']}{better}; protocol `{results['protocol']['hash']}`.",
        "\n".join(f"- {escaped(note)}" for note in results["notes"]),
    ).rstrip("\n")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _systems(results: Json, *, plain: bool = False) -> Sheet:
    """A line a system; columns that nobody fills are left out."""
    scale = results["scale"]["name"]
    several = len(results["systems"][0]["tasks"]) > 1
    columns: list[Column] = [
        ("system", lambda system: system["name"] if plain else _name(system)),
        (f"average {scale}" if several else scale, lambda system: interval(system["average"])),
        ("vs full", lambda system: difference(system["versus_full"], plain=plain)),
        ("cache kept", lambda system: percent(_kept_share(system) if system["budget"] else None)),
        ("τ", lambda system: DASH if scale == ACCEPTANCE else _tau(system)),
        ("accepted", lambda system: percent(_value(system["acceptance"], "acceptance_rate"))),
        ("texts", _same_texts),
        ("unjudged", _unjudged),
    ]
    return without_empty(*sheet(columns, results["systems"]))


def _kept_share(system: Json) -> float | None:
    """Mean over tasks of the share of the prompt's rows in the cache."""
    shares = [task["kept_share"] for task in system["tasks"] if task["kept_share"] is not None]
    return sum(shares) / len(shares) if shares else None


def _tau(entry: Json) -> str:
    """Acceptance length of a system, or of one in a task."""
    return interval(entry["acceptance"]["tau"]) if entry["acceptance"] else DASH


def _value(acceptance: Json | None, key: str) -> float | None:
    return acceptance[key]["value"] if acceptance else None


def _same_texts(system: Json) -> str:
    """How many drafted texts are those of the same cache without a draft, and what the others are worth.

    A dash if none was compared.
    """
    found = [task["exactness"] for task in system["tasks"] if task["exactness"] is not None]
    compared, different = (sum(one[key] for one in found) for key in ("compared", "different"))
    judged = [one for one in found if one.get("judged", True) and one["violations"] is not None]
    beyond = sum(one["violations"] for one in judged)
    within = sum(one["different"] for one in judged) - beyond
    said = [f"{compared - different}/{compared} the same"]
    said += [f"{within} within rounding"] if within else []
    said += [f"{beyond} beyond rounding"] if beyond else []
    return ", ".join(said) if found else DASH


def _unjudged(system: Json) -> str:
    count = sum(task["unjudged"] for task in system["tasks"])
    return str(count) if count and system["average"]["value"] is not None else DASH


def _tasks(results: Json, drafted: Sequence[Json]) -> list[str]:
    """Point values by task; bold where the difference from the full cache is larger than noise."""
    systems, parts = results["systems"], []
    names = list(dict.fromkeys(task["task"] for system in systems for task in system["tasks"]))
    by = {(system["name"], task["task"]): task for system in systems for task in system["tasks"]}
    if any(task["score"]["value"] is not None for task in by.values()):
        title = f"{results['scale']['name'].capitalize()} by task"
        parts.append(section(title, _grid(systems, names, by, _score)))
    if drafted and len(names) > 1 and results["scale"]["name"] != ACCEPTANCE:
        parts.append(section("Acceptance length τ by task", _grid(drafted, names, by, _tau)))
    return parts


def _grid(
    systems: Sequence[Json],
    names: Sequence[str],
    by: Mapping[tuple[str, str], Json],
    show: Callable[[Json], str],
) -> Sheet:
    """Systems by tasks, or with many tasks and few systems the other way round."""

    def at(system: str, task: str) -> str:
        return show(by[system, task]) if (system, task) in by else DASH

    own = [system["name"] for system in systems]
    if len(names) <= WIDE or len(own) > len(names):
        return ["system", *names], [[escaped(one), *(at(one, name) for name in names)] for one in own]
    return ["task", *own], [[escaped(name), *(at(one, name) for one in own)] for name in names]


def _score(task: Json) -> str:
    versus = task["versus_full"]
    shown = fixed(task["score"]["value"])
    return f"**{shown}**" if shown != DASH and versus and versus["larger_than_noise"] else shown


def _own(results: Json) -> str:
    """Figures that only this suite has, `extra.table` of its summary: a title, and a number a column."""
    having = [system for system in results["systems"] if "table" in system["extra"]]
    if not having:
        return ""
    first = having[0]["extra"]["table"]
    rows = [
        [_name(system), *(fixed(system["extra"]["table"]["columns"].get(one)) for one in first["columns"])]
        for system in having
    ]
    return section(escaped(first["title"]), (["system", *first["columns"]], rows))


def _drafts(drafted: Sequence[Json]) -> list[str]:
    """Acceptance by depth and by place."""
    if not drafted:
        return []
    by_depth = {system["name"]: system["acceptance"]["by_depth"] for system in drafted}
    deepest = max(map(len, by_depth.values()))
    header = ["system", *(f"depth {depth}" for depth in range(1, deepest + 1))]
    depths = [
        [escaped(name), *(percent(one["rate"]["value"]) for one in found), *[DASH] * (deepest - len(found))]
        for name, found in by_depth.items()
        if deepest
    ]
    places = [f"{one['from']} to {one['below'] - 1}" for one in drafted[0]["acceptance"]["by_position"]]
    taus = [
        [_name(system), *(interval(one["tau"]) for one in system["acceptance"]["by_position"])]
        for system in drafted
    ]
    return [
        section("Acceptance by depth (of drafts whose parent was accepted)", (header, depths)),
        section("τ by place in the output (generated tokens)", (["system", *places], taus)),
    ]


def _figures(results: Json) -> Sheet:
    """What the suite reports beside its score: a line for each system and task, columns that nobody fills
    left out; by facet in results.json.
    """
    found = [(system, task) for system in results["systems"] for task in system["tasks"] if task["figures"]]
    columns: list[Column] = [
        ("system", lambda one: _name(one[0])),
        ("task", lambda one: escaped(one[1]["task"])),
    ]
    columns += [
        _figure_column(figure)
        for figure in results["figures"]
        if any(figure["name"] in task["figures"] for _, task in found)
    ]
    return sheet(columns, found if len(columns) > 2 else [])


def _figure_column(figure: Json) -> Column:
    """The column of a figure in a table of (system, task)."""
    return figure["name"], lambda one: _figure(figure, one[1]["figures"].get(figure["name"]))


def _figure(one: Json, found: Json | None) -> str:
    """A figure beside the score, as its suite wants it shown."""
    if found is None or found["value"] is None:
        return DASH
    scale, unit = {"number": (1.0, ""), "percent": (100.0, "%"), "bytes": (1e-6, " MB")}[one["unit"]]
    keys = ("value", "low", "high")
    scaled = {key: None if found[key] is None else scale * found[key] for key in keys}
    return interval(scaled, 1 if one["unit"] == "percent" else 3) + unit


def _rivals(results: Json) -> Sheet:
    """Differences between systems over the same prompts."""
    columns: list[Column] = [
        ("system", lambda one: escaped(one["first"])),
        ("minus", lambda one: escaped(one["second"])),
        ("task", lambda one: escaped(one["task"])),
        (f"difference of {results['scale']['name']}", lambda one: difference(one["score"], digits=3)),
    ]
    return sheet(columns, results["differences"])


def _facets(results: Json) -> list[str]:
    """A table a facet and figure: systems by values."""
    systems, scale, parts = results["systems"], results["scale"]["name"], []
    keys = [("score", scale), *([] if scale == ACCEPTANCE else [("acceptance", "τ")])]
    for facet in dict.fromkeys(one["facet"] for system in systems for one in system["facets"]):
        for key, name in keys:
            found = {
                (system["name"], one["value"]): one[key]
                for system in systems
                for one in system["facets"]
                if one["facet"] == facet and one[key] is not None and one[key]["value"] is not None
            }
            values = sorted({value for _, value in found}, key=lambda v: (isinstance(v, str), v))
            if 2 <= len(values) <= 2 * WIDE:
                own = dict.fromkeys(system for system, _ in found)
                rows = [[escaped(one), *(interval(found.get((one, v))) for v in values)] for one in own]
                title = f"{name.capitalize()} by {escaped(facet)}"
                parts.append(section(title, (["system", *map(str, values)], rows)))
    return [*parts, *_by_position(results)]


def _by_position(results: Json) -> list[str]:
    """A table for each figure beside the score that is drawn: systems by position in a text."""
    parts = []
    for figure in results["figures"]:
        found = {
            (system["name"], one["value"]): _figure(figure, one["figures"].get(figure["name"]))
            for system in results["systems"]
            for one in system["facets"]
            if one["facet"] == POSITION and figure["plotted"]
        }
        places = sorted({place for _, place in found})
        own = dict.fromkeys(system for system, _ in found)
        rows = [[escaped(one), *(found.get((one, place), DASH) for place in places)] for one in own]
        title = f"{figure['name'].capitalize()} by {POSITION}"
        parts.append(section(title, (["system", *map(str, places)], rows)))
    return parts


def _exactness(results: Json) -> str:
    """The first places where drafted text leaves plain decoding, if any does."""
    lines = []
    for system in results["systems"]:
        for task in system["tasks"]:
            found = task["exactness"]
            if found and found["different"]:
                first = found["first"][0]
                lines.append(
                    f"- {_name(system)}, {escaped(task['task'])}: {found['different']} of "
                    f"{found['compared']} texts differ{_gap(found)}; {escaped(first['example'])} at token "
                    f"{first['position']}"
                )
    return "## Drafted texts that differ from plain decoding\n\n" + "\n".join(lines) if lines else ""


def _exact_when(results: Json) -> str:
    """When drafted texts must be plain decoding's to the last token, if any were compared."""
    target = results["target"]
    if not any(task["exactness"] for system in results["systems"] for task in system["tasks"]):
        return ""
    if target.get("strict"):
        return (
            f"Drafted texts must be plain decoding's token for token: in {target['dtype']} on a CPU every "
            "difference is a fault."
        )
    return (
        f"In {target['dtype']} drafted texts are plain decoding's but for rounding: tokens whose logits are "
        "nearer than reading the same text in other steps moves them may change places. Equal to the bit is "
        "bfloat16 on GPUs of compute capability 9.0 in steps of up to 16 rows (texts decoded together times "
        "nodes of a draft, its root included)."
    )


def _gap(found: Json) -> str:
    """What the gap of the logits says of texts that differ, beside what rounding alone moves them by."""
    if not found.get("judged", True):
        return " (sampled)"
    gap, noise = found.get("largest_gap"), found.get("noise")
    said = [] if gap is None else [f"gap of the logits up to {gap:.2g}"]
    said += [f"rounding moves it by up to {noise['largest']:.2g} here"] if noise else []
    beside = f" ({'; '.join(said)})" if said else ""
    return beside if found["violations"] is None else f"{beside}, {found['violations']} beyond rounding"


def _footnote(results: Json) -> str:
    boot = results["bootstrap"]
    full = any(system["kind"] == FULL for system in results["systems"])
    return (
        f"{f'`{FULL}` is {PLAIN} on the whole cache. ' if full else ''}"
        f"Intervals: {100 * boot['confidence']:g}% bootstrap over examples within each task "
        f"({boot['resamples']} resamples, seed {boot['seed']}); tasks of fewer than {LEAST} share their "
        "spread. Bold: the difference from the full cache over the same examples is larger than noise: its "
        f"interval leaves out 0, over {LEAST} examples or more."
    )

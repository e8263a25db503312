"""The report of a run: the content of `table.md` and `report.html`, and a short version for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from longtrain.evaluation.analysis.acceptance import ACCEPTANCE
from longtrain.evaluation.analysis.numbers import POSITION
from longtrain.evaluation.analysis.statistics import LEAST
from longtrain.evaluation.reporting import speeds
from longtrain.evaluation.reporting.document import (
    Bullets,
    Cell,
    Column,
    Paragraph,
    Part,
    ReportTable,
    bounds,
    columns_of,
    difference,
    interval,
    number,
    percent,
    rounded,
    to_markdown,
)
from longtrain.evaluation.suite import DIVERGENCE
from longtrain.tables import DASH

Json = dict[str, Any]

FULL, PLAIN = "full", "plain decoding"
"""The name in tables of the system without eviction or draft, and its description."""
WIDE = 8
"""Maximum number of tasks as columns; with more, the systems become columns."""
NAME: Column = ("system", lambda system: system["name"])


def table(results: Json, timings: Json | None = None) -> str:
    """The Markdown report of a run; for arguments see `report`."""
    return to_markdown(report(results, timings))


def summary(results: Json, timings: Json | None = None) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of a short table for the terminal: one line per system."""
    return _systems(results, timings or {}).plain()


def report(results: Json, timings: Json | None = None) -> list[Part]:
    """Build the report of a run.

    Args:
        results: the output of `results.assemble`.
        timings: the content of timings.json; where systems were timed, speed stands beside their scores.
    """
    drafted = [system for system in results["systems"] if system["acceptance"] is not None]
    return [
        *_headline(results),
        *map(Paragraph, speeds.headline(timings or {})),
        _systems(results, timings or {}),
        *_tasks(results, drafted),
        *_own(results),
        *_drafts(drafted),
        _metrics(results),
        *_facets(results),
        _rivals(results),
        Bullets(_exactness(results), "Drafted texts that differ from plain decoding"),
        *_exact_when(results),
        _footnote(results),
    ]


def _headline(results: Json) -> list[Part]:
    scale, tasks = results["scale"], results["systems"][0]["tasks"]
    better = "" if scale["higher_is_better"] else ", lower is better"
    counts = f"{_count(len(tasks), 'task')}, {_count(sum(task['rows'] for task in tasks), 'example')}"
    return [
        Paragraph(f"{results['title']}: {results['target']['name']}", title=True),
        Paragraph(f"{counts}, {scale['name']}{better}; protocol {results['protocol']['hash']}."),
        Bullets(results["notes"]),
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _systems(results: Json, timings: Json) -> ReportTable:
    """One line per system; columns without values are left out."""
    scale, digits = results["scale"]["name"], score_digits(results["scale"])
    several = len(results["systems"][0]["tasks"]) > 1
    main = [metric for metric in results["metrics"] if metric.get("main")]
    columns: list[Column] = [
        NAME,
        (f"average {scale}" if several else scale, lambda system: interval(system["average"], digits)),
        ("vs full", lambda system: difference(system["versus_full"])),
        *columns_of(
            main, lambda system, metric: _metric(metric, system["metrics"]), lambda metric: metric["name"]
        ),
        ("cache kept", lambda system: percent(_kept_share(system))),
        ("τ", lambda system: DASH if scale == ACCEPTANCE else tau(system)),
        ("accepted", acceptance_rate),
        ("copied", _copied_share),
        *speeds.columns(timings),
        ("texts", _same_texts),
        ("unjudged", _unjudged),
    ]
    return ReportTable.of("Systems", columns, results["systems"]).without_empty()


def score_digits(scale: Json) -> int | None:
    """Decimals of a score; None: three significant digits, since a divergence spans orders of magnitude."""
    return None if scale["name"] == DIVERGENCE else 2


def _kept_share(system: Json) -> float | None:
    """The share of the prompt's KV entries, or of their bytes, that stay in the cache, mean over tasks; None
    for systems that keep everything as it is.
    """
    shares = [task["kept_share"] for task in system["tasks"] if task["kept_share"] is not None]
    share = sum(shares) / len(shares) if shares else None
    return share if system["budget"] or share != 1 else None


def tau(entry: Json) -> Cell | str:
    """The acceptance length of an entry (a system, or a system in a task)."""
    return interval(entry["acceptance"]["tau"]) if entry["acceptance"] else DASH


def acceptance_rate(system: Json) -> Cell | str:
    """The share of a system's drafted tokens that was accepted."""
    return percent(system["acceptance"]["acceptance_rate"]["value"] if system["acceptance"] else None)


def _copied_share(system: Json) -> Cell | str:
    """The share of accepted tokens that look-up copied from the text."""
    return percent((system["acceptance"] or {}).get("copied_share"))


def _same_texts(system: Json) -> str:
    """The number of drafted sequences that equal plain decoding's on the same cache, or a dash."""
    found = [task["exactness"] for task in system["tasks"] if task["exactness"] is not None]
    compared, different = (sum(one[key] for one in found) for key in ("compared", "different"))
    judged = [one for one in found if one.get("judged", True) and one["violations"] is not None]
    beyond = sum(one["violations"] for one in judged)
    within = sum(one["different"] for one in judged) - beyond
    counts = [f"{compared - different}/{compared} the same"]
    counts += [f"{within} within rounding"] if within else []
    counts += [f"{beyond} beyond rounding"] if beyond else []
    return ", ".join(counts) if found else DASH


def _unjudged(system: Json) -> str:
    count = sum(task["unjudged"] for task in system["tasks"])
    return str(count) if count and system["average"]["value"] is not None else DASH


def _tasks(results: Json, drafted: Sequence[Json]) -> list[Part]:
    """Scores by task, highlighted if the difference from the full cache is larger than noise."""
    systems, parts = results["systems"], list[Part]()
    names = list(dict.fromkeys(task["task"] for system in systems for task in system["tasks"]))
    by = {(system["name"], task["task"]): task for system in systems for task in system["tasks"]}
    if any(task["score"]["value"] is not None for task in by.values()):
        title = f"{_begun(results['scale']['name'])} by task"
        parts.append(_grid(title, systems, names, by, partial(_score, digits=score_digits(results["scale"]))))
    if drafted and len(names) > 1 and results["scale"]["name"] != ACCEPTANCE:
        parts.append(_grid("Acceptance length τ by task", drafted, names, by, tau))
    return parts


def _grid(
    title: str,
    systems: Sequence[Json],
    names: Sequence[str],
    by: Mapping[tuple[str, str], Json],
    show: Callable[[Json], Cell | str],
) -> ReportTable:
    """A table of systems by tasks, transposed if there are many tasks and few systems."""

    def at(system: str, task: str) -> Cell | str:
        return show(by[system, task]) if (system, task) in by else DASH

    own = [system["name"] for system in systems]
    if len(names) <= WIDE or len(own) > len(names):
        return ReportTable.of(title, [("system", str), *columns_of(names, at)], own)
    columns = columns_of(own, lambda task, system: at(system, task))
    return ReportTable.of(title, [("task", str), *columns], names)


def _begun(words: str) -> str:
    """Words with a capital at their beginning."""
    return words[:1].upper() + words[1:]


def _score(task: Json, digits: int | None = 2) -> Cell | str:
    versus, value = task["versus_full"], task["score"]["value"]
    if value is None:
        return DASH
    return Cell(rounded(value, digits), strong=bool(versus and versus["larger_than_noise"]), value=value)


def _own(results: Json) -> list[Part]:
    """Metrics that only this suite has (`extra.table` of its summary): one column per number."""
    having = [system for system in results["systems"] if "table" in system["extra"]]
    if not having:
        return []
    first = having[0]["extra"]["table"]
    columns = columns_of(
        first["columns"], lambda system, name: number(system["extra"]["table"]["columns"].get(name))
    )
    return [ReportTable.of(first["title"], [NAME, *columns], having)]


def _drafts(drafted: Sequence[Json]) -> list[Part]:
    """Acceptance by depth and by position in the output."""
    if not drafted:
        return []

    def at_depth(system: Json, depth: int) -> Cell | str:
        found = system["acceptance"]["by_depth"]
        return percent(found[depth]["rate"]["value"]) if depth < len(found) else DASH

    deepest = max(len(system["acceptance"]["by_depth"]) for system in drafted)
    depths = columns_of(range(deepest), at_depth, lambda depth: f"depth {depth + 1}")
    stretches = drafted[0]["acceptance"]["by_position"]
    places = columns_of(
        range(len(stretches)),
        lambda system, place: interval(system["acceptance"]["by_position"][place]["tau"]),
        lambda place: f"{stretches[place]['from']} to {stretches[place]['below'] - 1}",
    )
    about = "Acceptance by depth (of drafts whose parent was accepted)"
    return [
        ReportTable.of(about, [NAME, *depths], drafted if deepest else []),
        ReportTable.of("τ by place in the output (generated tokens)", [NAME, *places], drafted),
    ]


def _metrics(results: Json) -> ReportTable:
    """The suite's metrics beside its score: one line per system and task, without empty columns."""
    found = [(system, task) for system in results["systems"] for task in system["tasks"] if task["metrics"]]
    used = [
        metric for metric in results["metrics"] if any(metric["name"] in task["metrics"] for _, task in found)
    ]
    columns = columns_of(
        used, lambda one, metric: _metric(metric, one[1]["metrics"]), lambda metric: metric["name"]
    )
    names: list[Column] = [("system", lambda one: one[0]["name"]), ("task", lambda one: one[1]["task"])]
    return ReportTable.of("Further metrics", [*names, *columns], found if columns else [])


def _metric(one: Json, metrics: Json) -> Cell | str:
    """The cell of a metric beside the score, in the unit that its suite declares."""
    found = metrics.get(one["name"])
    if found is None or found["value"] is None:
        return DASH
    scale, unit = {"number": (1.0, ""), "percent": (100.0, "%"), "bytes": (1e-6, " MB")}[one["unit"]]
    keys = ("value", "low", "high")
    scaled = {key: None if found[key] is None else scale * found[key] for key in keys}
    digits = 1 if one["unit"] == "percent" else 3
    value, beside = f"{scaled['value']:.{digits}f}", bounds(scaled, digits)
    return Cell(value if beside else value + unit, beside and beside + unit, value=scaled["value"])


def _rivals(results: Json) -> ReportTable:
    """Differences between systems over the same prompts."""
    scale = results["scale"]["name"]
    digits = None if scale == DIVERGENCE else 3
    columns: list[Column] = [
        ("system", lambda one: one["first"]),
        ("minus", lambda one: one["second"]),
        ("task", lambda one: one["task"]),
        (f"difference of {scale}", lambda one: difference(one["score"], digits=digits)),
        (f"quotient of {scale}", lambda one: interval(one.get("quotient"))),
    ]
    title = "Differences over the same prompts (paired bootstrap)"
    return ReportTable.of(title, columns, results["differences"]).without_empty(kept=(0, 1, 2, 3))


def _facets(results: Json) -> list[Part]:
    """A table for each facet: systems by values, for the score, τ, and plotted metrics by position."""
    scale, parts = results["scale"]["name"], list[Part]()
    digits = score_digits(results["scale"])
    metrics = [metric for metric in results["metrics"] if metric["plotted"]]
    for facet in dict.fromkeys(one["facet"] for system in results["systems"] for one in system["facets"]):
        parts += _by_facet(results, facet, scale, lambda one: interval(one["score"], digits))
        if scale != ACCEPTANCE:
            parts += _by_facet(results, facet, "τ", lambda one: interval(one["acceptance"]))
    for metric in metrics:
        parts += _by_facet(results, POSITION, metric["name"], partial(_metric_of, metric))
    return parts


def _metric_of(metric: Json, entry: Json) -> Cell | str:
    return _metric(metric, entry["metrics"])


def _by_facet(results: Json, facet: str, name: str, show: Callable[[Json], Cell | str]) -> list[Part]:
    """Systems by the values of a facet; no table if there is only one value, or too many for a line."""
    cells = {
        (system["name"], one["value"]): show(one)
        for system in results["systems"]
        for one in system["facets"]
        if one["facet"] == facet
    }
    found = {place: cell for place, cell in cells.items() if cell != DASH}
    values = sorted({value for _, value in found}, key=lambda value: (isinstance(value, str), value))
    if not 2 <= len(values) <= 2 * WIDE:
        return []
    columns = columns_of(values, lambda system, value: found.get((system, value), DASH))
    systems = dict.fromkeys(system for system, _ in found)
    return [ReportTable.of(f"{_begun(name)} by {facet}", [("system", str), *columns], systems)]


def _exactness(results: Json) -> list[str]:
    """The first positions at which drafted sequences differ from plain decoding's, for each
    system and task.
    """
    lines = []
    for system in results["systems"]:
        for task in system["tasks"]:
            found = task["exactness"]
            if found and found["different"]:
                first = found["first"][0]
                lines.append(
                    f"{system['name']}, {task['task']}: {found['different']} of {found['compared']} texts "
                    f"differ{_gap(found)}; {first['example']} at token {first['position']}"
                )
    return lines


def _exact_when(results: Json) -> list[Part]:
    """A sentence on the conditions under which drafted sequences must equal plain decoding's, if any were
    compared.
    """
    target = results["target"]
    if not any(task["exactness"] for system in results["systems"] for task in system["tasks"]):
        return []
    if target.get("strict"):
        sentence = (
            f"Drafted texts must equal plain decoding's token for token: in {target['dtype']} on a CPU every "
            "difference is an error."
        )
    else:
        sentence = (
            f"In {target['dtype']} drafted texts equal plain decoding's up to rounding: tokens may swap if "
            "their logits differ by less than the rounding noise of other step sizes. Results are "
            "bit-identical in bfloat16 on GPUs of compute capability 9.0 in steps of up to 16 tokens "
            "(sequences decoded together times nodes of a draft, its root included)."
        )
    return [Paragraph(sentence)]


def _gap(found: Json) -> str:
    """The logit gap of sequences that differ, compared with what rounding alone causes."""
    if not found.get("judged", True):
        return " (sampled)"
    gap, noise = found.get("largest_gap"), found.get("noise")
    details = [] if gap is None else [f"gap of the logits up to {gap:.2g}"]
    if noise:
        measured = noise["texts"] > 0  # where the spacing of numbers explains every gap it is not
        what = "rounding moves it by up to" if measured else "numbers there lie apart by up to"
        details.append(f"{what} {noise['largest']:.2g}{' here' if measured else ''}")
    beside = f" ({'; '.join(details)})" if details else ""
    return beside if found["violations"] is None else f"{beside}, {found['violations']} beyond rounding"


def _footnote(results: Json) -> Paragraph:
    boot = results["bootstrap"]
    full = any(system["kind"] == FULL for system in results["systems"])
    bold = "difference" if results["scale"]["name"] == DIVERGENCE else "difference from the full cache"
    return Paragraph(
        f"{f'The system {FULL} is {PLAIN} on the whole cache. ' if full else ''}"
        f"Intervals: {100 * boot['confidence']:g}% bootstrap over examples within each task "
        f"({boot['resamples']} resamples, seed {boot['seed']}); tasks of fewer than {LEAST} share their "
        f"spread. Bold: the {bold} over the same examples is larger than noise: its "
        f"interval leaves out 0, over {LEAST} examples or more."
    )

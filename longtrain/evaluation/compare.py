"""Two finished runs of one suite against each other: differences over the examples that both have.

Only results of one protocol are compared: other prompts, truncation, templates or decoding, other figures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.harness.ledger import first_difference
from longtrain.evaluation.reporting.tables import cell, difference
from longtrain.evaluation.results import reading_of, verdict
from longtrain.evaluation.statistics import (
    RESAMPLES,
    Figure,
    mean_of_ratios,
    paired_mean_difference,
)
from longtrain.tables import interval, markdown

Json = dict[str, Any]

RESULTS, EXAMPLES = "results.json", "examples.jsonl"
KEYS = ("suite", "title", "notes", "protocol", "scale", "bootstrap", "systems", "target")


@dataclass(frozen=True)
class Run:
    """A finished run as its folder has it.

    Args:
        label: what it is called in the comparison.
        results: its results.json.
        outputs: task -> example -> system -> output, of its examples.jsonl.
        prompts: task -> example -> hash of the prompt's tokens.
    """

    label: str
    results: Json
    outputs: Mapping[str, Mapping[str, Mapping[str, Json]]]
    prompts: Mapping[str, Mapping[str, str]]

    @property
    def systems(self) -> dict[str, Json]:
        """Its systems by name."""
        return {system["name"]: system for system in self.results["systems"]}


def load(folders: Sequence[Path]) -> list[Run]:
    """Read finished runs.

    Args:
        folders: run folders, or the suite's folder in one (`runs/NAME/eval/SUITE`).

    Raises:
        ConfigError: a folder without results, or with those of several suites.
        DataError: a damaged file.
    """
    found = [_suite_folder(folder) for folder in folders]
    return [_load(folder, label) for folder, label in zip(found, _labels(folders), strict=True)]


def compare(first: Run, second: Run, *, seed: int = 0, resamples: int = RESAMPLES) -> Json:
    """Systems of two runs in pairs, each difference being the second's figure minus the first's.

    Systems of one name are a pair; of those that only one run has, each pair with the same budget.

    Args:
        first: a run.
        second: another of the same suite and protocol.
        seed: of the bootstrap.
        resamples: bootstrap replicates.

    Raises:
        ConfigError: another suite or protocol, or nothing to pair.
    """
    check_protocols(first, second)
    pairs = pairs_of(first, second)
    if not pairs:
        raise ConfigError(
            f"{first.label} and {second.label} have no system in common and none of the same budget; they "
            f"have {', '.join(first.systems)} and {', '.join(second.systems)}"
        )
    book = _Book(first, second, seed, resamples)
    return {
        "schema": 1,
        "suite": first.results["suite"],
        "title": first.results["title"],
        "notes": _notes(first, second),
        "protocol": {"hash": first.results["protocol"]["hash"]},
        "scale": first.results["scale"],
        "bootstrap": {**first.results["bootstrap"], "seed": seed, "resamples": resamples},
        "runs": [
            {"label": run.label, "title": run.results["title"], "target": run.results["target"]}
            for run in (first, second)
        ],
        "pairs": [book.pair(a, b) for a, b in pairs],
    }


def check_protocols(first: Run, second: Run) -> None:
    """Refuse what cannot be compared.

    Raises:
        ConfigError: the suites, protocols or prompts differ; it names the first setting or example that does.
    """
    a, b = first.results, second.results
    if a["suite"] != b["suite"]:
        raise ConfigError(
            f"{first.label} is of suite {a['suite']}, {second.label} of {b['suite']}; compare runs of one"
        )
    if a["protocol"]["hash"] != b["protocol"]["hash"]:
        settings = [run["protocol"]["settings"] for run in (a, b)]
        _check_tasks(first, second)
        same = settings[0] == settings[1]  # a hash that is not that of its settings
        where, one, other = first_difference(*([a["protocol"], b["protocol"]] if same else settings))
        raise ConfigError(
            f"{first.label} and {second.label} have other protocols, so their figures cannot be compared: "
            f"{where} is {one} in the first and {other} in the second; run one of them again with the "
            "other's settings"
        )
    if a["scale"] != b["scale"]:
        raise ConfigError(
            f"{first.label} measures {a['scale']}, {second.label} {b['scale']}; run one of them again"
        )
    for task, prompts in first.prompts.items():
        theirs = second.prompts.get(task, {})
        for example in (name for name, prompt in prompts.items() if theirs.get(name, prompt) != prompt):
            raise ConfigError(
                f"{first.label} and {second.label} gave the target other prompts, though their settings are "
                f"the same: first in task {task}, example {example} ({prompts[example]} and "
                f"{theirs[example]}); run both again with one version of the data and of longtrain"
            )


def _check_tasks(first: Run, second: Run) -> None:
    """Refuse runs of other tasks, by the tasks' names."""
    tasks = [set(run.results["protocol"]["settings"].get("tasks", {})) for run in (first, second)]
    alone = [
        f"{'task' if len(some) == 1 else 'tasks'} {', '.join(sorted(some))} only in {run.label}"
        for run, some in ((first, tasks[0] - tasks[1]), (second, tasks[1] - tasks[0]))
        if some
    ]
    if alone:
        raise ConfigError(
            f"{first.label} and {second.label} have other protocols, so their figures cannot be compared: "
            f"{'; '.join(alone)}; run one of them again with the other's tasks"
        )


def pairs_of(first: Run, second: Run) -> list[tuple[str, str]]:
    """Names of the systems to compare, in the first run's order."""
    a, b = first.systems, second.systems
    pairs = []
    for name, system in a.items():
        if name in b:
            pairs.append((name, name))
            continue
        others = [other for other in b if other not in a and b[other]["budget"] == system["budget"]]
        pairs += [(name, other) for other in others]
    return pairs


def table(compared: Json) -> str:
    """The Markdown report of a comparison."""
    a, b = compared["runs"]
    parts = [
        f"# {cell(compared['title'])}: {cell(a['label'])} and {cell(b['label'])}",
        f"Difference: {cell(b['label'])} minus {cell(a['label'])}, over the examples that both have; bold "
        f"where larger than noise. Protocol `{compared['protocol']['hash']}`.",
        "\n".join(f"- {cell(note)}" for note in compared["notes"]),
        markdown(*rows(compared)),
    ]
    names = list(dict.fromkeys(task["task"] for pair in compared["pairs"] for task in pair["tasks"]))
    if len(names) > 1:
        lines = []
        for pair in compared["pairs"]:
            by = {task["task"]: task["score"] for task in pair["tasks"]}
            cells = [difference(by[name]) if name in by else "-" for name in names]
            lines.append([cell(pair["name"]), *cells])
        parts.append("## By task\n\n" + markdown(["system", *map(cell, names)], lines))
    return "\n\n".join(part for part in parts if part) + "\n"


def rows(compared: Json, *, plain: bool = False) -> tuple[list[str], list[list[str]]]:
    """Head and a line a pair: both figures, their difference, and that of the acceptance length."""
    a, b = (run["label"] for run in compared["runs"])
    name = compared["scale"]["name"]
    header = ["system", f"{name}, {a}", f"{name}, {b}", "difference", "difference of τ", "examples"]
    lines = []
    for pair in compared["pairs"]:
        shown = pair["name"] if plain else cell(pair["name"])
        figures = [interval(pair["average"][key]) for key in ("first", "second")]
        gaps = [difference(pair[key], plain=plain) for key in ("average", "acceptance")]
        lines.append([shown, *figures, *gaps, str(pair["examples"])])
    used = [i for i in range(len(header)) if i in (0, 5) or any(line[i] != "-" for line in lines)]
    head = [header[i] if plain else cell(header[i]) for i in used]
    return head, [[line[i] for i in used] for line in lines]


class _Book:
    """Differences of one comparison."""

    def __init__(self, first: Run, second: Run, seed: int, resamples: int) -> None:
        self.first, self.second = first, second
        self.draw: Any = {"seed": seed, "resamples": resamples}
        scale = first.results["scale"]
        self.reading = reading_of(scale["name"], scale["maximum"])

    def pair(self, a: str, b: str) -> Json:
        tasks = []
        scores: list[tuple[Figure, Figure]] = []
        cycles: list[tuple[Figure, Figure]] = []
        count = 0
        for task in self.first.outputs:
            both = self._both(task, a, b)
            if not both:
                continue
            count += len(both)
            score = self._figures(both, self._share)
            scores.append(score)
            cycles.append(self._figures(both, lambda one: one.get("cycles")))
            tasks.append({"task": task, "examples": len(both), "score": self._difference([score])})
        return {
            "name": a if a == b else f"{a} / {b}",
            "first": a,
            "second": b,
            "examples": count,
            "tasks": tasks,
            "average": self._difference(scores),
            "acceptance": self._tau(cycles),
        }

    def _share(self, one: Json) -> Any:
        return self.reading.share(one["score"], one.get("measures"), one.get("cycles"))

    def _both(self, task: str, a: str, b: str) -> list[tuple[Json, Json]]:
        theirs = self.second.outputs.get(task, {})
        return [
            (outputs[a], theirs[name][b])
            for name, outputs in self.first.outputs[task].items()
            if a in outputs and b in theirs.get(name, {})
        ]

    def _figures(self, both: list[tuple[Json, Json]], share: Any) -> tuple[Figure, Figure]:
        """Of those examples that have a figure in both runs."""
        shares = [(share(a), share(b)) for a, b in both]
        known = [(a, b) for a, b in shares if a is not None and b is not None]
        first, second = ([pair[side] for pair in known] for side in (0, 1))
        return _columns(first), _columns(second)

    def _difference(self, figures: list[tuple[Figure, Figure]]) -> Json:
        gap = paired_mean_difference(
            [(b, a) for a, b in figures], of=self.reading.of, bounds=self.reading.bounds, **self.draw
        )
        sides = {
            key: mean_of_ratios(
                [pair[side] for pair in figures], of=self.reading.of, bounds=self.reading.bounds, **self.draw
            ).to_json()
            for side, key in enumerate(("first", "second"))
        }
        return {**sides, **verdict(gap)}

    def _tau(self, cycles: list[tuple[Figure, Figure]]) -> Json | None:
        """Of the acceptance length, pooled over tasks; None where no draft ran in one of them."""
        pooled = [
            ([v for one in cycles for v in one[side][0]], [v for one in cycles for v in one[side][1]])
            for side in (0, 1)
        ]
        gap = paired_mean_difference([(pooled[1], pooled[0])], **self.draw)
        return verdict(gap) if gap.n else None


def _columns(shares: list[Any]) -> Figure:
    return [above for above, _ in shares], [below for _, below in shares]


def _notes(first: Run, second: Run) -> list[str]:
    a, b = (run.results["target"] for run in (first, second))
    notes = list(dict.fromkeys([*first.results["notes"], *second.results["notes"]]))
    if a["weights_hash"] != b["weights_hash"]:
        notes.insert(0, f"the targets' weights differ: {a['name']} and {b['name']}")
    if a["dtype"] != b["dtype"]:
        notes.insert(0, f"the targets' precision differs: {a['dtype']} and {b['dtype']}")
    return notes


def _suite_folder(folder: Path) -> Path:
    if (folder / RESULTS).is_file():
        return folder
    inside = sorted(path.parent for path in folder.glob(f"eval/*/{RESULTS}"))
    if len(inside) == 1:
        return inside[0]
    if inside:
        names = ", ".join(str(path) for path in inside)
        raise ConfigError(f"{folder} has results of several suites; name one of: {names}")
    raise ConfigError(f"{folder} has no {RESULTS}; pass the folder of a finished run, runs/NAME/eval/SUITE")


def _labels(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths that tell the runs apart."""
    parts = [[part for part in folder.resolve().parts] for folder in folders]
    most = max(map(len, parts))
    for length in range(1, most + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    own = [
        [part for part in name.split("/") if not all(part in n.split("/") for n in names)] for name in names
    ]
    return ["/".join(some) or name for some, name in zip(own, names, strict=True)]


def _load(folder: Path, label: str) -> Run:
    results, examples = folder / RESULTS, folder / EXAMPLES
    outputs: dict[str, dict[str, dict[str, Json]]] = {}
    prompts: dict[str, dict[str, str]] = {}
    at = results
    try:
        found = json.loads(results.read_text(encoding="utf-8"))
        missing = [key for key in KEYS if key not in found]
        if missing:
            raise KeyError(missing[0])
        at = examples
        for line in examples.read_text(encoding="utf-8").split("\n"):
            if not line:
                continue
            one = json.loads(line)
            outputs.setdefault(one["task"], {})[one["example"]] = one["outputs"]
            prompts.setdefault(one["task"], {})[one["example"]] = one["prompt_sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{at} cannot be read ({type(error).__name__}: {error}); run the suite again: its work is kept"
        ) from None
    return Run(label, found, outputs, prompts)

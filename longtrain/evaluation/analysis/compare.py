"""Compares two finished runs of one suite: differences over the examples that both runs have.

Both runs must share one protocol, since prompts, truncation, templates and decoding change the metrics.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.analysis.numbers import (
    Pair,
    ScoreScale,
    change_of,
    numbers_of_output,
    scale_of,
)
from longtrain.evaluation.analysis.results import PLAIN_KINDS, verdict
from longtrain.evaluation.analysis.statistics import USUAL, Bootstrap
from longtrain.evaluation.harness.results_journal import first_difference
from longtrain.evaluation.suite import Metric
from longtrain.files import parse_json, read_bytes, read_results

Json = dict[str, Any]

RESULTS, EXAMPLES = "results.json", "examples.jsonl"
KEYS = ("suite", "title", "notes", "protocol", "scale", "bootstrap", "systems", "target")


@dataclass(frozen=True)
class Run:
    """A finished run, as read from its folder.

    Args:
        label: its name in the comparison.
        results: the content of its results.json.
        outputs: task -> example -> system -> output, of its examples.jsonl.
        prompts: task -> example -> hash of the prompt's tokens.
    """

    label: str
    results: Json
    outputs: Mapping[str, Mapping[str, Mapping[str, Json]]]
    prompts: Mapping[str, Mapping[str, str]]

    @property
    def systems(self) -> dict[str, Json]:
        """The run's entries in `results["systems"]`, by system name."""
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


def compare(first: Run, second: Run, draw: Bootstrap = USUAL) -> Json:
    """Compare systems of two runs in pairs; each difference is the second run's metric minus the first's.

    Systems of the same name are paired; the remaining ones are paired if they have the same budget.

    Args:
        first: a run.
        second: another of the same suite and protocol.
        draw: settings of the bootstrap.

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
    book = _Differences(first, second, draw)
    return {
        "schema": 1,
        "suite": first.results["suite"],
        "title": first.results["title"],
        "notes": _notes(first, second),
        "protocol": {"hash": first.results["protocol"]["hash"]},
        "scale": first.results["scale"],
        "bootstrap": asdict(draw),
        "runs": [
            {"label": run.label, "title": run.results["title"], "target": run.results["target"]}
            for run in (first, second)
        ],
        "pairs": [book.pair(a, b) for a, b in pairs],
    }


def check_protocols(first: Run, second: Run) -> None:
    """Refuse two runs that are not comparable.

    Raises:
        ConfigError: the suites, protocols or prompts differ; it names the first setting or example that does.
    """
    a, b = first.results, second.results
    if a["suite"] != b["suite"]:
        raise ConfigError(
            f"{first.label} is of suite {a['suite']}, {second.label} of {b['suite']}; compare runs of one"
        )
    if a["protocol"]["hash"] != b["protocol"]["hash"]:
        _check_tasks(first, second)
        where, one, other = first_difference(a["protocol"]["settings"], b["protocol"]["settings"])
        raise ConfigError(
            f"{first.label} and {second.label} have other protocols, so their results cannot be compared: "
            f"{where} is {one} in the first and {other} in the second; run one of them again with the "
            "other's settings"
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
    """Refuse runs with different task names."""
    tasks = [set(run.results["protocol"]["settings"].get("tasks", {})) for run in (first, second)]
    alone = [
        f"{'task' if len(some) == 1 else 'tasks'} {', '.join(sorted(some))} only in {run.label}"
        for run, some in ((first, tasks[0] - tasks[1]), (second, tasks[1] - tasks[0]))
        if some
    ]
    if alone:
        raise ConfigError(
            f"{first.label} and {second.label} have other protocols, so their results cannot be compared: "
            f"{'; '.join(alone)}; run one of them again with the other's tasks"
        )


def pairs_of(first: Run, second: Run) -> list[tuple[str, str]]:
    """Names of the pairs of systems to compare, in the first run's order."""
    a, b = first.systems, second.systems
    pairs = []
    for name, system in a.items():
        if name in b:
            pairs.append((name, name))
            continue
        others = [other for other in b if other not in a and b[other]["budget"] == system["budget"]]
        pairs += [(name, other) for other in others]
    return pairs


class _Differences:
    """Computes the differences of one comparison. Each pair of numbers is (second run, first run)."""

    def __init__(self, first: Run, second: Run, draw: Bootstrap) -> None:
        self.first, self.second, self.draw = first, second, draw
        self.reading = scale_of(first.results["scale"])
        known = [[Metric(**one) for one in run.results.get("metrics", [])] for run in (first, second)]
        self.metrics = [one for one in known[0] if one in known[1] and one.kind in PLAIN_KINDS]

    def pair(self, a: str, b: str) -> Json:
        """The differences between a system of the first run and one of the second."""
        both = {task: pairs for task in self.first.outputs if (pairs := self._both(task, a, b))}
        strata = [both[task] for task in sorted(both)]  # the order of tasks changes no interval
        every = [pair for pairs in strata for pair in pairs]
        gaps = {one.name: change_of(one, every, self.draw) for one in self.metrics}
        return {
            "name": a if a == b else f"{a} / {b}",
            "first": a,
            "second": b,
            "examples": len(every),
            "tasks": [
                {"task": task, "examples": len(pairs), "score": self._score([pairs])}
                for task, pairs in both.items()
            ],
            "average": self._score(strata),
            "acceptance": self._acceptance(every),
            "metrics": {name: verdict(gap) for name, gap in gaps.items() if gap.n},
        }

    def _both(self, task: str, a: str, b: str) -> list[Pair]:
        others = self.second.outputs.get(task, {})
        return [
            (numbers_of_output(others[name][b]), numbers_of_output(outputs[a]))
            for name, outputs in self.first.outputs[task].items()
            if a in outputs and b in others.get(name, {})
        ]

    def _score(self, strata: list[list[Pair]]) -> Json:
        """Both scores and their difference, over the examples that have a score in both runs."""
        known = [[pair for pair in pairs if all(map(self.reading.share, pair))] for pairs in strata]
        second, first = (
            self.reading.mean([[pair[side] for pair in pairs] for pairs in known], self.draw).to_json()
            for side in (0, 1)
        )
        return {"first": first, "second": second, **verdict(self.reading.difference(known, self.draw))}

    def _acceptance(self, every: list[Pair]) -> Json | None:
        """The difference in acceptance length, pooled over tasks, or None if a run has no draft."""
        drafted = [pair for pair in every if all("cycles" in one for one in pair)]
        gap = ScoreScale(lambda one: (one["cycle_tokens"], one["cycles"])).difference([drafted], self.draw)
        return verdict(gap) if gap.n else None


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
    """The shortest trailing parts of the paths that tell the runs apart."""
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
        found = read_results(results)
        missing = [key for key in KEYS if key not in found]
        if missing:
            raise KeyError(missing[0])
        at = examples
        lines = read_bytes(examples)
        if found.get("examples_sha256", digest := hashlib.sha256(lines).hexdigest()) != digest:
            raise ValueError("it was changed since it was written")
        for line in lines.splitlines():
            one = parse_json(line)
            for output in one["outputs"].values():
                numbers_of_output(output)
            outputs.setdefault(one["task"], {})[one["example"]] = one["outputs"]
            prompts.setdefault(one["task"], {})[one["example"]] = one["prompt_sha256"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{at} cannot be read ({type(error).__name__}: {error}); run the suite again, which "
            "does not repeat finished examples"
        ) from None
    return Run(label, found, outputs, prompts)

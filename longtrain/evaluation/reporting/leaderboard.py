"""Many finished evaluations on one page: groups that may be compared, and why others may not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from longtrain.errors import ConfigError, DataError, first_line
from longtrain.evaluation.figures.compare import KEYS, RESULTS
from longtrain.evaluation.harness.ledger import first_difference
from longtrain.evaluation.reporting.board import board, rows_of
from longtrain.evaluation.reporting.tables import joined
from longtrain.files import as_json, read_json
from longtrain.provenance import commit_of, machine_of, typed_command, without_folders
from longtrain.tables import escaped, markdown
from longtrain.targets.info import source_line

Json = dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """A finished evaluation.

    Args:
        label: what the page calls it.
        results: its results.json.
        made: its provenance.json; empty: there is none.
        timings: its timings.json.
    """

    label: str
    results: Json
    made: Json
    timings: Json

    @property
    def kind(self) -> tuple[str, ...]:
        """What must be equal in two evaluations whose figures are compared."""
        target = self.results["target"]
        found = (self.results["suite"], target["weights_hash"], target["dtype"])
        return *map(str, found), str(self.results["protocol"]["hash"])

    @property
    def commit(self) -> str:
        """The code that ran; empty: not known."""
        return commit_of(self.made)

    @property
    def machine(self) -> str:
        """What it ran on."""
        return machine_of(self.made)


def load(folders: Sequence[Path]) -> list[Finished]:
    """The evaluations in folders, each once.

    Args:
        folders: results' folders (`runs/NAME/eval/SUITE`), runs (`runs/NAME`) or folders of runs.

    Raises:
        ConfigError: a folder without results.
        DataError: a damaged file.
    """
    places: dict[Path, None] = {}
    for folder in folders:
        patterns = (RESULTS, f"*/{RESULTS}", f"eval/*/{RESULTS}", f"*/eval/*/{RESULTS}")
        found = [file.parent for pattern in patterns for file in sorted(folder.glob(pattern))]
        if not found:
            raise ConfigError(
                f"{folder} has no {RESULTS}; pass folders of finished evaluations: runs/NAME, or "
                "runs/NAME/eval/SUITE"
            )
        places |= dict.fromkeys(one.resolve() for one in found)
    names = [_run_name(place) for place in places]
    return [
        _load(place, name if names.count(name) == 1 else f"{name} ({place.parent.parent.parent.name})")
        for place, name in zip(places, names, strict=True)
    ]


def leaderboard(found: Sequence[Finished]) -> Json:
    """The page's figures as JSON values: groups of rows, what sets groups apart, and the evaluations."""
    kinds = dict.fromkeys(one.kind for one in sorted(found, key=lambda one: one.kind))
    groups = [[one for one in found if one.kind == kind] for kind in kinds]
    apart = [
        {"first": a + 1, "second": b + 1, "because": _because(groups[a][0], groups[b][0])}
        for a, b in combinations(range(len(groups)), 2)
        if groups[a][0].results["suite"] == groups[b][0].results["suite"]
    ]
    return {
        "schema": 1,
        "said": _said(len(groups), len(found)),
        "groups": [_group(place, members) for place, members in enumerate(groups, 1)],
        "apart": apart,
        "runs": [_about(one) for one in found],
    }


def page_text(made: Json) -> str:
    """The page as Markdown."""
    parts = ["# Leaderboard", made["said"]]
    for group in made["groups"]:
        header, rows = group["header"], group["rows"]
        parts += [
            f"## {group['number']}. {escaped(group['title'])}: {escaped(group['target'])}, {group['dtype']}",
            f"`suite={group['suite']}`, protocol `{group['protocol']}`; {escaped(group['scale'])}, "
            f"{'higher' if group['higher_is_better'] else 'lower'} is better.",
            "\n".join(f"- {escaped(note)}" for note in group["notes"]),
            markdown([*map(escaped, header)], [[escaped(cell) for cell in row] for row in rows]),
        ]
    if made["apart"]:
        lines = [
            f"- {one['first']} and {one['second']}: {escaped('; '.join(one['because']))}"
            for one in made["apart"]
        ]
        parts += ["## What may not be compared", "\n".join(lines)]
    for one in made["runs"]:
        about = ", ".join(one[key] for key in ("commit", "machine", "at") if one[key])
        runs = [f"**{escaped(one['run'])}** {escaped(about)}", f"```sh\n{one['command']}\n```"]
        parts += ["## Evaluations", *runs] if one is made["runs"][0] else runs
    return joined(*parts)


def _said(groups: int, runs: int) -> str:
    return (
        f"Evaluations: {runs}, in groups: {groups}. Figures of one group may be compared: "
        "same suite, target, precision and protocol (prompts, decoding, scores). Those of two groups may "
        "not. In brackets: 95% intervals; a star: the difference from the full cache is "
        "larger than noise over the same examples."
    )


def _group(number: int, members: Sequence[Finished]) -> Json:
    """Rows of the systems of evaluations that may be compared, the best first, and notes."""
    first = members[0].results
    rows: list[Json] = []
    for one in members:
        for row in rows_of(one.results, one.timings):
            same = [other for other in rows if _outcome(other) == _outcome(row)]
            if same and row["speed"] is same[0]["speed"] is None:
                same[0]["run"] += f", {one.label}"
            else:
                rows.append({**row, "run": one.label})
    better = -1.0 if first["scale"]["higher_is_better"] else 1.0
    rows.sort(key=lambda row: (row["score"]["value"] is None, better * (row["score"]["value"] or 0.0)))
    header, cells = board(first["scale"]["name"], rows, more=[("run", lambda row: row["run"])])
    return {
        "number": number,
        "suite": first["suite"],
        "title": first["title"],
        "target": _named(first["target"]),
        "dtype": first["target"]["dtype"],
        "protocol": first["protocol"]["hash"],
        "scale": first["scale"]["name"],
        "higher_is_better": first["scale"]["higher_is_better"],
        "notes": _notes(members),
        "header": header,
        "rows": cells,
    }


def _outcome(row: Json) -> str:
    """What two rows of one system that ran twice have in common."""
    return json.dumps([row[key] for key in ("system", "facts", "score", "acceptance")], sort_keys=True)


def _named(target: Json) -> str:
    """A target's name, the beginning of its weights' hash, and which weights they are where that is known."""
    said = source_line(target.get("source", {}))
    known = f"{str(target['weights_hash'])[:8]}" + (f"; {said}" if said else "")
    return f"{without_folders(target['name'])} ({known})"


def _notes(members: Sequence[Finished]) -> list[str]:
    notes = list(dict.fromkeys(str(note) for one in members for note in one.results["notes"]))
    commits = dict.fromkeys(one.commit or "not known" for one in members)
    if len(commits) > 1:
        notes.append(
            f"measured with other commits ({', '.join(commits)}): small differences may be the code's"
        )
    elif any("changed" in one.commit for one in members):
        notes.append("measured with code that has no commit: it was changed and not committed")
    machines = dict.fromkeys(one.machine or "not known" for one in members)
    if len(machines) > 1 and any(one.timings.get("speed") for one in members):
        notes.append(
            f"measured on other machines ({', '.join(machines)}): speeds of two runs may not be compared"
        )
    return notes


def _because(first: Finished, second: Finished) -> list[str]:
    """What sets two evaluations of one suite apart."""
    a, b, found = first.results, second.results, []
    if a["target"]["weights_hash"] != b["target"]["weights_hash"]:
        names = [str(without_folders(one["target"]["name"])) for one in (a, b)]
        found.append(f"other targets ({' and '.join(dict.fromkeys(names))}, by their weights)")
    if a["target"]["dtype"] != b["target"]["dtype"]:
        found.append(f"other precision ({a['target']['dtype']} and {b['target']['dtype']})")
    if a["protocol"]["hash"] != b["protocol"]["hash"]:
        settings = [one["protocol"].get("settings") or {} for one in (a, b)]
        where = ""
        if settings[0] != settings[1]:
            where, one, other = first_difference(*settings)
            where = f": {where} is {one} and {other}"
        found.append(f"other data, prompts or decoding{where}")
    if first.commit != second.commit:
        found.append(f"other commits ({first.commit or 'not known'} and {second.commit or 'not known'})")
    return found


def _about(one: Finished) -> Json:
    argv = without_folders(one.made.get("argv") or [])
    return {
        "run": one.label,
        "command": typed_command(argv) if argv else "",
        "commit": one.commit,
        "machine": one.machine,
        "at": str(one.made.get("time_utc", ""))[:16],
    }


def _run_name(place: Path) -> str:
    """`NAME/SUITE` of runs/NAME/eval/SUITE; another folder's own name."""
    parts = place.parts
    return f"{parts[-3]}/{parts[-1]}" if len(parts) > 2 and parts[-2] == "eval" else parts[-1]


def _load(place: Path, label: str) -> Finished:
    found: list[Mapping[str, Any]] = []
    for name in (RESULTS, "provenance.json", "timings.json"):
        file = place / name
        try:
            value = read_json(file) if file.is_file() or name == RESULTS else {}
            missing = [key for key in KEYS if name == RESULTS and key not in value]
            if not isinstance(value, dict) or missing:
                raise ValueError(f"it lacks {missing[0]}" if missing else "it is no object")
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"{file} cannot be read: {error}; run the suite again: its work is kept"
            ) from None
        found.append(value)
    one = Finished(label, *map(dict, found))
    try:
        made = leaderboard([one])  # whatever the page wants of it is looked at once
        page_text(made), as_json(made)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise DataError(
            f"{place} holds other values than eval writes ({type(error).__name__}: {first_line(error)}); "
            "run the suite again: its work is kept"
        ) from error
    return one

"""Describes an artifact from its own files, without loading its target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from longtrain import methods, tables
from longtrain.artifact.card import ROLES, sources_of
from longtrain.artifact.evidence import Evidence, Measurement
from longtrain.artifact.folder import READ, Artifact
from longtrain.artifact.found import HUB, find, imported, reader_of
from longtrain.artifact.golden.checks import Verification
from longtrain.artifact.stored import LAWS, read_manifest, refuse_not_finite
from longtrain.assets import MANIFEST
from longtrain.errors import ArtifactError
from longtrain.journals import journals_in
from longtrain.provenance import commit_of, typed_command
from longtrain.settings import from_file
from longtrain.targets.info import TargetInfo, source_line

Facts = dict[str, str]


@dataclass(frozen=True)
class Inspection:
    """The description of an artifact.

    Args:
        facts: name -> value, in display order.
        results: results of evaluations of it.
        fault: reason why it is unverified; empty if it is verified.
    """

    facts: Facts
    results: list[Measurement] = field(default_factory=list)
    fault: str = ""


def inspect(
    where: str, *, home: str = ".", trained_by: str | None = None, unverified: bool = False
) -> Inspection:
    """Describe an artifact, a folder in another tool's format, or a target, from its files.

    Args:
        where: see `Artifact.load`; or a target's folder or GGUF file.
        home: the folder that holds `checkpoints`.
        trained_by: see `Artifact.load`.
        unverified: see `Artifact.load`.

    Raises:
        ArtifactError: nothing is found, it is of another kind, or its manifest cannot be read.
    """
    place = Path(where).expanduser()
    if not where.startswith(HUB) and place.is_dir():
        if advice := _another_thing(place):
            raise ArtifactError(f"{place} {advice}")
        if (place / "config.json").is_file() and not (place / MANIFEST).is_file() and not reader_of(place):
            return _target(place)
    elif where == "tiny" or (where.lower().endswith(".gguf") and place.is_file()):
        from longtrain.targets.at_hand import folder_of

        return _target(folder_of(where))
    folder = find(where, Path(home), patterns=READ)
    if (folder / MANIFEST).is_file():
        return _artifact(where, folder, unverified=unverified)
    return _of_another_tool(folder, trained_by)


def _artifact(where: str, folder: Path, *, unverified: bool) -> Inspection:
    manifest, fault, found = read_manifest(folder / MANIFEST), "", None
    evidence = Evidence()
    try:
        found = Artifact.load(folder, unverified=True)
        evidence = Evidence.of_folder(folder)
        fault = "" if unverified else "; ".join(found.verification.faults)
    except ArtifactError as error:
        fault = str(error)
    made, golden = manifest["provenance"], manifest["golden"]
    role = ROLES[(golden or {}).get("kind", LAWS)]["tag"]
    sums = [name for name in manifest["files"] if (folder / name).is_file()]
    facts = {
        "artifact": where if where.startswith(HUB) else str(folder),
        "method": _method(str(manifest["method"])),
        "for": role,
        "tensors": "" if found is None else _tensors(found.tensors),
        "files": _sizes(folder),
        "target": _target_line(manifest["target"]),
        "made by": typed_command(made["argv"]) if made.get("argv") else "",
        "at": _made(made, str(manifest.get("longtrain"))),
        "data": "; ".join(_sources(made)),
        "unchecked": _unchecked(made),
        "licence": f"{made.get('license') or 'not stated'}; of the target: "
        f"{made.get('target_license') or 'not recorded'}",
        "other tools": ", ".join(sorted({name.partition("/")[0] for name in sums if "/" in name})),
        **{name: _line(curve.values) for name, curve in evidence.curves.items()},
        **_comparisons(manifest),
        "verifies": fault
        or f"sha256 of {len(sums)} files, names and shapes, finite weights, "
        + (f"golden outputs in {golden['dtype']}" if golden else "no golden outputs")
        + "; whether they are reproduced shows at every load with the target",
    }
    return Inspection({key: text for key, text in facts.items() if text}, evidence.results, fault)


def _comparisons(manifest: Mapping[str, Any]) -> Facts:
    """Return the checks made at export, and the largest rounding noise of the target there."""
    found: Verification = from_file(Verification, manifest["verification"])
    noise = (manifest["golden"] or {}).get("noise") or {}
    failed = [check for check in found.checks if not check.passed]
    facts = {"compared": found.summary()}
    facts |= {f"failed {number}": f"{check}" for number, check in enumerate(failed, 1)}
    facts |= {f"unverified {number}": fault for number, fault in enumerate(found.faults, 1)}
    largest = sorted(noise, key=lambda name: -noise[name])[:4]
    facts["rounding"] = ", ".join(f"{name} {noise[name]:.2g}" for name in largest)
    return facts


def _of_another_tool(folder: Path, trained_by: str | None) -> Inspection:
    spec = reader_of(folder)
    assert spec is not None and spec.formats is not None
    facts, fault = {"folder": f"{folder} (in another tool's format)", "method": _method(spec.name)}, ""
    try:
        _, found = imported(folder, trained_by)
        facts |= {"tensors": _tensors(found.tensors), "files": _sizes(folder)}
        facts |= {"target": _target_line(found.target.to_json())}
        facts |= {key: str(value) for key, value in found.about.items() if key != "folder"}
        refuse_not_finite(found.tensors, str(folder))
        facts["verifies"] = "; ".join(spec.formats.verify(folder, None, trained_by))
    except ArtifactError as error:
        fault = facts["verifies"] = str(error)
    return Inspection(facts, fault=fault)


def _target(folder: Path) -> Inspection:
    """Describe a target's folder: its config, and if its weights are complete and finite."""
    import torch

    from longtrain.targets.at_hand import folder_at_hand, licence_of
    from longtrain.targets.config_file import read_config
    from longtrain.targets.info import check_supported
    from longtrain.targets.stored.checkpoint import StoredWeights

    config = read_config(folder)
    check_supported(config, str(folder))
    facts, fault, count = {"target": f"{folder}: {config.model_type}"}, "", 0
    facts["target"] += f", {config.num_hidden_layers} layers, hidden {config.hidden_size}, vocabulary "
    facts["target"] += f"{config.vocab_size}, {config.max_position_embeddings} positions"
    facts |= {"files": _sizes(folder), "licence": licence_of(str(folder)) or "not stated"}
    try:
        folder_at_hand(str(folder))
        for name, stored in StoredWeights(
            folder, device=torch.device("cpu"), tied=config.tie_word_embeddings
        ):
            rows = stored.rows(slice(None))
            count += rows.numel()
            refuse_not_finite({name: rows}, str(stored.file))
        facts["verifies"] = (
            f"{count:,} weights, all finite; nothing is recorded that they could be compared with"
        )
    except ArtifactError as error:
        fault = facts["verifies"] = str(error)
    return Inspection(facts, fault=fault)


def _another_thing(folder: Path) -> str:
    """Return the kind of a run folder and the command for it; empty if it is not a run folder."""
    if folder.suffix == ".ckpt":
        return "is a checkpoint of a training run; export the run: longtrain export name=NAME"
    if list(folder.glob("results.json")) or journals_in(folder).is_dir():
        return f"holds results of an evaluation, no artifact; see {folder / 'table.md'}"
    if (folder / MANIFEST).is_file():
        return ""
    if (folder / "train").is_dir() or (folder / "metrics.csv").is_file():
        name = folder.parent.name if folder.name == "train" else folder.name
        return f"is a training run, no artifact; export it, longtrain export name={name}, and inspect that"
    if (folder / "eval").is_dir():
        return f"holds results of evaluations, no artifact; see {folder / 'eval'}/*/table.md"
    return ""


def _method(name: str) -> str:
    return f"{name} ({methods.get(name).paper})" if name in methods.names() else f"{name}, not known here"


def _tensors(tensors: Mapping[str, Tensor]) -> str:
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    count = sum(tensor.numel() for tensor in tensors.values())
    return f"{count:,} parameters in {len(tensors)} tensors, {', '.join(dtypes)}"


def _sizes(folder: Path) -> str:
    """Describe the sizes of the largest files and their sum."""
    sizes = {
        str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()
    }
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:4]
    listed = ", ".join(f"{name} {_bytes(sizes[name])}" for name in largest)
    more = len(sizes) - len(largest)
    return f"{_bytes(sum(sizes.values()))}: {listed}{f' and {more} more' if more else ''}"


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def _target_line(values: Mapping[str, Any]) -> str:
    try:
        info = TargetInfo.from_json(dict(values))
    except (TypeError, AttributeError):
        return "described wrongly"
    shape = f"{info.n_layers} layers, hidden {info.hidden_size}, vocabulary {info.vocab_size}"
    weights = f", weights {info.weights_hash[:12]}" if info.weights_hash else ""
    said = source_line(info.source)
    source = f"; {said}" if said else ""
    return f"{info.name or 'unnamed'} ({info.family or 'family not said'}, {shape}{weights}{source})"


def _made(made: Mapping[str, Any], version: str) -> str:
    commit = f"commit {commit_of(made)}" if commit_of(made) else ""
    step = f"step {made['step']}" if made.get("step") else ""
    step = f"unfinished: {made['unfinished']}" if made.get("unfinished") else step
    return ", ".join(
        part for part in (step, str(made.get("time_utc", "")), f"longtrain {version}", commit) if part
    )


def _unchecked(made: Mapping[str, Any]) -> str:
    """Name the training records that the export could not read because they were damaged."""
    found = ", ".join(made.get("unchecked") or ())
    return f"{found} was damaged at export, so nothing is known of the data" if found else ""


def _sources(made: Mapping[str, Any]) -> Iterator[str]:
    for source in sources_of(made):
        name = source.get("id") or source.get("name") or "?"
        yield f"{name} ({source.get('license') or 'licence not stated'})"


def _line(values: list[float]) -> str:
    return f"{tables.sparkline(values)} {tables.number(values[0])} to {tables.number(values[-1])}"

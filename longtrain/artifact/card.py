"""Writes the README.md (model card) of an artifact; cards of other tools' formats share its parts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain import tables
from longtrain.artifact.evidence import Evidence, Measurement
from longtrain.errors import ConfigError
from longtrain.provenance import typed_command
from longtrain.targets.info import source_line

if TYPE_CHECKING:
    from longtrain.artifact.folder import Artifact
    from longtrain.artifact.golden.checks import Verification
    from longtrain.methods.spec import MethodSpec
    from longtrain.targets.info import TargetInfo

Json = Mapping[str, Any]
HERE = "FOLDER"
"""Placeholder for the path of an artifact that is not on the Hub; readers insert their own."""
TRAINING = "training.png"
"""File name of the plot of the training's curves."""

LOADING = """```sh
longtrain inspect {address}
longtrain generate artifact={address} {more}target.path={target} prompt_file=PROMPT.txt
longtrain eval suite={suite} artifact={address} target.path={target} lengths=[1k,2k,4k]
```

```python
from longtrain.artifact import Artifact
from longtrain.decoding.engine import Engine
from longtrain.targets.loading import load_target

target = load_target("{target}")
parts = Artifact.load("{address}").attach(target{budget})  # refuses another target
ids = target.tokenizer(open("PROMPT.txt").read()).input_ids
generation = Engine(target, parts).generate([ids], max_new_tokens=128)
print(generation.texts[0])
```

{places}Nothing in this folder is code, and loading it runs none."""

ROLES: dict[str, dict[str, str]] = {
    "laws": {
        "tag": "speculative-decoding",
        "suite": "acceptance",
        "outputs": "the draft's laws for it",
        "limit": "It changes the speed and not the text: what it drafts is checked by the target. How much "
        "it gains depends on the text, the length and the machine.",
    },
    "scores": {
        "tag": "kv-cache-eviction",
        "suite": "eviction",
        "more": "evict.budget_tokens=128 ",
        "budget": ", budget_tokens=128",
        "outputs": "the importance of its tokens",
        "limit": "Rows that it evicts are gone: answers can differ from the full cache's, the more so the "
        "smaller the budget.",
    },
    "rows": {
        "tag": "sparse-attention",
        "suite": "needle",
        "more": "evict.budget_tokens=1024 ",
        "budget": ", budget_tokens=1024",
        "outputs": "the scores of its rows",
        "limit": "Each step reads a part of the cache: answers can differ from the full cache's, the more so "
        "the fewer rows are read.",
    },
}
"""Kind of golden outputs (of a draft, an evictor or a selector) -> texts of the card."""


def model_card(
    artifact: Artifact,
    spec: MethodSpec,
    *,
    name: str,
    role: str,
    address: str | None = None,
    pictures: Iterable[str] = (),
    evidence: Evidence | None = None,
    copies: Iterable[str] = (),
) -> str:
    """Return the README.md of an artifact.

    Args:
        artifact: the artifact, without local paths.
        spec: its method.
        name: its name, for the title.
        role: its role in an engine, a key of `ROLES`.
        address: its place on the Hub, `hub:ORG/NAME`; None: the card refers to its own folder.
        pictures: PNG files beside the card, e.g. `training.png`.
        evidence: training curves and evaluation results.
        copies: folders beside the card with the module in other tools' formats.
    """
    target, about, known = artifact.target, ROLES[role], evidence or Evidence()
    shown = target.name if target.name == "tiny" or is_hub_id(target.name) else "TARGET_FOLDER"
    where, pictures = address or HERE, list(pictures)
    places = {HERE: "the folder that holds this file", "TARGET_FOLDER": "the target's folder"}
    said = [f"`{word}` stands for {what}" for word, what in places.items() if word in (where, shown)]
    loading = LOADING.format(
        address=where,
        target=shown,
        places=f"{' and '.join(said)}. " if said else "",
        **{"more": "", "budget": "", **about},
    )
    rows = [(f"`{key}`", f"`{_plain(value)}`") for key, value in artifact.config.items()]
    sections = {
        "Unverified": unverified(artifact.verification),
        "How to load": loading,
        **elsewhere(artifact, spec, where=where, target=shown),
        **of_run(artifact.provenance, known, pictures),
        "Limits": limits(artifact.provenance, known, about["limit"]),
        "Configuration": tables.markdown(("key", "value"), rows) if rows else "",
        "Files": _files(about["outputs"], known, copies),
    }
    tags = ["longtrain", spec.name, "long-context", about["tag"]]
    front = front_matter(target, artifact.provenance, tags)
    body = "\n\n".join([f"# {name}", _about(artifact, spec), *_titled(sections)])
    return f"---\n{front}\n---\n\n{body}\n"


def front_matter(target: TargetInfo, provenance: Json, tags: Sequence[str]) -> str:
    """Return the YAML header of a card, which the Hub reads."""
    from huggingface_hub import ModelCardData

    named = is_hub_id(target.name)
    found = [str(source["id"]) for source in sources_of(provenance) if is_hub_id(str(source.get("id", "")))]
    return ModelCardData(
        library_name="longtrain",
        tags=list(tags),
        base_model=target.name if named else None,
        base_model_relation="adapter" if named else None,
        license=provenance.get("license"),
        datasets=list(dict.fromkeys(found)) or None,
    ).to_yaml()


def of_run(provenance: Json, evidence: Evidence, pictures: Sequence[str]) -> dict[str, str]:
    """Return the card's sections about a run, title -> text: results, curves, command, data and licences."""
    return {
        "Results": "\n\n".join(_result(one) for one in evidence.results),
        "Curves": _curves(evidence, pictures),
        "Training": _training(provenance),
    }


def appended(card: str, provenance: Json, evidence: Evidence, pictures: Sequence[str]) -> str:
    """Append the sections of `of_run` to another card; titles that it already has are skipped."""
    own = of_run(provenance, evidence, pictures)
    fresh = {title: text for title, text in own.items() if f"\n## {title}\n" not in card}
    return "\n\n".join([card.rstrip("\n"), *_titled(fresh)]) + "\n"


def licensed(card: str, provenance: Json) -> str:
    """Add the licences to the card of another tool's folder, as text and in the header that the Hub reads."""
    if stated := provenance.get("license"):
        card = card.replace("---\n", f"---\nlicense: {stated}\n", 1)
    return "\n\n".join([card.rstrip("\n"), _licences(provenance)]) + "\n"


def limits(provenance: Json, evidence: Evidence, of_role: str) -> str:
    """Return the card's list of limitations of an artifact."""
    stages = (provenance.get("data") or {}).get("stages") or []
    longest = max((int(stage.get("doc_tokens") or 0) for stage in stages), default=0)
    unfinished = provenance.get("unfinished")
    lines = [
        f"Its training was cut short ({unfinished})." if unfinished else "",
        "It works with the target that it was trained for and refuses any other, fine-tuned ones included.",
        of_role,
        "It was trained and checked on hidden states that an engine wrote; it has not run on the target here."
        if provenance.get("states")
        else "",
        f"It was trained on texts of up to {tables.tokens(longest)} tokens; what it does beyond is known as "
        "far as it was measured."
        if longest
        else "",
        "It was measured on the texts of the results above; nothing is known of others."
        if evidence.results
        else "It was not evaluated when this card was written, so nothing is known of its quality.",
    ]
    return "\n".join(f"- {line}" for line in lines if line)


def elsewhere(artifact: Artifact, spec: MethodSpec, *, where: str, target: str) -> dict[str, str]:
    """Return sections, title -> text, on loading the artifact with other tools and on its export formats."""
    found = {
        f"In {tool}": text.replace("ADDRESS", where.removeprefix("hub:")).replace("TARGET", target)
        for tool, text in spec.elsewhere.items()
    }
    served = {} if spec.formats is None else spec.formats.serves
    lines = []
    for form, engines in served.items():
        assert spec.formats is not None
        try:
            spec.formats.refuse(form, artifact.typed_config(), artifact.target)
        except ConfigError:
            continue  # this module has a feature that engines reading this format would ignore
        lines.append(f"longtrain export artifact={where} format={form}   # {engines}")
    if lines:
        commands = "\n".join(lines)
        found["In serving engines"] = (
            f"```sh\n{commands}\n```\n\nEach writes `checkpoints/NAME-FORMAT`, whose README.md has the "
            "engine's command."
        )
    return found


def is_hub_id(name: str) -> bool:
    """Return True if the name of a target or a data source has the form ORG/NAME of the Hub."""
    return name.count("/") == 1 and not is_path(name) and " " not in name


def is_path(name: str) -> bool:
    """Return True if a target's name is a local folder, and not a Hub id or another name."""
    if name in ("", "tiny"):
        return False
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or Path(name).exists()


def _titled(sections: Mapping[str, str]) -> list[str]:
    return [f"## {title}\n\n{text}" for title, text in sections.items() if text]


def unverified(found: Verification) -> str:
    """Return a warning with the reasons why an artifact is unverified; empty if all checks passed."""
    if not found.faults:
        return ""
    lines = [
        "It may not compute what was trained: a comparison failed. It runs with `unverified=true` alone."
    ]
    lines += [f"- {tables.escaped(fault)}" for fault in found.faults]
    rows = [
        (check.what, f"{check.error:.2g}", f"{check.limit:.2g}", "yes" if check.passed else "NO")
        for check in found.checks
    ]
    shown = tables.markdown(("compared at export", "relative error", "allowed", "passed"), rows)
    return "\n".join(lines) + (f"\n\n{shown}" if rows else "")


def _about(artifact: Artifact, spec: MethodSpec) -> str:
    target = artifact.target
    return (
        f"A module of method `{spec.name}` ({artifact.parameters():,} parameters) for the frozen target "
        f"**{target.name or 'unnamed'}** ({target.family}, {target.n_layers} layers, "
        f"hidden {target.hidden_size}, {target.n_heads} query and {target.n_kv_heads} KV heads of "
        f"{target.head_dim}, vocabulary {target.vocab_size}{_weights(target)}). It works with that target "
        f"only: loading checks shapes, rotary settings, tokenizer and weights."
        f"\n\nMethod: {spec.paper}. Trained with longtrain.\n\n{_licences(artifact.provenance)}"
    )


def _weights(target: TargetInfo) -> str:
    said = source_line(target.source)
    return f"; weights: {said}" if said else ""


def _licences(provenance: Json) -> str:
    return (
        f"Licence of the module: {provenance.get('license') or 'not stated'}; of the target: "
        f"{provenance.get('target_license') or 'not recorded, see its own card'}; of the data: below. "
        "All of them apply."
    )


def _files(outputs: str, evidence: Evidence, copies: Iterable[str]) -> str:
    return (
        "`longtrain.json`: method, configuration, target, checksums and provenance. "
        "`model.safetensors`: the trained tensors. "
        f"`golden.safetensors`: a fixed prompt and {outputs}, asked again at every load. "
        + ("`evidence.json`: the curves and results above, as numbers. " if evidence != Evidence() else "")
        + "".join(f"`{folder}/`: the same for other tools. " for folder in sorted(copies))
    ).strip()


def _result(one: Measurement) -> str:
    """Return an evaluation's table with the settings its numbers depend on, and its pictures."""
    header = [tables.escaped(cell) for cell in one.header]
    rows = [[tables.escaped(cell) for cell in row] for row in one.rows]
    facts = f"`suite={one.suite}` on {one.target} in {one.dtype}; protocol `{one.protocol}`"
    facts += f"; measured on {one.machine}" if one.machine else ""
    parts = [
        f"### {tables.escaped(one.title)}",
        tables.markdown(header, rows),
        f"{facts}{f'; commit `{one.commit}`' if one.commit else ''}. With 95% intervals in brackets; a star: "
        "the difference from the full cache is larger than noise.",
        "\n".join(f"- {tables.escaped(note)}" for note in one.notes),
        f"```sh\n{one.command}\n```" if one.command else "",
        *map(_picture, one.pictures),
    ]
    return "\n\n".join(part for part in parts if part)


def _curves(evidence: Evidence, pictures: Sequence[str]) -> str:
    """Return the pictures that belong to no result, and each curve's first and last value."""
    shown = {name for one in evidence.results for name in one.pictures}
    parts = [_picture(name) for name in pictures if name not in shown]
    if evidence.curves:
        rows = [
            (f"`{name}`", curve.steps[-1], tables.number(curve.values[0]), tables.number(curve.values[-1]))
            for name, curve in evidence.curves.items()
        ]
        parts.append(tables.markdown(("figure", "last step", "first", "last"), rows))
    return "\n\n".join(parts)


def _picture(file: str) -> str:
    return f"![{file.removesuffix('.png')}]({file})"


def _training(provenance: Json) -> str:
    """Return the training's command, settings, and data with licences."""
    lines = []
    if provenance.get("unfinished"):
        lines.append(f"**Its training was cut short: this is {provenance['unfinished']}.**")
    if provenance.get("argv"):
        lines.append(f"Command:\n\n```sh\n{typed_command(provenance['argv'])}\n```")
    facts = {key: provenance[key] for key in ("step", "tokens", "git", "versions") if provenance.get(key)}
    if facts:
        lines.append("\n".join(f"- {key}: {_plain(value)}" for key, value in facts.items()))
    rows = [
        (
            source.get("id") or source.get("name") or "?",
            source.get("revision") or "",
            source.get("kind") or "",
            source.get("license") or "not stated",
        )
        for source in sources_of(provenance)
    ]
    data = tables.markdown(("source", "revision", "kind", "licence"), rows)
    lines.append(f"Data:\n\n{data}" if rows else "Data: not recorded.")
    return "\n\n".join(lines)


def sources_of(provenance: Json) -> list[Json]:
    """Return the sources of the data that a module was trained on."""
    return (provenance.get("data") or {}).get("sources") or []


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)

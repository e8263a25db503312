"""The model card of an artifact: Markdown for people, front matter for the Hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.provenance import typed_command

if TYPE_CHECKING:
    from longtrain.artifact.folder import Artifact


def model_card(
    artifact: Artifact, *, name: str, pictures: Iterable[str] = (), copies: Iterable[str] = ()
) -> str:
    """The README.md of an artifact.

    Args:
        artifact: what the card describes.
        name: the artifact's name.
        pictures: PNG files beside the card, e.g. `loss.png`.
        copies: folders beside the card that hold the module in formats of other tools.
    """
    parts = [
        _front_matter(artifact),
        f"# {name}",
        _summary(artifact),
        _how_to_load(artifact, name),
        _training(artifact.provenance),
        _curves(pictures),
        _configuration(artifact),
        _files(artifact, copies),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(artifact: Artifact) -> str:
    kind = "kv-cache-eviction" if evicts(artifact) else "speculative-decoding"
    lines = [
        "---",
        "library_name: longtrain",
        f"tags: [longtrain, {artifact.method}, long-context, {kind}]",
    ]
    if _is_hub_id(artifact.target.name):
        lines += [f"base_model: {artifact.target.name}", "base_model_relation: adapter"]
    licence = artifact.provenance.get("license")
    if licence:
        lines.append(f"license: {licence}")
    datasets = [
        str(source["id"]) for source in _sources(artifact.provenance) if _is_hub_id(str(source.get("id", "")))
    ]
    if datasets:
        lines.append(f"datasets: [{', '.join(dict.fromkeys(datasets))}]")
    return "\n".join([*lines, "---"])


def _summary(artifact: Artifact) -> str:
    from longtrain import methods

    target = artifact.target
    shown = target.name or "unnamed"
    return (
        f"A `{artifact.method}` module ({artifact.parameters():,} parameters) for the frozen target "
        f"**{shown}** ({target.family}, {target.n_layers} layers, "
        f"hidden {target.hidden_size}, {target.n_heads} query and {target.n_kv_heads} KV heads of "
        f"{target.head_dim}, vocabulary {target.vocab_size}). It works with that target only: loading checks "
        f"shapes, rotary settings, tokenizer and weights.\n\nMethod: {methods.get(artifact.method).paper}. "
        "Trained with longtrain."
    )


def _how_to_load(artifact: Artifact, name: str) -> str:
    target = artifact.target.name
    target = target if target == "tiny" or _is_hub_id(target) else "TARGET_FOLDER"
    if evicts(artifact):
        return f"""## How to load

```sh
longtrain generate artifact={name} evict.budget_tokens=128 target.path={target} prompt_file=LONG.txt
longtrain eval suite=eviction artifact={name} target.path={target} lengths=[4k,8k]
```

```python
from longtrain.artifact import Artifact
from longtrain.decoding.engine import Engine
from longtrain.targets.loading import load_target

target = load_target("{target}")
parts = Artifact.load("{name}").attach(target, budget_tokens=128)  # rows kept of each layer and KV head
ids = target.tokenizer(open("LONG.txt").read()).input_ids
generation = Engine(target, parts).generate([ids], max_new_tokens=128)
print(target.tokenizer.decode(generation.tokens[0]))
```

Nothing in this folder is code, and loading it runs none."""
    return f"""## How to load

```sh
longtrain generate artifact={name} target.path={target} prompt="Once upon a time"
longtrain eval suite=acceptance artifact={name} target.path={target} lengths=[1k,2k,4k]
```

```python
from longtrain.artifact import Artifact
from longtrain.decoding.engine import Engine
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import TreeShape
from longtrain.targets.loading import load_target

target = load_target("{target}")
parts = Artifact.load("{name}").attach(target)  # refuses another target, verifies the golden outputs
engine = Engine(target, parts, limits=Limits(batch=1, tokens=8192, nodes=5))
ids = target.tokenizer("Once upon a time").input_ids
generation = engine.generate([ids], max_new_tokens=128, shape=TreeShape((1, 1, 1, 1)))
print(target.tokenizer.decode(generation.tokens[0]))
```

Nothing in this folder is code, and loading it runs none."""


def _training(provenance: Mapping[str, Any]) -> str:
    lines = ["## Training"]
    if provenance.get("argv"):
        lines.append(f"Command:\n\n```sh\n{typed_command(provenance['argv'])}\n```")
    facts = {key: provenance[key] for key in ("step", "tokens", "git", "versions") if provenance.get(key)}
    if facts:
        lines.append("\n".join(f"- {key}: {_plain(value)}" for key, value in facts.items()))
    sources = _sources(provenance)
    if sources:
        rows = [
            f"| {s.get('id') or s.get('name') or '?'} | {s.get('revision') or ''} | {s.get('kind') or ''} "
            f"| {s.get('license') or s.get('licence') or 'not stated'} |"
            for s in sources
        ]
        lines.append("Data:\n\n| source | revision | kind | licence |\n|---|---|---|---|\n" + "\n".join(rows))
    else:
        lines.append("Data: not recorded.")
    lines.append("The licences of the target model and of the training data apply beside any stated above.")
    return "\n\n".join(lines)


def _curves(pictures: Iterable[str]) -> str:
    shown = [f"![{name.removesuffix('.png')}]({name})" for name in pictures]
    return "## Curves\n\n" + "\n\n".join(shown) if shown else ""


def _configuration(artifact: Artifact) -> str:
    rows = "\n".join(f"| `{key}` | `{_plain(value)}` |" for key, value in artifact.config.items())
    return f"## Configuration\n\n| key | value |\n|---|---|\n{rows}" if rows else ""


def evicts(artifact: Artifact) -> bool:
    """Whether the method chooses what of the cache stays, by its golden outputs."""
    from longtrain.artifact.golden_scores import ScoreGolden

    return isinstance(artifact.golden, ScoreGolden)


def _files(artifact: Artifact, copies: Iterable[str]) -> str:
    said = "the importance of its tokens" if evicts(artifact) else "the draft's laws for it"
    golden = f"`golden.safetensors`: a fixed prompt and {said}, asked again at every load. "
    return (
        "## Files\n\n`longtrain.json`: method, configuration, target, checksums and provenance. "
        "`model.safetensors`: the trained tensors. "
        + (golden if artifact.golden is not None else "")
        + "".join(f"`{folder}/`: the same for other tools. " for folder in sorted(copies))
    ).strip()


def _sources(provenance: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The data's sources, as a list of mappings, whatever the depth they were recorded at."""
    data = provenance.get("data") or {}
    found = data.get("sources", data) if isinstance(data, Mapping) else data
    if isinstance(found, Mapping):
        found = [
            {"name": key, **(value if isinstance(value, Mapping) else {})} for key, value in found.items()
        ]
    return [source for source in found or [] if isinstance(source, Mapping)]


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not is_path(name) and " " not in name


def is_path(name: str) -> bool:
    """Whether a target's name is a folder of this machine, and not a Hub id or another name."""
    if name in ("", "tiny"):
        return False
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or Path(name).exists()


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)

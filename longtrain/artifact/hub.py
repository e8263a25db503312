"""Artifacts on the Hub: the model card, uploading and downloading, through `huggingface_hub`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from longtrain import tables
from longtrain.errors import ArtifactError, ConfigError
from longtrain.methods.spec import MethodSpec
from longtrain.provenance import typed_command
from longtrain.targets.info import TargetInfo

LOADING = """```sh
longtrain generate artifact={name} {more}target.path={target} {prompt}
longtrain eval suite={suite} artifact={name} target.path={target} lengths=[1k,2k,4k]
```

```python
from longtrain.artifact import Artifact
from longtrain.decoding.engine import Engine
from longtrain.targets.loading import load_target

target = load_target("{target}")
parts = Artifact.load("{name}").attach(target{budget})  # refuses another target, verifies the golden outputs
ids = target.tokenizer(open("PROMPT.txt").read()).input_ids
generation = Engine(target, parts).generate([ids], max_new_tokens=128)
print(target.tokenizer.decode(generation.tokens[0]))
```

Nothing in this folder is code, and loading it runs none."""


def model_card(
    spec: MethodSpec,
    config: Mapping[str, Any],
    target: TargetInfo,
    provenance: Mapping[str, Any],
    *,
    name: str,
    parameters: int,
    role: str,
    pictures: Iterable[str] = (),
    copies: Iterable[str] = (),
) -> str:
    """The README.md of an artifact.

    Args:
        spec: the method.
        config: its configuration as plain values.
        target: the target that the module was trained for.
        provenance: the command, versions and data that made the artifact.
        name: the artifact's name.
        parameters: numbers in all of its tensors.
        role: what it is to an engine: `laws` (it drafts), `scores` (it evicts) or `rows` (it selects).
        pictures: PNG files beside the card, e.g. `loss.png`.
        copies: folders beside the card that hold the module in formats of other tools.
    """
    from huggingface_hub import ModelCardData

    kind = {"scores": "kv-cache-eviction", "rows": "sparse-attention"}.get(role, "speculative-decoding")
    sources = _sources(provenance)
    hub_ids = [str(source["id"]) for source in sources if _is_hub_id(str(source.get("id", "")))]
    facts = ModelCardData(
        library_name="longtrain",
        tags=["longtrain", spec.name, "long-context", kind],
        base_model=target.name if _is_hub_id(target.name) else None,
        base_model_relation="adapter" if _is_hub_id(target.name) else None,
        license=provenance.get("license"),
        datasets=list(dict.fromkeys(hub_ids)) or None,
    )
    shown = target.name if target.name == "tiny" or _is_hub_id(target.name) else "TARGET_FOLDER"
    how = {"prompt": "prompt_file=PROMPT.txt", "more": "", "budget": "", "suite": "acceptance"}
    if role == "rows":
        how |= {"more": "evict.budget_tokens=1024 ", "budget": ", budget_tokens=1024", "suite": "needle"}
    if role == "scores":
        how |= {"more": "evict.budget_tokens=128 ", "budget": ", budget_tokens=128", "suite": "eviction"}
    about = (
        f"A `{spec.name}` module ({parameters:,} parameters) for the frozen target "
        f"**{target.name or 'unnamed'}** ({target.family}, {target.n_layers} layers, "
        f"hidden {target.hidden_size}, {target.n_heads} query and {target.n_kv_heads} KV heads of "
        f"{target.head_dim}, vocabulary {target.vocab_size}). It works with that target only: loading checks "
        f"shapes, rotary settings, tokenizer and weights.\n\nMethod: {spec.paper}. Trained with longtrain."
    )
    outputs = {"scores": "the importance of its tokens", "rows": "the scores of its rows"}.get(
        role, "the draft's laws for it"
    )
    files = (
        "`longtrain.json`: method, configuration, target, checksums and provenance. "
        "`model.safetensors`: the trained tensors. "
        f"`golden.safetensors`: a fixed prompt and {outputs}, asked again at every load. "
        + "".join(f"`{folder}/`: the same for other tools. " for folder in sorted(copies))
    )
    rows = [(f"`{key}`", f"`{_plain(value)}`") for key, value in config.items()]
    sections = {
        "How to load": LOADING.format(name=name, target=shown, **how),
        "Training": _training(provenance, sources),
        "Curves": "\n\n".join(f"![{file.removesuffix('.png')}]({file})" for file in pictures),
        "Configuration": tables.markdown(("key", "value"), rows) if rows else "",
        "Files": files.strip(),
    }
    body = "".join(f"\n\n## {title}\n\n{text}" for title, text in sections.items() if text)
    return f"---\n{facts.to_yaml()}\n---\n\n# {name}\n\n{about}{body}\n"


def upload(folder: Path, repo: str, *, patterns: Sequence[str], private: bool | None = None) -> str:
    """Create the repository if need be and upload the folder in one commit.

    Args:
        folder: an artifact.
        repo: ORG/NAME.
        patterns: file names to upload; anything else in the folder stays.
        private: whether a new repository is private; None: the account's default.

    Returns:
        The address of the commit.

    Raises:
        ConfigError: `repo` is not ORG/NAME, the Hub is switched off, or nobody is logged in.
        ArtifactError: the Hub refused or cannot be reached.
    """
    import httpx
    import huggingface_hub as hub

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ConfigError(f"push={repo} is no repository name; allowed: ORG/NAME")
    address = endpoint()
    if hub.is_offline_mode():
        raise ConfigError(f"cannot push to {repo}: HF_HUB_OFFLINE is set; run: unset HF_HUB_OFFLINE")
    if hub.get_token() is None:
        raise ConfigError(
            f"cannot push to {repo}: not logged in to {address}; run: hf auth login, or set HF_TOKEN"
        )
    api = hub.HfApi(endpoint=address, library_name="longtrain")
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=list(patterns),
            commit_message="Upload with longtrain",
        )
    except (httpx.HTTPError, OSError, ValueError) as error:
        raise ArtifactError(f"{address} did not take {repo}: {_first_line(error)}") from None
    return str(commit.commit_url)


def download(repo: str, *, patterns: Sequence[str], known: Sequence[str] = ()) -> Path:
    """Fetch an artifact's files, from the local copy where there is one.

    Args:
        repo: ORG/NAME.
        patterns: file names to fetch; nothing else is.
        known: local artifacts, named in the error.

    Raises:
        ArtifactError: the artifact is not there, or the Hub cannot be reached.
    """
    import httpx
    import huggingface_hub as hub

    address = endpoint()
    try:
        folder = Path(hub.snapshot_download(repo, allow_patterns=list(patterns), endpoint=address))
    except (httpx.HTTPError, OSError, ValueError) as error:
        raise ArtifactError(
            f"no artifact '{repo}': not a folder, not under checkpoints/ (there: "
            f"{', '.join(known) or 'none'}), and {address} did not give it: {_first_line(error)}"
        ) from None
    return folder


def endpoint() -> str:
    """The address of the Hub (`HF_ENDPOINT` decides)."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _training(provenance: Mapping[str, Any], sources: Sequence[Mapping[str, Any]]) -> str:
    lines = []
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
            source.get("license") or source.get("licence") or "not stated",
        )
        for source in sources
    ]
    data = tables.markdown(("source", "revision", "kind", "licence"), rows)
    lines.append(f"Data:\n\n{data}" if rows else "Data: not recorded.")
    lines.append("The licences of the target model and of the training data apply beside any stated above.")
    return "\n\n".join(lines)


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

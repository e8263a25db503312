"""Folders of drafts that engines load: their files, and keys and text that do not depend on the method."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor

from longtrain.errors import ArtifactError, first_line
from longtrain.files import as_json, need_regular, read_json
from longtrain.log import get_logger
from longtrain.methods.folder_keys import written_rope
from longtrain.methods.written_folders import checksums
from longtrain.pickled import read_pickled_tensors
from longtrain.targets.config_file import read_object
from longtrain.targets.info import draft_rope

if TYPE_CHECKING:
    from longtrain.targets.info import TargetInfo

log = get_logger(__name__)

Json = dict[str, Any]

CONFIG, MODEL, INDEX, PICKLED = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
)
FOLDER = "longtrain"
RECORD, GOLDEN = f"{FOLDER}/record.json", f"{FOLDER}/golden.safetensors"
TRAINER = "longtrain"
SPECULATORS_VERSION = "0.9.0"
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Accepted dtypes of weights; quantised ones are refused."""


CARD = """---
tags: [{tag}, speculative-decoding, longtrain]
library_name: {library}
---

# {name}

{title} draft for **{target}** ({shape}), trained with longtrain and written in the `{form}` format. \
{window}It works with that target only.

## Serve it

vLLM (the window, where there is one, is in `config.json`):

```sh
vllm serve {target} --speculative-config '{speculative}'
```

{more}

## Check it

```sh
longtrain export --verify FOLDER
```

`longtrain/` holds fixed inputs and what the draft made of them; engines do not read it.
"""
SPECULATORS_MORE = """`vllm serve FOLDER` alone does the same: the target and the number of drafted tokens
are in `config.json` (`speculators_config`). SGLang does not read this format; export `format=flat` for it."""


def speculators_config(algorithm: str, info: TargetInfo, drafted: int) -> Json:
    """Return the part of a speculators folder that fills vLLM's command line; `drafted` tokens a cycle."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": drafted,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": info.name or None, "architectures": [_architecture(info)]},
    }


def _architecture(info: TargetInfo) -> str:
    """Return the class name of the target's language model."""
    if "architecture" in info.extra:  # of a family that does not run here
        return str(info.extra["architecture"])
    stems = {"gemma3_text": "Gemma3", "smollm3": "SmolLM3"}
    known = stems.get(info.family, "".join(map(str.capitalize, info.family.split("_"))))
    return f"{known}ForCausalLM"


def read_config(folder: Path) -> dict[str, Any]:
    """Read the folder's `config.json`.

    Raises:
        ArtifactError: it cannot be read, or is not a mapping.
    """
    return read_object(folder / CONFIG, "copy or export it again")


def weight_paths(folder: Path) -> list[Path]:
    """Return the weight files of a folder: safetensors (one, or those of an index), or an old pickle.

    Raises:
        ArtifactError: there are none.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            parts = sorted({*read_json(index)["weight_map"].values()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ArtifactError(f"{index} cannot be read: {error}; copy the folder again") from None
        return [folder / str(part) for part in parts]
    for name in (MODEL, PICKLED):
        if (folder / name).is_file():
            return [folder / name]
    raise ArtifactError(f"{folder} holds neither {MODEL} nor {PICKLED}; copy or export it again")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder under its own names; a pickle is read without executing code.

    Raises:
        ArtifactError: a file is missing or damaged, or holds something else.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for path in weight_paths(folder):
        try:
            if path.suffix == ".safetensors":
                need_regular(path)
                found |= load_file(path)
            else:
                found |= read_pickled_tensors(path)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise ArtifactError(
                f"{path} is missing or damaged: {first_line(error)}; copy or export it again"
            ) from None
    return found


def matching(
    folder: Path, expected: Mapping[str, tuple[int, ...]], named: Sequence[tuple[str, str, Tensor]]
) -> dict[str, Tensor]:
    """Check that tensors (name in the folder, in the module, tensor) are those of a module; return them.

    Raises:
        ArtifactError: tensors are missing, of another shape, quantised, or not known.
    """
    tensors: dict[str, Tensor] = {}
    problems = []
    for outer, name, tensor in named:
        if name not in expected:
            problems.append(f"unexpected {outer} {tuple(tensor.shape)}")
        elif tuple(tensor.shape) != expected[name]:
            problems.append(f"{outer} is {tuple(tensor.shape)}, not {expected[name]}")
        elif name in tensors:
            problems.append(f"{outer} is there twice")
        elif tensor.dtype not in FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            problems.append(f"{outer} is {kind}, not bfloat16, float16, float32 or float64")
        else:
            tensors[name] = tensor
    problems += [f"missing {name} {shape}" for name, shape in expected.items() if name not in tensors]
    if problems:
        more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
        raise ArtifactError(
            f"{folder} does not hold the draft that its {CONFIG} describes: {'; '.join(problems[:6])}{more}"
        )
    return {name: tensors[name] for name in expected}


def fresh_norms(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the norms whose weights are exactly their initial values."""
    floats = {name: part for name, part in tensors.items() if part.is_floating_point() and part.ndim == 1}
    return [name for name, part in floats.items() if bool((part == 1).all())]


def engine_files(
    form: str,
    config: Any,
    tensors: Mapping[str, Tensor],
    *,
    outer: Json,
    inner: Mapping[str, Tensor],
    golden: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    card: str,
) -> dict[str, bytes]:
    """Return the files of a folder, relative path -> content, with the record of all others.

    Args:
        form: the format.
        config: hyperparameters.
        tensors: the module's state, by name.
        outer: `config.json`.
        inner: the tensors, under the format's names.
        golden: recorded inputs and outputs, by name.
        facts: provenance of the training run.
        card: the README.md.
    """
    fresh = fresh_norms(tensors)
    if fresh and facts.get("step"):
        log.warning(
            "norms=%s are all ones after steps=%s: not trained, or not yet", ",".join(fresh), facts["step"]
        )
    files = {
        CONFIG: as_json(outer),
        MODEL: save(dict(inner), metadata={"format": "pt"}),
        GOLDEN: save({key: part.contiguous() for key, part in golden.items()}),
    }
    record = {
        "format": form,
        "method": vars(config),
        "config": outer,
        "fresh": fresh,
        "steps": facts.get("step"),
        "files": checksums(files),
    }
    return {**files, RECORD: as_json(record), "README.md": card.encode()}


def target_names(info: TargetInfo) -> tuple[TargetInfo, TargetInfo]:
    """Return the target as `config.json` names it, a folder by its whole path, and as the card does."""
    at_hand = Path(info.name)
    if not at_hand.is_dir():
        return info, info
    return replace(info, name=str(at_hand.absolute())), replace(info, name=at_hand.name)


def longest_document(facts: Mapping[str, Any]) -> int | None:
    """Return the tokens of the longest training document, from the provenance; None if unknown."""
    stages = (facts.get("data") or {}).get("stages") or []
    return max((int(stage["doc_tokens"]) for stage in stages if "doc_tokens" in stage), default=None)


def layer_keys(config: Any, info: TargetInfo, *, positions: int) -> Json:
    """Return transformers' keys that describe a draft's layers; sizes of 0 are the target's."""
    return {
        "hidden_size": info.hidden_size,
        "intermediate_size": config.intermediate_size or info.intermediate_size,
        "num_attention_heads": config.n_heads or info.n_heads,
        "num_key_value_heads": config.n_kv_heads or info.n_kv_heads,
        "head_dim": config.head_dim or info.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps or info.rms_norm_eps,
        "vocab_size": info.vocab_size,
        "max_position_embeddings": positions,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "eos_token_id": list(info.eos_ids) if len(info.eos_ids) != 1 else info.eos_ids[0],
        **written_rope(config.rope or draft_rope(info.rope)),
    }


def serving_card(
    form: str, name: str, info: TargetInfo, *, title: str, library: str, window: str, drafted: int, more: str
) -> str:
    """Return the README, with a command for each engine that reads the format.

    Args:
        form: the format.
        name: the folder's name.
        info: the target; its name must be a Hub id or a plain name, not a path.
        title: the kind of draft, with its article; in lower case and without hyphens it is vLLM's method.
        library: the engine, for the Hub.
        window: a sentence on windows, or nothing.
        drafted: length of the drafted chain.
        more: commands besides vLLM's; in place of nothing, what reads a speculators folder.
    """
    tag, target = title.split()[1].lower().replace("-", ""), info.name or "TARGET"
    return CARD.format(
        tag=tag,
        title=title,
        library=library,
        name=name,
        target=target,
        shape=f"{info.n_layers} layers, hidden {info.hidden_size}, vocabulary {info.vocab_size}",
        form=form,
        window=window,
        speculative=json.dumps({"method": tag, "model": name, "num_speculative_tokens": drafted}),
        more=more or SPECULATORS_MORE,
    )

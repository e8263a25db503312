"""Names of tensors and files in the two formats that engines load.

Shapes: E hidden dim, K tokens of the draft's vocabulary, V of the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longtrain.errors import ArtifactError, first_line
from longtrain.files import need_regular, read_json
from longtrain.methods.eagle3.config import FORMATS
from longtrain.pickled import read_pickled_tensors

SPECULATORS, FLAT = NAMES = FORMATS
CONFIG, MODEL, INDEX, PICKLED = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
)
PREFIX = {SPECULATORS: "layers.0.", FLAT: "midlayer."}
"""The prefix of the layer's tensors."""
LAYER = ("input_layernorm", "hidden_norm", "self_attn", "post_attention_layernorm", "mlp")
"""Modules of the draft whose tensors have the layer's prefix in a folder."""
IDS = "draft_ids_K"
EMBEDDINGS = "embed_tokens.weight"
OFFSETS, MASK = "d2t", "t2d"
OLD_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
"""Names of the norms before `fc` that SGLang still reads."""
FLAT_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM",
    "LlamaEagle3ForCausalLM",
)
SPECULATORS_CLASS = "Eagle3DraftModel"


def outside(name: str, form: str) -> str:
    """Return a folder's name for a module's tensor."""
    return PREFIX[form] + name if name.partition(".")[0] in LAYER else name


def inside(name: str) -> str:
    """Return the module's name for a folder's tensor; ModelOpt's flat folders have the prefix `layers.0.`."""
    name = name.removeprefix("model.")
    for old, new in OLD_NORMS.items():
        name = name.replace(old, new)
    for prefix in PREFIX.values():
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def format_of(folder: Path) -> str | None:
    """Return the format of a folder, by its `config.json`; None if it holds no EAGLE-3 draft."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    config = read_config(folder)
    if "speculators_model_type" in config:
        return SPECULATORS if config["speculators_model_type"] == "eagle3" else None
    names = config.get("architectures")
    known = isinstance(names, list) and any(name in FLAT_ARCHITECTURES for name in names)
    return FLAT if known or "draft_vocab_size" in config else None


def read_config(folder: Path) -> dict[str, Any]:
    """Read the folder's `config.json`.

    Raises:
        ArtifactError: it cannot be read, or is not a mapping.
    """
    path = folder / CONFIG
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}; copy or export it again") from None
    if not isinstance(config, dict):
        raise ArtifactError(f"{path} is no mapping of keys; copy or export it again")
    return config


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


def vocabulary(tensors: Mapping[str, Tensor], *, size: int, whole: int, where: Path) -> Tensor:
    """Return the target token of each draft token, [K] int64, from a folder's vocabulary map.

    Args:
        tensors: the folder's tensors, under its own names.
        size: size of the draft's vocabulary, K.
        whole: size of the target's vocabulary, V.
        where: the folder, for messages.

    Raises:
        ArtifactError: the map is missing or invalid.
    """
    offsets_K = tensors.get(OFFSETS)
    if offsets_K is None:
        if size == whole:
            return torch.arange(size)
        raise ArtifactError(
            f"{where} has no {OFFSETS}, and its draft knows {size} of {whole} tokens: engines would draft "
            "the wrong ones; copy or export it again"
        )
    if offsets_K.shape != (size,) or offsets_K.is_floating_point():
        raise ArtifactError(
            f"{where}: {OFFSETS} is {offsets_K.dtype} {tuple(offsets_K.shape)}; allowed: int64 ({size},)"
        )
    ids_K = offsets_K.long() + torch.arange(size)
    ascending = bool((ids_K[1:] > ids_K[:-1]).all())
    if not ascending or int(ids_K[0]) < 0 or int(ids_K[-1]) >= whole:
        raise ArtifactError(
            f"{where}: {OFFSETS} is no map of offsets: it gives tokens {int(ids_K.min())} to "
            f"{int(ids_K.max())}, {'ascending' if ascending else 'not in ascending order'}; allowed: "
            f"different ones from 0 to {whole - 1}, ascending (each entry is the token minus its place)"
        )
    mask_V = tensors.get(MASK)
    if mask_V is not None:
        known_V = torch.zeros(whole, dtype=torch.bool)
        known_V[ids_K] = True
        if mask_V.shape != (whole,) or not torch.equal(mask_V.bool(), known_V):
            raise ArtifactError(f"{where}: {MASK} does not mark the tokens that {OFFSETS} names")
    return ids_K

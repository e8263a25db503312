"""Names of tensors and files in the two formats that engines load.

Shapes: E hidden dim, K tokens of the draft's vocabulary, V of the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from longtrain.errors import ArtifactError
from longtrain.methods.draft_folders import CONFIG, read_config
from longtrain.methods.eagle3.config import FORMATS

SPECULATORS, FLAT = NAMES = FORMATS
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

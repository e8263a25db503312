"""Loads drafts that LongSpec's authors trained, as modules of this package."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from longtrain.errors import ArtifactError
from longtrain.files import need_regular
from longtrain.methods.longspec.config import Config
from longtrain.methods.longspec.modules import LongSpecDraft
from longtrain.pickled import read_pickled_tensors
from longtrain.targets.info import TargetInfo

DEPTHS = 4
"""Number of depths that the authors' training draws shifts for."""
FILES = ("model.safetensors", "pytorch_model.bin")
_DRAFT = re.compile(
    r"(?:.*\.)?((?:self_attn|cross_attn|mlp|input_layernorm|post_self_attention_layernorm"
    r"|post_cross_attention_layernorm)\..+)"
)
_TARGET = re.compile(r"(lm_head|model\.(embed_tokens|layers|norm|rotary_emb))\.")
_UNUSED = re.compile(r"cross_attn\.[kv]_proj\.|.*rotary_emb\.")
"""Tables, and cross-attention projections that are not used: its keys and values are the target's."""


def read_draft(where: str | Path, info: TargetInfo) -> tuple[Config, LongSpecDraft]:
    """Load the authors' weights as a draft for a target; it can be exported like one that was trained here.

    Args:
        where: a file of tensors, or a folder with one of `FILES`; of a pickled file only tensors are read.
        info: the target's shapes.

    Returns:
        The configuration that matches their training, and the module in the weights' dtype.

    Raises:
        ArtifactError: no such file, or its tensors are not those of a draft for this target.

    Source: the authors' code. Their drafts have biases on q, k and v whatever the target has.
    """
    path = Path(where)
    file = next((path / name for name in FILES if (path / name).is_file()), path)
    tensors = _draft_tensors(_load(file), file)
    biased = any(name.endswith("_proj.bias") for name in tensors)
    config = Config(attention_bias=biased, max_depth=DEPTHS, objective="ce")
    dtypes = {tensor.dtype for tensor in tensors.values()} or {torch.float32}
    draft = LongSpecDraft(config, info).to(dtypes.pop())
    try:
        draft.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        said = " ".join(str(error).split())
        raise ArtifactError(f"{file} holds no LongSpec draft for {info.name}: {said}") from None
    return config, draft


def _load(file: Path) -> dict[str, Tensor]:
    """Load the tensors of a file."""
    try:
        if file.suffix == ".safetensors":
            need_regular(file)
            return load_file(file)
        return read_pickled_tensors(file)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ArtifactError(f"{file} cannot be read: {said}; allowed: {', '.join(FILES)}") from None


def _draft_tensors(tensors: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Return the draft's tensors under our names, without prefixes and unused tensors."""
    found = {}
    for name, tensor in tensors.items():
        if _TARGET.match(name):
            continue
        own = _DRAFT.fullmatch(name)
        if own is None:
            raise ArtifactError(f"{file} holds '{name}', which is no tensor of a LongSpec draft")
        if not _UNUSED.match(own[1]):
            found[own[1]] = tensor
    return found

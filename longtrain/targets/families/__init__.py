"""The families of models that can be a target: one entry each, and what is missing for the others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from longtrain.errors import TargetMismatchError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Family:
    """What a family's decoder layers have that differs from Llama's.

    Args:
        norms: names of the RMSNorms before attention and before the MLP; empty: there is none.
        after: names of the RMSNorms of their outputs, before these join the residual stream; None: none.
        neighbours: True if RoPE turns dims 2i and 2i + 1 of a head; False: dims of its first and second half.
        partial: True if `partial_rotary_factor` may leave the last dims of a head as they are.
        swiglu: True if the MLP of every layer is `down_proj(act(gate_proj(x)) * up_proj(x))`.
        norm_offset: number that is added to the stored weights of norms.
        sinks: True if every query head has a score in the softmax's denominator that has no key.
        windows: layers that read the config's `sliding_window`: none, all, or those of its `layer_types`.
        fused: True if `FusedDecoder` serves it.
        suffixes: True if `SuffixRun` serves it: queries, keys and values are linears of their own, queries
            are not scaled by position, and there are no sinks.
    """

    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, str] | None = None
    neighbours: bool = False
    partial: bool = False
    swiglu: bool = True
    norm_offset: int = 0
    sinks: bool = False
    windows: Literal["none", "all", "layer_types"] = "none"
    fused: bool = True
    suffixes: bool = True


_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
FAMILIES = {
    "llama": Family(),
    "qwen2": Family(windows="layer_types"),
    "qwen3": Family(windows="layer_types"),
    "mistral": Family(windows="all"),
    "seed_oss": Family(),
    "qwen3_moe": Family(swiglu=False, windows="all"),
    "mixtral": Family(swiglu=False, windows="all"),
    "glm4_moe": Family(partial=True, swiglu=False),
    "glm4": Family(
        after=("post_self_attn_layernorm", "post_mlp_layernorm"), neighbours=True, partial=True, swiglu=False
    ),
    "apertus": Family(norms=("attention_layernorm", "feedforward_layernorm"), swiglu=False),
    "gpt_oss": Family(swiglu=False, sinks=True, windows="layer_types", suffixes=False),
    "exaone4": Family(norms=("", ""), after=_AFTER, windows="layer_types", fused=False),
    "gemma3_text": Family(
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        after=_AFTER,
        norm_offset=1,
        windows="layer_types",
        fused=False,
    ),
    "ministral": Family(windows="layer_types", fused=False),
    "ministral3": Family(windows="all", fused=False, suffixes=False),
    "olmo3": Family(norms=("", ""), after=_AFTER, windows="layer_types", fused=False),
    "phi3": Family(swiglu=False, windows="all", fused=False, suffixes=False),
    "smollm3": Family(windows="layer_types", fused=False),
}
"""`model_type` -> its family. Attention goes through transformers' attention interface in all of them."""

FUSED = tuple(name for name, one in FAMILIES.items() if one.fused)
_RECURRENT = "and there is no store for recurrent states"
MISSING = {
    r"qwen3_next|qwen3_5|olmo_hybrid|bailing_hybrid": f"has linear attention (gated delta net), {_RECURRENT}",
    r"kimi_linear|mamba|falcon_mamba|falcon_h1|jamba|bamba|zamba|nemotron_h|granitemoehybrid|lfm2|lfm3": (
        f"has Mamba, KDA or convolution layers, {_RECURRENT}"
    ),
    r"gemma4": "has layers that read other layers' keys and values, and heads of two sizes (Gemma 4), and a "
    "cache has its own in every layer, all of one size",
    r"deepseek_v|kimi_k|glm4_moe_lite|glm_moe_dsa|longcat_flash": "has latent attention (MLA), and a cache "
    "stores keys and values",
    r"llama4": "attends within chunks of 8192 tokens in most layers (Llama 4), and a cache shows all tokens",
}
"""Beginning of a `model_type` -> what longtrain would need and has not."""


def family_of(model_type: str) -> Family:
    """Return a family; one that is not known (another tool's target, a shape) is taken for Llama's."""
    return FAMILIES.get(model_type, Family())


def plain_norm(family: Family, name: str, weight: Tensor) -> Tensor:
    """Return a weight as it is, or a norm's as the factor that it stands for."""
    return weight + family.norm_offset if family.norm_offset and name.endswith("norm.weight") else weight


def missing(model_type: str) -> str:
    """Return what is missing for a family that is known and not served; empty for all others."""
    return next((reason for known, reason in MISSING.items() if re.match(known, model_type)), "")


def not_served(where: str, model_type: str, reason: str) -> TargetMismatchError:
    """Build the error for a target that is not served."""
    return TargetMismatchError(f"target {where} ({model_type}) {reason}; supported: {', '.join(FAMILIES)}")


def refuse_missing(where: str, values: Mapping[str, Any]) -> None:
    """Refuse a family by the values of its config.json alone, whether transformers knows it or not.

    Raises:
        TargetMismatchError: the family is known and not served.
    """
    kind = str(values.get("model_type"))
    if reason := missing(kind):
        raise not_served(where, kind, reason)

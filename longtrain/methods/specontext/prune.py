"""Initialises a retrieval head from an EAGLE-3 draft's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from longtrain.errors import ConfigError
from longtrain.log import get_logger
from longtrain.methods.specontext.config import EMBEDDING, SHIFTED, Config

log = get_logger(__name__)

SAME = ("n_heads", "n_kv_heads", "head_dim", "attention_bias", "qk_norm", "rms_norm_eps", "rope")
"""Settings that the head and the draft must share."""
OF_FEATURE = ("layers", "fc_norm", "norm_before_fc")
"""Settings that they must share too if the head has the draft's feature."""
PROJECTIONS = ("q_proj", "k_proj", "q_norm", "k_norm")


def pruned(config: Config, tensors: Mapping[str, Tensor], draft: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of a draft that the head starts with.

    All groups of layers start with the same projections; a head that reads only embeddings with the columns
    for these.

    Args:
        config: the head's configuration.
        tensors: the draft's tensors, by name.
        draft: the draft's configuration.

    Raises:
        ConfigError: the head is configured otherwise than the draft, or the draft reads other embeddings.

    Source: SpeContext §4.3.
    """
    names = (*SAME, *OF_FEATURE) if config.variant == SHIFTED else SAME
    differs = [name for name in names if name != "rope" and getattr(config, name) != draft.get(name)]
    if config.rope is None and draft.get("rope") is not None:
        differs.append("rope")
    if differs:
        words = " ".join(f"method.{name}={draft.get(name)}" for name in differs)
        raise ConfigError(f"a head that begins with an EAGLE-3 draft is built as that is; pass {words}")
    if draft.get("own_embeddings"):
        raise ConfigError(
            "the draft reads embeddings of its own (own_embeddings=true), and a retrieval head reads the "
            "target's: what it begins with would be of another model; give a draft that was trained without"
        )
    found = {}
    hidden = tensors["input_layernorm.weight"].shape[0]
    for name in PROJECTIONS:
        for part in ("weight", "bias"):
            if (tensor := tensors.get(f"self_attn.{name}.{part}")) is None:
                continue
            if config.variant == EMBEDDING and tensor.ndim == 2:
                tensor = tensor[:, :hidden]  # columns of the embedding come first
            copies = 1
            if name == "q_proj" or (name == "k_proj" and not config.share_keys):
                copies = config.sets
            found[f"{name}.{part}"] = tensor.repeat(copies, *[1] * (tensor.ndim - 1)).clone()
    kept = ["input_layernorm."]
    kept += [] if config.variant == EMBEDDING else ["hidden_norm."]
    kept += ["fc.", "fc_norm.", "input_norm."] if config.variant == SHIFTED else []
    found |= {name: tensor for name, tensor in tensors.items() if name.startswith(tuple(kept))}
    whole = sum(
        t.numel() for name, t in tensors.items() if not name.startswith(("embed_tokens", "draft_ids"))
    )
    mine = sum(tensor.numel() for tensor in found.values())
    log.info(
        "retrieval_head variant=%s weights=%d draft_weights=%d share=%.4f",
        config.variant, mine, whole, mine / whole,
    )  # fmt: skip
    return found

"""Storage forms of features: bf16 or int8 with a scale per token; distributions as their top k.

The first dim of every tensor is the token, so the features of a packed sequence are those of its documents,
concatenated.

Shapes: T tokens, G KV heads, D head dim, E hidden dim, K most probable tokens, N bytes of a token id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from longtrain.features.settings import FormName
from longtrain.losses import TopTokens

Stored = dict[str, Tensor]
"""Tensors of one document or packed sequence as they are on disk, by name; the first dim of each is T."""

SCALE = ".scale"


@dataclass(frozen=True)
class Form:
    """The outputs that are stored, and their number of bits.

    Args:
        form: bf16 or int8.
        top_k: number of most probable tokens of the target's distribution that are stored in place of the LM
            head's input; 0: the input is stored.
    """

    form: FormName = "bf16"
    top_k: int = 0

    def __str__(self) -> str:
        return f"features.form={self.form} features.top_k={self.top_k}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self)

    def stored(self, features: Features) -> Stored:
        """Encode features for the disk, on the device they are on."""
        found: Stored = {}
        for name, tensor in features.tensors().items():
            if self.form == "bf16":
                found[name] = tensor.to(torch.bfloat16)
            else:
                found[name], found[name + SCALE] = in_8_bits(tensor)
        if features.top is not None:
            found["top.ids"] = _id_bytes(features.top.ids_TK, features.vocab_size)
            found["top.logp"] = features.top.logp_TK.to(torch.float16)
        return found

    def features(self, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Features:
        """Decode stored features to `dtype`; the opposite of `stored`, up to rounding."""
        plain = {
            name: tensor.to(dtype)
            if self.form == "bf16"
            else from_8_bits(tensor, stored[name + SCALE], dtype)
            for name, tensor in stored.items()
            if not name.endswith(SCALE) and not name.startswith("top.")
        }
        found = Features.of(plain)
        if "top.ids" in stored:
            found.top = TopTokens(_ids(stored["top.ids"]), stored["top.logp"].float())
        return found


@dataclass
class Features:
    """Outputs of a target's forward; the first dim of every tensor is the token.

    Args:
        hidden: layer -> its output [T, E]; -1 is the LM head's input.
        kv: layer -> (k_TGD, v_TGD); K is *before* RoPE (and after k_norm).
        top: the next token's distribution as its most probable tokens.
        vocab_size: size of the vocabulary that the ids in `top` belong to.
    """

    hidden: dict[int, Tensor] = field(default_factory=dict)
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    top: TopTokens | None = None
    vocab_size: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, except the distribution."""
        found = {f"hidden.{layer}": state_TE for layer, state_TE in self.hidden.items()}
        for layer, (k_TGD, v_TGD) in self.kv.items():
            found |= {f"k.{layer}": k_TGD, f"v.{layer}": v_TGD}
        return found

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Features:
        """Build features from tensors by name; the opposite of `tensors`."""
        made = cls()
        for name, tensor in tensors.items():
            kind, _, layer = name.partition(".")
            if kind == "hidden":
                made.hidden[int(layer)] = tensor
            elif kind == "k":
                made.kv[int(layer)] = tensor, tensors[f"v.{layer}"]
        return made


def in_8_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to integers from -127 to 127 with one scale over the last dim.

    Args:
        x: [T, ..., D].

    Returns:
        int8 like `x`, and scales [T, ...] in bf16; a scale is rounded up, so that no value is clipped.
    """
    step = x.float().abs().amax(-1) * ((1 + 2**-7) / 127)
    scale = step.clamp_min(torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
    codes = (x.float() / scale.float()[..., None]).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scale


def from_8_bits(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise the result of `in_8_bits`."""
    return (codes.float() * scale.float()[..., None]).to(dtype)


def _id_bytes(ids_TK: Tensor, vocab_size: int) -> Tensor:
    """Encode token ids as little-endian bytes [T, K, N], as few as the vocabulary needs."""
    n = max(1, (max(vocab_size, 2) - 1).bit_length() + 7 >> 3)
    shifts = torch.arange(0, 8 * n, 8, device=ids_TK.device)
    return (ids_TK[..., None] >> shifts).to(torch.uint8)


def _ids(bytes_TKN: Tensor) -> Tensor:
    """Decode token ids, int64, from their bytes."""
    shifts = torch.arange(0, 8 * bytes_TKN.shape[-1], 8, device=bytes_TKN.device)
    return (bytes_TKN.long() << shifts).sum(-1)

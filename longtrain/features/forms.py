"""How features are stored: bf16 or 8 bits with a scale a token, and the target's law as its likeliest tokens.

Every tensor begins with the tokens, so that a row's features are those of its documents one after another.
Shapes: T tokens, G KV heads, D head dim, E hidden dim, K likeliest tokens, N bytes of a token id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from longtrain.features.settings import FormName
from longtrain.losses import TopLaw

Stored = dict[str, Tensor]
"""Tensors of one document or row as they lie on disk, by name; the first dim of each is T."""

SCALE = ".scale"


@dataclass(frozen=True)
class Form:
    """What is kept, and in how many bits.

    Args:
        form: bf16 or int8.
        top_k: tokens kept of the target's law in the place of the LM head's input; 0: the input is kept.
    """

    form: FormName = "bf16"
    top_k: int = 0

    def __str__(self) -> str:
        return f"features.form={self.form} features.top_k={self.top_k}"

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)

    def stored(self, features: Features) -> Stored:
        """The features as they lie on disk, on the device they are on."""
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
        """What `stored` was made from, as far as the form keeps it, in `dtype`."""
        plain = {
            name: tensor.to(dtype)
            if self.form == "bf16"
            else from_8_bits(tensor, stored[name + SCALE], dtype)
            for name, tensor in stored.items()
            if not name.endswith(SCALE) and not name.startswith("top.")
        }
        found = Features.of(plain)
        if "top.ids" in stored:
            found.top = TopLaw(_ids(stored["top.ids"]), stored["top.logp"].float())
        return found


@dataclass
class Features:
    """What a target's forward over tokens gave: tensors with the tokens first.

    Args:
        hidden: layer -> its output [T, E]; -1 is the LM head's input.
        kv: layer -> (k_TGD, v_TGD); K is *before* RoPE (and after k_norm).
        top: the law of the next token as its likeliest tokens.
        vocab_size: entries of the vocabulary that `top` counts.
    """

    hidden: dict[int, Tensor] = field(default_factory=dict)
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    top: TopLaw | None = None
    vocab_size: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """All tensors but the law's, by name."""
        found = {f"hidden.{layer}": state_TE for layer, state_TE in self.hidden.items()}
        for layer, (k_TGD, v_TGD) in self.kv.items():
            found |= {f"k.{layer}": k_TGD, f"v.{layer}": v_TGD}
        return found

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Features:
        """The opposite of `tensors`."""
        made = cls()
        for name, tensor in tensors.items():
            kind, _, layer = name.partition(".")
            if kind == "hidden":
                made.hidden[int(layer)] = tensor
            elif kind == "k":
                made.kv[int(layer)] = tensor, tensors[f"v.{layer}"]
        return made


def in_8_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127 and what one of them stands for, over the last dim.

    Args:
        x: [T, ..., D].

    Returns:
        int8 like `x`, and scales [T, ...] in bf16; a scale is rounded up, so that no value is cut off.
    """
    step = x.float().abs().amax(-1) * ((1 + 2**-7) / 127)
    scale = step.clamp_min(torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
    codes = (x.float() / scale.float()[..., None]).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scale


def from_8_bits(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What `in_8_bits` was given, rounded."""
    return (codes.float() * scale.float()[..., None]).to(dtype)


def _id_bytes(ids_TK: Tensor, vocab_size: int) -> Tensor:
    """Token ids as their lowest bytes [T, K, N], as few as the vocabulary needs."""
    n = max(1, (max(vocab_size, 2) - 1).bit_length() + 7 >> 3)
    shifts = torch.arange(0, 8 * n, 8, device=ids_TK.device)
    return (ids_TK[..., None] >> shifts).to(torch.uint8)


def _ids(bytes_TKN: Tensor) -> Tensor:
    """Token ids int64 from their bytes."""
    shifts = torch.arange(0, 8 * bytes_TKN.shape[-1], 8, device=bytes_TKN.device)
    return (bytes_TKN.long() << shifts).sum(-1)

"""Linear layers with 4-bit weights, for steps of few rows whose time is the reading of weights.

Formula: y = x Wᵀ + b with w = zero + scale * (code - 8), a code in 0..15, a bf16 scale and zero for each
group of a row.
Triton on a GPU of compute capability 8.0 or more for up to `MAX_ROWS` rows in bf16 or fp16, which multiplies
in bf16 (interpreted under TRITON_INTERPRET=1 on any device, in fp32); elsewhere the weights are written out
first.
Shapes: N rows, F output features, K input features, E = F / 8 rounded up, J groups of a row, X = bytes of a
group, two codes each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, silu

from longtrain.errors import ConfigError, refusal
from longtrain.kernels.devices import interpreted, kernels_serve

GROUPS = (128, 64, 32)
"""Group sizes; rows come in eights."""
MAX_ROWS = 64
"""Most rows that go through the Triton kernel, sixteen at a time."""
_ROWS, _AT_ONCE = 8, 16
_PLACES = (0, 2, 1, 3)
"""Which code of four lies in each of four bytes: so that two masks give all four in order."""


def group_of(features: int, most: int) -> int:
    """The largest group that divides a row.

    Raises:
        ConfigError: there is none.
    """
    for group in GROUPS:
        if group <= most and features % group == 0:
            return group
    raise refusal(
        ConfigError,
        f"INT4 weights for {features} input features in groups of up to {most}",
        f"a multiple of one of {', '.join(map(str, reversed(GROUPS)))}",
    )


def quantise_weight(weight_FK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes and their scales and zeros, by rounding to the nearest of 16 levels over each group's range.

    Scales and zeros are rounded to bf16 before the codes are computed.

    Args:
        weight_FK: any float dtype; F a multiple of 8, K one of `group`.
        group: input features that share a scale and a zero.

    Returns:
        codes_EJ8X uint8: byte 4a + i of a group has code 4a + p of its first half in bits 0-3 and of its
        second half in bits 4-7, p = 0, 2, 1, 3 for i = 0, 1, 2, 3; and table_EJ82 bf16: scale, and value of
        code 8.
    """
    F, K = weight_FK.shape
    w_EJ8g = weight_FK.float().view(F // _ROWS, _ROWS, K // group, group).transpose(1, 2)
    low, high = w_EJ8g.amin(-1, keepdim=True), w_EJ8g.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-8).bfloat16()
    zero = (low + 8 * scale.float()).bfloat16()
    code = ((w_EJ8g - zero.float()) / scale.float()).round().add(8).clamp(0, 15).to(torch.uint8)
    places = torch.tensor(_PLACES, device=code.device)
    first, second = code.unflatten(-1, (2, -1, 4))[..., places].flatten(-2).unbind(-2)
    return (first | (second << 4)).contiguous(), torch.cat((scale, zero), -1).contiguous()


def written_out(codes_EJ8X: Tensor, table_EJ82: Tensor, dtype: torch.dtype) -> Tensor:
    """weight_FK that codes and table stand for."""
    four = torch.stack((codes_EJ8X & 15, codes_EJ8X >> 4), -2).unflatten(-1, (-1, 4)).unbind(-1)
    code_EJ8g = torch.stack([four[place] for place in _PLACES], -1).flatten(-3)  # no index from the host
    wide = torch.promote_types(dtype, torch.float32)
    scale, zero = table_EJ82.to(wide).split(1, -1)
    weight_EJ8g = ((code_EJ8g.to(wide) - 8) * scale + zero).to(dtype)
    return weight_EJ8g.transpose(1, 2).flatten(2).flatten(0, 1)


class Int4Linear(nn.Module):
    """A linear layer on 4-bit weights; made of an ordinary one, whose weights it does not keep.

    Args:
        source: the layer.
        group: most input features that share a scale and a zero.

    Raises:
        ConfigError: its input features fit no group.
    """

    codes: Tensor
    table: Tensor
    bias: Tensor | None

    def __init__(self, source: nn.Linear, group: int) -> None:
        super().__init__()
        self.features = source.out_features
        weight_FK = pad(source.weight.detach(), (0, 0, 0, -source.out_features % _ROWS))
        codes_EJ8X, table_EJ82 = quantise_weight(weight_FK, group_of(source.in_features, group))
        self.register_buffer("codes", codes_EJ8X)
        self.register_buffer("table", table_EJ82)
        self.register_buffer("bias", None if source.bias is None else source.bias.detach())

    @classmethod
    def joined(cls, parts: Sequence[Int4Linear]) -> Int4Linear:
        """One layer that gives the outputs of several side by side; they keep views of its weights.

        Args:
            parts: layers of one input.

        Raises:
            ConfigError: output features that are no multiple of 8, or only some layers with a bias.
        """
        if any(part.features % _ROWS for part in parts):
            counts = [part.features for part in parts]
            raise refusal(
                ConfigError, f"INT4 layers of {counts} output features cannot be joined", "multiples of 8"
            )
        biases = [part.bias for part in parts if part.bias is not None]
        if biases and len(biases) < len(parts):
            raise refusal(
                ConfigError,
                f"INT4 layers of which {len(biases)} of {len(parts)} have a bias cannot be joined",
                "all of them or none; run without fused layers (target.fused=false)",
            )
        whole = cls.__new__(cls)
        nn.Module.__init__(whole)
        whole.features = sum(part.features for part in parts)
        whole.register_buffer("codes", torch.cat([part.codes for part in parts]))
        whole.register_buffer("table", torch.cat([part.table for part in parts]))
        whole.register_buffer("bias", torch.cat(biases) if biases else None)
        first = 0
        for part in parts:
            last = first + part.features // _ROWS
            part.codes, part.table = whole.codes[first:last], whole.table[first:last]
            first = last
        return whole

    def part(self) -> None:
        """Have weights of its own again, after `joined`."""
        self.codes, self.table = self.codes.clone(), self.table.clone()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[..., F] in x's dtype, of x [..., K], plus a residual [..., F]."""
        add = residual if self.bias is None else self.bias if residual is None else self.bias + residual
        out = self._small(x, add, gated=False)
        if out is not None:
            return out
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out = linear(x, written_out(self.codes, self.table, x.dtype)[: self.features], bias)
        return out if residual is None else out + residual

    def swiglu(self, x: Tensor) -> Tensor:
        """`silu(gate) * up` [..., F / 2] of a layer of gates joined with what they let pass."""
        if self.bias is None and self.features % (2 * _ROWS) == 0:
            out = self._small(x, None, gated=True)
            if out is not None:
                return out
        gate, up = self(x).chunk(2, dim=-1)
        return silu(gate) * up

    def bytes(self) -> int:
        """Bytes of codes and table; the bias is the source's."""
        return self.codes.nbytes + self.table.nbytes

    def _small(self, x: Tensor, add: Tensor | None, *, gated: bool) -> Tensor | None:
        """The Triton kernel's product, None where it does not serve."""
        rows = x.reshape(-1, x.shape[-1])
        portable = interpreted()
        narrow = x.dtype == torch.float32 if portable else x.dtype in (torch.bfloat16, torch.float16)
        if not (0 < len(rows) <= MAX_ROWS and narrow and kernels_serve(rows)):
            return None
        from longtrain.kernels.int4_linear import kernel

        wide = self.features // 2 if gated else self.features
        rows = rows if portable else rows.bfloat16()
        adds = [None] if add is None else add.expand(*x.shape[:-1], wide).reshape(-1, wide).split(_AT_ONCE)
        outs = [
            kernel.small_linear(some, self.codes, self.table, more, features=wide, gated=gated)
            for some, more in zip_longest(rows.split(_AT_ONCE), adds)
        ]
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).to(x.dtype).view(*x.shape[:-1], wide)

"""Linear layers with 4-bit weights, for steps of few rows whose time is the reading of weights.

Formula: y = x Wᵀ + b with w = zero + scale * (code - 8), a code in 0..15, a bf16 scale and zero for each
group of a row. On CUDA the product is torch's own small-matrix operation (bf16); elsewhere the weights are
written out first.
Shapes: N output features, K input features, X = K / 2 bytes of two codes, J groups of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from longtrain.errors import ConfigError

GROUPS = (128, 64, 32)
"""Group sizes that torch's operation knows; its rows come in eights."""
_ROWS = 8


def group_of(features: int, most: int) -> int:
    """The largest group that divides a row.

    Raises:
        ConfigError: there is none.
    """
    for group in GROUPS:
        if group <= most and features % group == 0:
            return group
    raise ConfigError(
        f"INT4 weights for {features} input features in groups of up to {most}; allowed: a multiple of "
        f"one of {', '.join(map(str, reversed(GROUPS)))}"
    )


def quantise_weight(weight_NK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes and their scales and zeros, by rounding to the nearest of 16 levels over each group's range.

    Scales and zeros are rounded to bf16 before the codes are computed.

    Args:
        weight_NK: any float dtype; K a multiple of `group`.
        group: input features that share a scale and a zero.

    Returns:
        codes_NX uint8, an even feature in bits 4-7 and the odd one after it in bits 0-3; and table_JN2 bf16:
        scale, and value of code 8.
    """
    N, K = weight_NK.shape
    w_NJg = weight_NK.float().view(N, K // group, group)
    low, high = w_NJg.amin(-1, keepdim=True), w_NJg.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-8).bfloat16()
    zero = (low + 8 * scale.float()).bfloat16()
    code = ((w_NJg - zero.float()) / scale.float()).round().add(8).clamp(0, 15)
    code_NK = code.to(torch.uint8).view(N, K)
    table = torch.cat((scale, zero), -1).transpose(0, 1).contiguous()
    return (code_NK[:, ::2] << 4) | code_NK[:, 1::2], table


def written_out(codes_NX: Tensor, table_JN2: Tensor, dtype: torch.dtype) -> Tensor:
    """weight_NK that codes and table stand for."""
    code = torch.stack((codes_NX >> 4, codes_NX & 15), -1).flatten(1)
    J, N, _ = table_JN2.shape
    wide = torch.promote_types(dtype, torch.float32)
    scale, zero = table_JN2.to(wide).unbind(-1)
    weight = (code.to(wide) - 8).view(N, J, -1) * scale.T[..., None] + zero.T[..., None]
    return weight.view(N, -1).to(dtype)


class Int4Linear(nn.Module):
    """A linear layer on 4-bit weights; made of an ordinary one, whose weights it does not keep.

    Args:
        source: the layer.
        group: most input features that share a scale and a zero.

    Raises:
        ConfigError: its input features fit no group.
    """

    codes: Tensor
    table_JN2: Tensor
    bias: Tensor | None

    def __init__(self, source: nn.Linear, group: int) -> None:
        super().__init__()
        self.features = source.out_features
        self.group = group_of(source.in_features, group)
        weight_NK = pad(source.weight.detach(), (0, 0, 0, -source.out_features % _ROWS))
        codes_NX, table_JN2 = quantise_weight(weight_NK, self.group)
        if codes_NX.is_cuda:
            tiles = self.group // 16
            codes_NX = torch.ops.aten._convert_weight_to_int4pack(codes_NX, tiles)
        self.register_buffer("codes", codes_NX)
        self.register_buffer("table_JN2", table_JN2)
        self.register_buffer("bias", None if source.bias is None else source.bias.detach())

    @classmethod
    def joined(cls, parts: Sequence[Int4Linear]) -> Int4Linear:
        """One layer that gives the outputs of several side by side; they keep views of its weights.

        Args:
            parts: of one input.

        Raises:
            ConfigError: output features that are no multiple of 8.
        """
        if any(part.features % _ROWS for part in parts):
            counts = [part.features for part in parts]
            raise ConfigError(
                f"INT4 layers of {counts} output features cannot be joined; allowed: multiples of 8"
            )
        whole = cls.__new__(cls)
        nn.Module.__init__(whole)
        whole.features, whole.group = sum(part.features for part in parts), parts[0].group
        biases = [part.bias for part in parts if part.bias is not None]
        whole.register_buffer("codes", torch.cat([part.codes for part in parts]))
        whole.register_buffer("table_JN2", torch.cat([part.table_JN2 for part in parts], 1))
        whole.register_buffer("bias", torch.cat(biases) if biases else None)
        row = tile = 0
        for part in parts:
            rows, tiles = part.features, len(part.codes)
            part.codes = whole.codes[tile : tile + tiles]
            part.table_JN2 = whole.table_JN2[:, row : row + rows]
            row, tile = row + rows, tile + tiles
        return whole

    def part(self) -> None:
        """Have weights of its own again, after `joined`."""
        self.codes, self.table_JN2 = self.codes.clone(), self.table_JN2.contiguous().clone()

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] in x's dtype, of x [..., K]."""
        if not self.codes.is_cuda:
            weight_NK = written_out(self.codes, self.table_JN2, x.dtype)[: self.features]
            return linear(x, weight_NK, self.bias)
        rows = x.reshape(-1, x.shape[-1]).bfloat16()
        out = torch.ops.aten._weight_int4pack_mm(rows, self.codes, self.group, self.table_JN2.contiguous())
        out = out[:, : self.features].to(x.dtype).view(*x.shape[:-1], self.features)
        return out if self.bias is None else out + self.bias

    def bytes(self) -> int:
        """Bytes of codes and table; the bias is the source's."""
        return self.codes.nbytes + self.table_JN2.nbytes

"""Linear layers with 4-bit weights, for steps of few tokens, whose time is that of reading the weights.

Formula: y = x Wᵀ + b with w = zero + scale * (code - 8), a code in 0..15, a bf16 scale and zero for each
group of input features of an output feature. Triton on a GPU of compute capability 8.0 or more for up to
`MAX_ROWS` tokens in bf16 or fp16, which multiplies in bf16; elsewhere the weights are dequantised first.

Codes are stored in the register layout of the tensor cores' product. A weight vector (of one output feature)
is divided into units of 128 inputs, and the same units of eight output features are contiguous. Word m (of
four) of the thread with lane 4 g + t has the codes of output feature g and inputs 32 m + 8 t .. + 7: code 2 i
(i = 0 .. 3) begins at bit 4 i, code 2 i + 1 at bit 16 + 4 i. Padding inputs have scale and zero 0.

Shapes: N tokens, F output features, K input features, E groups of eight output features, U units, L = 32
threads, P groups of a unit; E and U are rounded up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, silu

from longtrain.errors import ConfigError, refusal
from longtrain.kernels.devices import compiles_for, given_up, kernels_serve

GROUPS = (128, 64, 32)
"""Supported group sizes; output features are padded to a multiple of 8."""
MAX_ROWS = 64
"""Most tokens for which the Triton kernel is used, `AT_ONCE` at a time."""
AT_ONCE = 16
"""Most tokens of one launch; every launch reads all weights."""
_LINES, _UNIT = 8, 128
_QUANTISED = 8192
"""Output features that are quantised at a time: in fp32 they take several times the memory of the layer."""


def int4_runs_on(device: torch.device) -> bool:
    """True if the Triton kernel runs on the device and was not disabled (`kernels.machine_text`)."""
    return compiles_for(device) and not given_up("int4_kernel")


def group_of(features: int, most: int) -> int:
    """The largest group size that divides the number of input features.

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
    """Quantise weights to 4-bit codes, with a scale and a zero for each group of input features.

    Codes round to the nearest of 16 levels over a group's range. Scales and zeros are rounded to bf16 before
    the codes are computed.

    Args:
        weight_FK: any float dtype; F a multiple of 8, K one of `group`.
        group: input features that share a scale and a zero: one of `GROUPS`.

    Returns:
        codes_EUL4 int32, in the layout described in this module's docstring, and table_EU8P2 bf16: scale, and
        value of code 8.
    """
    F, K = weight_FK.shape
    w_FJg = weight_FK.float().view(F, K // group, group)
    low, high = w_FJg.amin(-1, keepdim=True), w_FJg.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-8).bfloat16()
    zero = (low + 8 * scale.float()).bfloat16()
    code = ((w_FJg - zero.float()) / scale.float()).round().add(8).clamp(0, 15).to(torch.uint8)
    code_EU8mtib = (
        pad(code.flatten(1), (0, -K % _UNIT)).view(F // _LINES, _LINES, -1, 4, 4, 4, 2).transpose(1, 2)
    )
    words = torch.zeros(code_EU8mtib.shape[:-2], dtype=torch.int32, device=code.device)
    for place in range(8):
        i, second = place % 4, place // 4
        words |= code_EU8mtib[..., i, second].int() << (4 * i + 16 * second)
    table_F = pad(torch.cat((scale, zero), -1).flatten(1), (0, 2 * (-K % _UNIT // group)))
    table_EU8P2 = table_F.view(F // _LINES, _LINES, -1, _UNIT // group, 2).transpose(1, 2).contiguous()
    return words.transpose(-1, -2).flatten(2, 3).contiguous(), table_EU8P2


def written_out(codes_EUL4: Tensor, table_EU8P2: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise codes to weight_FK; K is a multiple of 128, with zeros at the end."""
    words_EU8mt = codes_EUL4.unflatten(2, (_LINES, 4)).transpose(-1, -2)
    places = [4 * (n // 2) + 16 * (n % 2) for n in range(8)]
    code = torch.stack([(words_EU8mt >> place & 15).to(torch.uint8) for place in places], -1)
    wide = torch.promote_types(dtype, torch.float32)
    scale, zero = table_EU8P2.to(wide).split(1, -1)
    code_EU8Pg = code.flatten(3).unflatten(3, (table_EU8P2.shape[3], -1)).to(wide)
    weight_EU8 = ((code_EU8Pg - 8) * scale + zero).to(dtype).flatten(3)
    return weight_EU8.transpose(1, 2).flatten(2).flatten(0, 1)


class Int4Linear(nn.Module):
    """A linear layer with 4-bit weights, made from an ordinary layer, whose weights are not retained.

    Args:
        source: the layer.
        group: most input features that share a scale and a zero.

    Raises:
        ConfigError: no group size divides its input features.
    """

    codes: Tensor
    table: Tensor
    bias: Tensor | None

    def __init__(self, source: nn.Linear, group: int) -> None:
        super().__init__()
        self.features, self.inputs = source.out_features, source.in_features
        group = group_of(self.inputs, group)
        some = [
            quantise_weight(pad(weight_FK, (0, 0, 0, -len(weight_FK) % _LINES)), group)
            for weight_FK in source.weight.detach().split(_QUANTISED)
        ]
        self.register_buffer("codes", torch.cat([codes_EUL4 for codes_EUL4, _ in some]))
        self.register_buffer("table", torch.cat([table_EU8P2 for _, table_EU8P2 in some]))
        self.register_buffer("bias", None if source.bias is None else source.bias.detach())

    @classmethod
    def joined(cls, parts: Sequence[Int4Linear]) -> Int4Linear:
        """Concatenate layers along their outputs; the parts become views of the new layer's weights.

        Args:
            parts: layers with the same input.

        Raises:
            ConfigError: output features that are no multiple of 8, or only some layers with a bias.
        """
        if any(part.features % _LINES for part in parts):
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
        whole.features, whole.inputs = sum(part.features for part in parts), parts[0].inputs
        whole.register_buffer("codes", torch.cat([part.codes for part in parts]))
        whole.register_buffer("table", torch.cat([part.table for part in parts]))
        whole.register_buffer("bias", torch.cat(biases) if biases else None)
        first = 0
        for part in parts:
            last = first + part.features // _LINES
            part.codes, part.table = whole.codes[first:last], whole.table[first:last]
            first = last
        return whole

    def part(self) -> None:
        """Copy the weights of a part of `joined`, so that it no longer shares memory."""
        self.codes, self.table = self.codes.clone(), self.table.clone()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Output [..., F] in x's dtype for x [..., K], plus a residual [..., F]."""
        add = residual if self.bias is None else self.bias if residual is None else self.bias + residual
        out = self._small(x, add, gated=False)
        if out is not None:
            return out
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out = linear(x, self.written_out(x.dtype), bias)
        return out if residual is None else out + residual

    def swiglu(self, x: Tensor) -> Tensor:
        """`silu(gate) * up`, [..., F / 2], of a layer that joins gate and up projections."""
        if self.bias is None and self.features % (2 * _LINES) == 0:
            out = self._small(x, None, gated=True)
            if out is not None:
                return out
        gate, up = self(x).chunk(2, dim=-1)
        return silu(gate) * up

    def written_out(self, dtype: torch.dtype) -> Tensor:
        """The dequantised weights, weight_FK."""
        return written_out(self.codes, self.table, dtype)[: self.features, : self.inputs]

    def bytes(self) -> int:
        """Bytes of codes and table, without the bias, which is the source's."""
        return self.codes.nbytes + self.table.nbytes

    def _small(self, x: Tensor, add: Tensor | None, *, gated: bool) -> Tensor | None:
        """The product by the Triton kernel, or None if it does not support the call."""
        rows = x.reshape(-1, x.shape[-1])
        narrow = x.dtype in (torch.bfloat16, torch.float16)
        if not (0 < len(rows) <= MAX_ROWS and narrow and kernels_serve(rows) and int4_runs_on(x.device)):
            return None
        from longtrain.kernels.int4_linear import kernel

        wide = self.features // 2 if gated else self.features
        adds = [None] if add is None else add.expand(*x.shape[:-1], wide).reshape(-1, wide).split(AT_ONCE)
        outs = [
            kernel.small_linear(some, self.codes, self.table, more, features=wide, gated=gated)
            for some, more in zip_longest(rows.bfloat16().split(AT_ONCE), adds)
        ]
        found = [out for out in outs if out is not None]
        if len(found) < len(outs):
            return None
        return (found[0] if len(found) == 1 else torch.cat(found)).to(x.dtype).view(*x.shape[:-1], wide)

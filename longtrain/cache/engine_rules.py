"""How vLLM rounds keys and values, written plainly: the rules beside which our quantised cache is measured.

Each rule takes rows of a head as they are and gives what attention reads of them later; nothing is packed.
All of them treat a token's row of a head by itself, so that a row is rounded for good when it is written.

Shapes: `...` tokens and heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import erf, exp, pi, sqrt

import torch
from torch import Tensor

from longtrain.errors import ConfigError, refusal

_LEAST_SCALE = 1e-6
"""vLLM's smallest scale of the per-token-head rules."""
_LEAST_STEP = 1e-8
"""vLLM's smallest step of TurboQuant's values, and what it adds to a key's length."""
_SEED = 0x9E3779B9
"""Seed of the random signs, as in vLLM; any others serve as well."""


@dataclass(frozen=True)
class EngineRule:
    """How a key and a value of one token and head are stored.

    Args:
        keys: rows [..., D] in fp32 or wider -> what is read of them.
        values: the same for values.
        key_bits: bits of a number of a key.
        value_bits: bits of a number of a value.
        key_extra: bytes beside a key's numbers: its scale, length or offset.
        value_extra: bytes beside a value's.
    """

    keys: Callable[[Tensor], Tensor]
    values: Callable[[Tensor], Tensor]
    key_bits: int
    value_bits: int
    key_extra: int
    value_extra: int

    def bytes_per_number(self, head_dim: int) -> float:
        """Bytes of a cached number, scales and offsets included, on average over keys and values."""
        bits = self.key_bits + self.value_bits
        return (head_dim * bits / 8 + self.key_extra + self.value_extra) / (2 * head_dim)


def int8_per_token_head(x: Tensor) -> Tensor:
    """One fp32 scale a row, the largest size over 127.

    Note: vLLM's kernel leaves rounding to a cast, which some versions cut off; this rounds to the nearest.
    """
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=_LEAST_SCALE)
    return torch.round(x / scale).clamp(-128, 127) * scale


def int4_per_token_head(x: Tensor) -> Tensor:
    """16 levels between a rotated row's smallest and largest number, and a whole zero point among them.

    The rotation is a Hadamard matrix after random signs; what is read is turned back. The zero point lies in
    the last four bits of the row's fp32 scale.
    """
    turned = _hadamard(x * _signs(x))
    low, high = turned.amin(-1, keepdim=True), turned.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=_LEAST_SCALE)
    zero = _half_away(-low / scale).clamp(0, 15)
    code = _half_away(turned / scale + zero).clamp(0, 15)
    stored = (scale.float().view(torch.int32) & -16).view(torch.float32).to(x.dtype)
    return _hadamard((code - zero) * stored) * _signs(x)


def turbo_keys(x: Tensor, *, bits: int) -> Tensor:
    """A row's length in fp16, and for each number of its rotated direction the nearest of `2 ** bits` levels.

    Levels are those that err least for a normal law of variance 1 / D; what is read is scaled to length 1
    before it is turned back ("norm correction").
    """
    length = x.norm(dim=-1, keepdim=True)
    turned = _hadamard(x / (length + _LEAST_STEP))
    levels = torch.tensor(normal_levels(bits), dtype=x.dtype, device=x.device) * x.shape[-1] ** -0.5
    read = levels[torch.bucketize(turned, (levels[1:] + levels[:-1]) / 2, right=True)]
    return _hadamard(read / read.norm(dim=-1, keepdim=True)) * length.half().to(x.dtype)


def turbo_values(x: Tensor, *, bits: int) -> Tensor:
    """`2 ** bits` levels between a row's smallest and largest number; step and smallest lie in fp16."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=_LEAST_STEP)
    code = torch.floor((x - low) / step + 0.5).clamp(0, 2**bits - 1)
    return code * step.half().to(x.dtype) + low.half().to(x.dtype)


def fp8(x: Tensor) -> Tensor:
    """Each number as an fp8 number (e4m3), without a scale."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


@lru_cache(maxsize=4)
def normal_levels(bits: int) -> tuple[float, ...]:
    """Levels that err least for a standard normal law (Lloyd-Max): each the mean of what it stands for."""
    count = 2**bits
    levels = [7.0 * (i + 0.5) / count - 3.5 for i in range(count)]
    for _ in range(2000):
        edges = [-20.0, *((a + b) / 2 for a, b in pairwise(levels)), 20.0]
        means = [_mean_between(a, b) for a, b in pairwise(edges)]
        if max(abs(a - b) for a, b in zip(levels, means, strict=True)) < 1e-9:
            break
        levels = means
    return tuple(levels)


def _mean_between(low: float, high: float) -> float:
    """The mean of a standard normal law between two bounds."""
    density = [exp(-x * x / 2) / sqrt(2 * pi) for x in (low, high)]
    return (density[0] - density[1]) / ((erf(high / sqrt(2)) - erf(low / sqrt(2))) / 2)


def _half_away(x: Tensor) -> Tensor:
    """To the nearest whole number; halves away from 0."""
    return torch.where(x >= 0, torch.floor(x + 0.5), torch.ceil(x - 0.5))


def _hadamard(x: Tensor) -> Tensor:
    """Rows times the Hadamard matrix of length 1, which is its own inverse.

    Raises:
        ConfigError: the size is no power of two.
    """
    D = x.shape[-1]
    if D & (D - 1):
        raise refusal(ConfigError, f"a rotated cache for heads of size {D}", "a power of two")
    matrix = torch.ones(1, 1, dtype=x.dtype, device=x.device)
    while len(matrix) < D:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return x @ matrix * D**-0.5


def _signs(x: Tensor) -> Tensor:
    """A sign for each of D places, always the same."""
    gen = torch.Generator().manual_seed(_SEED)
    return (2 * torch.bernoulli(torch.full((x.shape[-1],), 0.5), generator=gen) - 1).to(x)


def _turbo(key_bits: int, value_bits: int) -> EngineRule:
    """TurboQuant as vLLM ships it: 8 `key_bits` are fp8 numbers, fewer are levels of a rotated direction."""

    def values(x: Tensor) -> Tensor:
        return turbo_values(x, bits=value_bits)

    if key_bits == 8:
        return EngineRule(fp8, values, 8, value_bits, 0, 4)
    return EngineRule(lambda x: turbo_keys(x, bits=key_bits), values, key_bits, value_bits, 2, 4)


RULES = {
    "int8_per_token_head": EngineRule(int8_per_token_head, int8_per_token_head, 8, 8, 4, 4),
    "int4_per_token_head": EngineRule(int4_per_token_head, int4_per_token_head, 4, 4, 4, 4),
    "turboquant_k8v4": _turbo(8, 4),
    "turboquant_4bit_nc": _turbo(4, 4),
    "turboquant_k3v4_nc": _turbo(3, 4),
    "turboquant_3bit_nc": _turbo(3, 3),
}
"""Values of vLLM's `kv_cache_dtype` -> what they do.

Source: vLLM, `triton_quant_kv/` and `triton_turboquant_store.py`; TurboQuant, arXiv 2504.19874.
Note: vLLM leaves the first and the last two layers of a dense model out of TurboQuant; here all layers are
    rounded. Rows are rotated in their own precision and not in bf16.
"""

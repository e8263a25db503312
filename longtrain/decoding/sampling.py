"""Sampling: logits processors shared by target and draft, and random draws that do not depend on the batch.

Shapes: B batch, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from longtrain.settings import wrong

_MASK64 = (1 << 64) - 1
_UNIT = 1 << 40
"""Weights are multiples of 1/2^40 of the largest: integer sums are exact in any order, so in any batch."""
_BLOCK = 512
"""Tokens of a block in `HashRng.draw`, whose running sums over a whole vocabulary would take the longest."""


@dataclass(frozen=True)
class Sampling:
    """Temperature, top-k and top-p, in this order, for target and draft alike. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise wrong("temperature", self.temperature, "0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise wrong("top_p", self.top_p, "above 0, up to 1")
        if self.top_k < 0:
            raise wrong("top_k", self.top_k, "0 (off) or a count")

    @property
    def greedy(self) -> bool:
        """True if the next token is the argmax."""
        return self.temperature == 0


class Rng(Protocol):
    """Source of all randomness in decoding. Tests replace it to enumerate every outcome."""

    def below(self, prob_B: Tensor, pos_B: Tensor, role: str) -> Tensor:
        """True with probability `prob_B`, clamped to [0, 1]; bool_B. `pos_B`: the token's position."""

    def draw(self, weight_BV: Tensor, pos_B: Tensor, role: str) -> Tensor:
        """An index with probability proportional to `weight_BV` (>= 0, any positive sum); int64_B."""


def probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that a token is drawn from: softmax after temperature, top-k and top-p, in this order.

    Top-k keeps exactly k tokens, and top-p the shortest prefix of the ranked tokens that reaches `top_p`,
    always at least one token; equal logits rank by token id, lowest first.

    Args:
        logits: [..., V], any float dtype.
        sampling: temperature 0 puts all mass on the argmax (the lowest id if several are equal).

    Returns:
        Same shape, each distribution sums to 1; fp32, or fp64 if `logits` are.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    scaled = logits / sampling.temperature
    if not 0 < sampling.top_k < logits.shape[-1] and sampling.top_p == 1:
        return scaled.softmax(-1)
    ranked, token = scaled.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ranked[..., sampling.top_k :] = float("-inf")
    if sampling.top_p < 1:
        count = _counts(ranked.softmax(-1))
        total = count.cumsum(-1)
        before = (total - count).double()
        ranked = ranked.masked_fill(before >= sampling.top_p * total[..., -1:].double(), float("-inf"))
    return torch.empty_like(ranked).scatter_(-1, token, ranked.softmax(-1))


def next_token(logits_BV: Tensor, sampling: Sampling, rng: Rng, pos_B: Tensor) -> Tensor:
    """The next token of each sequence, int64_B, chosen as `verify` would; `pos_B`: its position."""
    if sampling.greedy:
        return logits_BV.argmax(-1)
    return rng.draw(probs(logits_BV, sampling), pos_B, "target")


class HashRng:
    """Counter-based random numbers: a hash of seed, sequence id, absolute position and role.

    So a sequence gets the same tokens in any batch and with any number of accepted tokens per cycle, and a
    run can be repeated on another device.

    Args:
        seed: any integer.
        sequence_ids_B: one id for each sequence, int64, on the device of the logits.

    Source: SplitMix64's finaliser (Steele, Lea and Flood 2014) chained over the four keys.
    """

    def __init__(self, seed: int, sequence_ids_B: Tensor) -> None:
        self.state_B = _mix(sequence_ids_B.to(torch.int64) + _signed(_mix_int(seed)))

    def assign(self, other: HashRng) -> None:
        """Copy the state of `other`, in place."""
        self.state_B.copy_(other.state_B)

    def uniform(self, pos_B: Tensor, role: str) -> Tensor:
        """Uniform random numbers in [0, 1) in steps of 2^-53, fp64_B."""
        bits_B = _mix(_mix(self.state_B + pos_B) ^ _role_key(role))
        return _shift(bits_B, 11).double() * 2.0**-53

    def below(self, prob_B: Tensor, pos_B: Tensor, role: str) -> Tensor:
        """True with probability `prob_B`; probability 1 is always True and 0 never."""
        return self.uniform(pos_B, role) < prob_B.double()

    def draw(self, weight_BV: Tensor, pos_B: Tensor, role: str) -> Tensor:
        """By inverse CDF over exact integer sums: an index of zero weight is never returned.

        Weights below 2^-40 of a sequence's largest count as zero; without any weight the index is V-1.
        The sums are those of blocks first, and then of one block's tokens.
        """
        count_BV = _counts(weight_BV)
        V = count_BV.shape[-1]
        whole = V // _BLOCK
        blocks_BKT = count_BV[:, : whole * _BLOCK].unflatten(-1, (whole, _BLOCK))
        rest_B1 = count_BV[:, whole * _BLOCK :].sum(-1, keepdim=True)
        total_BK = torch.cat((blocks_BKT.sum(-1), rest_B1), -1).cumsum(-1)
        # uniform < 1, so the product stays below the total: one ulp less outweighs rounding by half an ulp.
        point_B1 = (self.uniform(pos_B, role) * total_BK[:, -1].double()).long()[:, None]
        block_B1 = torch.searchsorted(total_BK, point_B1, right=True).clamp_(max=whole)
        point_B1 -= total_BK.gather(-1, (block_B1 - 1).clamp(min=0)) * (block_B1 > 0)
        token_BT = block_B1 * _BLOCK + torch.arange(min(_BLOCK, V), device=pos_B.device)
        inside_BT = count_BV.gather(-1, token_BT.clamp(max=V - 1)).cumsum(-1)
        index_B1 = block_B1 * _BLOCK + torch.searchsorted(inside_BT, point_B1, right=True)
        return index_B1[:, 0].clamp_(max=V - 1)


class MinNewTokens:
    """Excludes the ids that end a sequence from its first tokens.

    Args:
        ids: token ids that end a sequence.
        tokens: number of first tokens that cannot be one of them.
        device: the device of the logits.

    Raises:
        ConfigError: `tokens` is negative.

    Source: transformers, `MinNewTokensLengthLogitsProcessor`.
    """

    def __init__(self, ids: Collection[int], tokens: int, device: torch.device) -> None:
        if tokens < 0:
            raise wrong("min_new_tokens", tokens, "0 or more")
        self.tokens = tokens if ids else 0
        self.ids = torch.tensor(sorted(ids), dtype=torch.int64, device=device)

    def at_first(self, logits_BV: Tensor) -> Tensor:
        """Process the logits of each sequence's first token."""
        return logits_BV.index_fill(-1, self.ids, float("-inf")) if self.tokens else logits_BV

    def in_tree(self, logits_BNV: Tensor, depth_N: Tensor, most: Tensor, left_B: Tensor) -> Tensor:
        """Process the logits of a tree's nodes.

        Args:
            logits_BNV: the target's logits.
            depth_N: depth of each node.
            most: most tokens of a sequence.
            left_B: number of tokens that may follow the root.
        """
        if not self.tokens:
            return logits_BNV
        early_BN = (most - left_B)[:, None] + depth_N < self.tokens
        return torch.where(early_BN[..., None], self.at_first(logits_BNV), logits_BNV)


def _counts(weight: Tensor) -> Tensor:
    """Weights as multiples of 2^-40 of the largest in each distribution, rounded down, int64."""
    top = weight.amax(-1, keepdim=True).double().clamp(min=torch.finfo(torch.float64).tiny)
    return (weight / (top / _UNIT)).long()


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


_GOLDEN, _MUL_A, _MUL_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix(x: Tensor) -> Tensor:
    """One SplitMix64 step on int64 tensors (products wrap)."""
    x = x + _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(_MUL_A)
    x = (x ^ _shift(x, 27)) * _signed(_MUL_B)
    return x ^ _shift(x, 31)


def _mix_int(x: int) -> int:
    """The same step on a Python integer."""
    x = (x + _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * _MUL_A) & _MASK64
    x = ((x ^ (x >> 27)) * _MUL_B) & _MASK64
    return x ^ (x >> 31)


@lru_cache(maxsize=4096)
def _role_key(role: str) -> int:
    """64 bits that name a role, the same in every process."""
    return _signed(int.from_bytes(hashlib.blake2b(role.encode(), digest_size=8).digest(), "little"))

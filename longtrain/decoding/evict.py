"""Building blocks of eviction: the budget, the entries to keep, and the prefilled prompts that a policy sees.

Shapes: L layers, B batch, S prompt tokens, K kept entries, H query heads, G KV heads, D head dim, V
vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from longtrain.cache.evicted import compact
from longtrain.decoding.sampling import HashRng, Sampling, next_token
from longtrain.errors import ConfigError, refusal
from longtrain.targets.attention import AttentionHook
from longtrain.targets.step import OutputRequest, TokenBatch

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.cache.dense import DenseCache
    from longtrain.cache.thinning import ThinningCache
    from longtrain.targets.info import TargetInfo
    from longtrain.targets.model import Target


_TOLERANCE = 1e-6
"""Added to a product before it is rounded down; far above its rounding error."""


@dataclass(frozen=True)
class Budget:
    """KV entries kept for each layer and KV head, on average: a number, or a share of the prompt.

    Args:
        tokens: number of entries; None if `ratio` is given.
        ratio: share of the prompt, above 0 and at most 1; None if `tokens` is given.

    Raises:
        ConfigError: neither or both are given, or a value out of range.
    """

    tokens: int | None = None
    ratio: float | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.ratio is None):
            raise ConfigError(
                f"eviction budget tokens={self.tokens} ratio={self.ratio}; give one, the other is null: "
                "evict.budget_tokens=128 or evict.budget_tokens=null evict.budget_ratio=0.1"
            )
        if self.tokens is not None and self.tokens < 1:
            raise refusal(ConfigError, f"evict.budget_tokens={self.tokens}", "1 or more")
        if self.ratio is not None and not 0 < self.ratio <= 1:
            raise refusal(ConfigError, f"evict.budget_ratio={self.ratio}", "above 0, at most 1")

    def of(self, length: int) -> int:
        """Entries for a prompt of `length` tokens, at least 1; above `length` nothing is evicted.

        A share is rounded down as a decimal fraction: 0.29 of 100 is 29, although the product of the binary
        fractions is slightly below.
        """
        if self.tokens is not None:
            return self.tokens
        return max(1, int(length * (self.ratio or 0) + _TOLERANCE))

    def covers(self, lengths: Sequence[int]) -> bool:
        """True if no prompt of these lengths has more tokens than it may keep."""
        return all(length <= self.of(length) for length in lengths)


@dataclass(frozen=True)
class Keep:
    """KV entries of the prompt that remain, for every layer that sees the whole text, sequence and KV head.

    Args:
        idx_LBGK: positions, int64 on the device, the first `n` of each ascending, then 0.
        n_LBG: their number, int64 *on the host*: a policy whose counts depend on scores reads them back once.
    """

    idx_LBGK: Tensor
    n_LBG: Tensor

    def mask(self, length: int, *, sequence: int = 0) -> Tensor:
        """Mask of the entries that remain, for every layer and KV head: bool [L, G, S], on the host.

        Args:
            length: S, the prompt's tokens.
            sequence: index of the prompt in the batch.
        """
        idx_LGK, n_LG1 = self.idx_LBGK[:, sequence].cpu(), self.n_LBG[:, sequence, :, None]
        stays_LGK = torch.arange(idx_LGK.shape[-1]) < n_LG1
        counts_LGS = torch.zeros(*idx_LGK.shape[:2], length, dtype=torch.int64)
        return counts_LGS.scatter_add_(2, idx_LGK, stays_LGK.long()) > 0


class Evictor(Protocol):
    """Chooses the KV entries that remain, once after prefill: LookaheadKV, SnapKV, KVzip.

    One whose scores know the target's own scale of attention has `any_scale = True`; its hook, if it is for
    layers with a window too, `every_layer = True`.
    """

    @property
    def name(self) -> str:
        """Name in messages and tables."""

    def extra_tokens(self, longest: int) -> int:
        """Cache positions beyond the prompt that `select` needs (for pseudo answers, say)."""

    def hook(self, lengths: Sequence[int]) -> AttentionHook | None:
        """A hook for the prefill's queries, keys and values (right-padded to the longest prompt), or None.

        Called before every prefill; the hook is passed back in `PromptRun.watched`.
        """

    def select(self, run: PromptRun) -> Keep | None:
        """The entries that remain; None if every prompt fits its budget, which leaves the cache unchanged."""


class Budgeted:
    """Base of evictors with a budget that need no cache positions beyond the prompt."""

    budget: Budget

    def with_budget(self, budget: Budget) -> Self:
        """A copy with another budget, which shares all weights."""
        other = copy.copy(self)
        other.budget = budget
        return other

    def extra_tokens(self, longest: int) -> int:
        """No positions (see `Evictor`)."""
        return 0


@runtime_checkable
class GoingOn(Protocol):
    """An evictor that can evict during decoding too."""

    decoding: bool
    """True if this evictor keeps evicting during decoding."""

    def thinning(self, run: PromptRun, keep: Keep, *, nodes: int) -> ThinningCache:
        """The cache for decoding; `nodes`: most tokens of a step."""


def goes_on(evictor: Evictor | None) -> TypeGuard[GoingOn]:
    """True if this evictor keeps evicting during decoding."""
    return isinstance(evictor, GoingOn) and evictor.decoding


@dataclass
class PromptRun:
    """A prefilled batch, as an evictor sees it. The cache has all entries of the prompts, and must only be
    changed by the methods here.

    Args:
        target: the frozen model.
        cache: the prompts' cache, committed.
        lengths: number of tokens of each prompt, on the host.
        tokens_BS: prompts, right-padded.
        n_B: `lengths` on the device.
        root_B: first answer token of each prompt, chosen greedily.
        watched: the hook that `Evictor.hook` returned for this prefill.
        max_new_tokens: most tokens of the answer.
        logits_BV: logits of the first answer token; needed to sample an answer.
        sequence_ids: ids of the sequences in random draws; None: the indices of the prompts.
    """

    target: Target
    cache: DenseCache
    lengths: tuple[int, ...]
    tokens_BS: Tensor
    n_B: Tensor
    root_B: Tensor
    watched: AttentionHook | None = None
    max_new_tokens: int = 0
    logits_BV: Tensor | None = None
    sequence_ids: Sequence[int] | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers whose entries may be evicted: those that see the whole text. Scores are of these (L)."""
        return self.target.info.full_layers

    def follow(self, tokens: Sequence[Sequence[int]], hook: AttentionHook) -> None:
        """Run more tokens after each prompt (teacher-forced, right-padded) without committing them.

        Args:
            tokens: tokens after each prompt; positions continue from the prompt's length.
            hook: hook that gets their queries, keys and values, [B, ., T, D]; its `count`, if it has one, is
                called with the number of real tokens of each prompt (`observe.AllQueries`).

        Raises:
            ConfigError: not one list for each prompt, no tokens at all, or more than the cache has room for.
        """
        counts, T = [len(one) for one in tokens], max(map(len, tokens), default=0)
        if len(counts) != len(self.lengths) or T == 0:
            raise refusal(
                ConfigError,
                f"lists of {counts} tokens to follow {len(self.lengths)} prompts",
                "one list a prompt, one of them not empty",
            )
        ids_BT = torch.tensor([[*one, *[0] * (T - len(one))] for one in tokens])
        pos_BT = self.n_B[:, None] + torch.arange(T, device=self.n_B.device)
        batch = TokenBatch(pos_BT, ids_BT.to(self.n_B.device, non_blocking=True))
        seen = on_layers(hook, self.target.info)
        self.cache.rewind(self.lengths)  # drops nothing: attention over many tokens needs lengths on the host
        self.target.forward(
            batch, self.cache, outputs=OutputRequest("none"), hook=seen
        )  # not committed: the next step overwrites it
        _count(hook, counts)

    def decode(
        self,
        n_tokens: int,
        *,
        keep: Keep | None = None,
        hook: AttentionHook | None = None,
        sampling: Sampling | None = None,
    ) -> list[list[int]]:
        """Decode the first `n_tokens` of each prompt's answer, and rewind the cache.

        Args:
            n_tokens: number of tokens, 1 or more; a sequence that ends earlier gives fewer, its end included.
            keep: decode on a copy of the cache with these entries only (LAQ); None: on the whole cache.
            hook: hook that gets the queries, keys and values of every answer token, one call for each token
                and layer (T = 1); its `count`, if it has one, gets the number of real tokens of each prompt.
            sampling: logits processors; None: greedy.

        Raises:
            ConfigError: the cache has no room for so many tokens (`Evictor.extra_tokens`).
        """
        cache: KVCache = self.cache
        seen = on_layers(hook, self.target.info)
        if keep is not None:
            cache = compact(self.cache, keep, self.lengths, room=n_tokens)
        sampling = sampling or Sampling()
        ids = range(len(self.lengths)) if self.sequence_ids is None else self.sequence_ids
        rng = HashRng(sampling.seed, torch.tensor(list(ids), dtype=torch.int64, device=self.n_B.device))
        first_B = self.root_B
        if not sampling.greedy:
            assert self.logits_BV is not None
            first_B = next_token(self.logits_BV, sampling, rng, self.n_B)
        steps_BT, pos_B = [first_B], self.n_B.clone()
        one_B = torch.ones_like(pos_B)
        texts = _cut(torch.stack(steps_BT, 1), self.target.info.eos_ids)
        while True:
            if hook is None and (len(steps_BT) == n_tokens or all(over for _, over in texts)):
                break
            batch = TokenBatch(pos_B[:, None], steps_BT[-1][:, None])
            step = self.target.forward(batch, cache, outputs=OutputRequest("last"), hook=seen)
            cache.commit(None, one_B)
            if len(steps_BT) == n_tokens or all(over for _, over in texts):
                break
            assert step.logits_BTV is not None
            pos_B = pos_B + 1
            steps_BT.append(next_token(step.logits_BTV[:, -1], sampling, rng, pos_B))
            if len(steps_BT) % _READ == 0 or len(steps_BT) == n_tokens:
                texts = _cut(torch.stack(steps_BT, 1), self.target.info.eos_ids)
        if keep is None:
            self.cache.rewind(self.lengths)
        _count(hook, [len(text) for text, _ in texts])
        return [text for text, _ in texts]


def on_layers(hook: AttentionHook | None, info: TargetInfo) -> AttentionHook | None:
    """Return a hook that passes on what layers without a window show; itself if it is for `every_layer`."""
    if hook is None or not any(info.windows) or getattr(hook, "every_layer", False):
        return hook
    return _OnLayers(hook, info.full_layers)


class _OnLayers:
    """See `on_layers`."""

    def __init__(self, hook: AttentionHook, layers: Sequence[int]) -> None:
        self._hook, self._layers = hook, layers
        self._look = getattr(hook, "see_inputs", None)
        if self._look is None:
            self.see_inputs = None  # type: ignore[assignment, method-assign]

    def __call__(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Pass on one layer's queries, keys and values."""
        if layer in self._layers:
            self._hook(layer, q_BHTD, k_BGTD, v_BGTD)

    def see_inputs(self, layer: int, x_BTE: Tensor) -> None:
        """Pass on the input of one layer's attention."""
        if layer in self._layers and self._look is not None:
            self._look(layer, x_BTE)


_READ = 8
"""Decoding steps between two checks for the end of all sequences (each check reads from the device)."""


def _cut(tokens_BT: Tensor, eos_ids: Sequence[int]) -> list[tuple[list[int], bool]]:
    """Tokens up to the first end-of-sequence id, and True if there is one."""
    found = []
    for tokens in tokens_BT.tolist():
        ends = [at for at, token in enumerate(tokens) if token in eos_ids]
        found.append((tokens[: ends[0] + 1], True) if ends else (tokens, False))
    return found


def _count(hook: AttentionHook | None, counts: list[int]) -> None:
    """Pass the number of real tokens of each prompt to a hook with a `count`."""
    count = getattr(hook, "count", None)
    if count is not None:
        count(counts)

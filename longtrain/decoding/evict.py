"""What eviction is made of: a budget, the rows to keep, and the prompt's run that a policy may look at.

Shapes: L layers, B batch, S prompt tokens, K kept rows, H query heads, G KV heads, D head dim, V vocabulary,
N observing rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from longtrain.cache.evicted import compact
from longtrain.decoding.sampling import HashCoins, Sampling, probs
from longtrain.errors import ConfigError, ConflictError, refusal
from longtrain.targets.attention import Watch
from longtrain.targets.step import Rows, Want

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.cache.dense import DenseCache
    from longtrain.cache.thinning import ThinningCache
    from longtrain.targets.model import Target


_TOLERANCE = 1e-6
"""How far a product may lie below a whole number and count as it; far above its rounding error."""


@dataclass(frozen=True)
class Budget:
    """Rows kept of each layer and KV head, on average: a number of tokens, or a share of the prompt.

    Args:
        tokens: rows; None where `ratio` is given.
        ratio: share of the prompt kept, above 0 and at most 1; None where `tokens` is given.

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
        """Rows for a prompt of `length` tokens; at least 1. Above `length`: nothing is evicted.

        A share is rounded down, decimal fractions as they are written: 0.29 of 100 is 29, although the
        product of the binary fractions lies a little below.
        """
        if self.tokens is not None:
            return self.tokens
        return max(1, int(length * (self.ratio or 0) + _TOLERANCE))


@dataclass(frozen=True)
class Keep:
    """Rows of the prompt that stay, for every layer, sequence and KV head.

    Args:
        idx_LBGK: positions, int64 on the device, ascending over the first `n` of each; what follows is 0.
        n_LBG: how many, int64 *on the host*: a policy whose counts depend on scores pays the one read here.
    """

    idx_LBGK: Tensor
    n_LBG: Tensor

    def mask(self, length: int, *, sequence: int = 0) -> Tensor:
        """Whether each row of a prompt stays, for every layer and KV head: bool [L, G, S], on the host.

        Args:
            length: S, the prompt's tokens.
            sequence: the prompt's number in the batch.
        """
        idx_LGK, n_LG1 = self.idx_LBGK[:, sequence].cpu(), self.n_LBG[:, sequence, :, None]
        stays_LGK = torch.arange(idx_LGK.shape[-1]) < n_LG1
        counts_LGS = torch.zeros(*idx_LGK.shape[:2], length, dtype=torch.int64)
        return counts_LGS.scatter_add_(2, idx_LGK, stays_LGK.long()) > 0


class Evictor(Protocol):
    """Chooses, once after prefill, what of the cache stays: LookaheadKV, SnapKV, KVzip."""

    @property
    def name(self) -> str:
        """For messages and tables."""

    def extra_rows(self, longest: int) -> int:
        """Tail rows that `select` needs in the prompt's cache beyond the prompt (pseudo answers, say)."""

    def watch(self, lengths: Sequence[int]) -> Watch | None:
        """What is to see the prefill's queries, keys and values (right-padded to the longest); None: nothing.

        It is made anew for every prefill and handed back in `PromptRun.watched`.
        """

    def select(self, run: PromptRun) -> Keep | None:
        """Which rows stay; None where every prompt fits its budget, which leaves the cache as it is."""


@runtime_checkable
class GoingOn(Protocol):
    """An evictor that can go on evicting while the text grows."""

    decoding: bool
    """Whether it does."""

    def thinning(self, run: PromptRun, keep: Keep, *, nodes: int) -> ThinningCache:
        """The cache that decoding goes on from; `nodes`: most rows of a step."""


@dataclass
class PromptRun:
    """A prefilled batch, as an evictor sees it. The cache holds every prompt whole and is not to be changed
    but through the methods here.

    Args:
        target: the frozen model.
        cache: the prompts' cache, committed.
        lengths: tokens of each prompt, on the host.
        tokens_BS: prompts, right-padded.
        n_B: `lengths` on the device.
        root_B: the first answer token of each prompt, as the target chooses it greedily.
        watched: what `Evictor.watch` gave for this prefill.
        max_new_tokens: most tokens of the answer that is to come.
        logits_BV: logits of the first answer token; needed where an answer is sampled.
        sequence_ids: what the coins of a sampled answer know each prompt by; None numbers the prompts.
    """

    target: Target
    cache: DenseCache
    lengths: tuple[int, ...]
    tokens_BS: Tensor
    n_B: Tensor
    root_B: Tensor
    watched: Watch | None = None
    max_new_tokens: int = 0
    logits_BV: Tensor | None = None
    sequence_ids: Sequence[int] | None = None

    def follow(self, tokens: Sequence[Sequence[int]], watch: Watch) -> None:
        """Run more rows after each prompt (teacher-forced, right-padded) and forget them again.

        Args:
            tokens: rows of each prompt; their positions go on from the prompt's length.
            watch: sees their queries, keys and values, [B, ., T, D]; told how many rows of each prompt are
                real if it has a `count` (`observe.AllQueries`).

        Raises:
            ConfigError: not one list a prompt, no rows at all, or more than the cache has room for.
        """
        counts, T = [len(rows) for rows in tokens], max(map(len, tokens), default=0)
        if len(counts) != len(self.lengths) or T == 0:
            raise refusal(
                ConfigError,
                f"rows of {counts} tokens to follow {len(self.lengths)} prompts",
                "one list a prompt, one of them not empty",
            )
        ids_BT = torch.tensor([[*rows, *[0] * (T - len(rows))] for rows in tokens])
        pos_BT = self.n_B[:, None] + torch.arange(T, device=self.n_B.device)
        rows = Rows(pos_BT, ids_BT.to(self.n_B.device, non_blocking=True))
        self.target.forward(rows, self.cache, want=Want("none"), watch=watch)  # not committed: forgotten
        _count(watch, counts)

    def decode(
        self,
        n_tokens: int,
        *,
        keep: Keep | None = None,
        watch: Watch | None = None,
        sampling: Sampling | None = None,
    ) -> list[list[int]]:
        """Continue each prompt and forget it again: the first `n_tokens` of the answer.

        Args:
            n_tokens: tokens, 1 or more; of a sequence that ends earlier what there is, its end included.
            keep: decode on a copy with these rows alone (LAQ); None: on the whole cache (oracle).
            watch: sees the queries, keys and values of every token of the answer, a call a token and layer
                (T = 1); told how many tokens of each prompt are real if it has a `count`.
            sampling: how tokens are chosen; None: greedily.

        Raises:
            ConflictError: sampling is asked for and the first token's logits were not kept.
            ConfigError: the cache has no room for so many rows (`Evictor.extra_rows`).
        """
        cache: KVCache = self.cache
        if keep is not None:
            cache = compact(self.cache, keep, self.lengths, room=n_tokens)
        choose = self._chooser(sampling)
        first_B = self.root_B
        if sampling is not None and not sampling.greedy:
            if self.logits_BV is None:
                raise ConflictError("an answer is sampled from logits, and this run has none; pass logits_BV")
            first_B = choose(self.logits_BV, self.n_B)
        steps_BT, pos_B = [first_B], self.n_B.clone()
        one_B = torch.ones_like(pos_B)
        texts = _cut(torch.stack(steps_BT, 1), self.target.info.eos_ids)
        while True:
            if watch is None and (len(steps_BT) == n_tokens or all(over for _, over in texts)):
                break
            rows = Rows(pos_B[:, None], steps_BT[-1][:, None])
            step = self.target.forward(rows, cache, want=Want("last"), watch=watch)
            cache.commit(None, one_B)
            if len(steps_BT) == n_tokens or all(over for _, over in texts):
                break
            assert step.logits_BTV is not None
            pos_B = pos_B + 1
            steps_BT.append(choose(step.logits_BTV[:, -1], pos_B))
            if len(steps_BT) % _READ == 0 or len(steps_BT) == n_tokens:
                texts = _cut(torch.stack(steps_BT, 1), self.target.info.eos_ids)
        if keep is None:
            self.cache.rewind(self.lengths)
        _count(watch, [len(text) for text, _ in texts])
        return [text for text, _ in texts]

    def _chooser(self, sampling: Sampling | None) -> Callable[[Tensor, Tensor], Tensor]:
        """(logits_BV, position_B) -> token_B."""
        if sampling is None or sampling.greedy:
            return lambda logits_BV, pos_B: logits_BV.argmax(-1)
        ids = range(len(self.lengths)) if self.sequence_ids is None else self.sequence_ids
        coins = HashCoins(sampling.seed, torch.tensor(list(ids), dtype=torch.int64, device=self.n_B.device))
        return lambda logits_BV, pos_B: coins.draw(probs(logits_BV, sampling), pos_B, "target")


_READ = 8
"""Decoding steps between two looks at whether every sequence is over."""


def _cut(tokens_BT: Tensor, eos_ids: Sequence[int]) -> list[tuple[list[int], bool]]:
    """Tokens up to the first that ends a text, and whether there is one."""
    found = []
    for tokens in tokens_BT.tolist():
        ends = [at for at, token in enumerate(tokens) if token in eos_ids]
        found.append((tokens[: ends[0] + 1], True) if ends else (tokens, False))
    return found


def _count(watch: Watch | None, rows: list[int]) -> None:
    """Tell a watch that asks how many rows of each prompt are real."""
    count = getattr(watch, "count", None)
    if count is not None:
        count(rows)

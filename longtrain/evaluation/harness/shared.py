"""Shares importance scores between systems that differ only in their budget.

Shapes: L layers, B batch, G KV heads, S prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from longtrain.decoding.evict import Evictor, GoingOn, Keep, PromptRun, goes_on
from longtrain.methods.policies.base import Scorer

if TYPE_CHECKING:
    from longtrain.cache.thinning import ThinningCache
    from longtrain.targets.attention import AttentionHook


class BatchScores:
    """Importance scores of the prompts being decoded, computed by the first evictor that needs them.

    Args:
        reuse: let later evictors use the scores of the first.
    """

    def __init__(self, *, reuse: bool) -> None:
        self.reuse = reuse
        self.wanted = False
        """Whether somebody looks at the scores, so that they are computed where nothing has to be evicted."""
        self.known = False
        self.s_LBGS: Tensor | None = None
        self._prompts: Sequence[Any] = ()

    def expect(self, prompts: Sequence[Any], *, wanted: bool = False) -> None:
        """Announce the next prompts, by their tokens or names; scores of other prompts are dropped."""
        if prompts != self._prompts:
            self._prompts, self.known, self.s_LBGS = prompts, False, None
        self.wanted = wanted

    def put(self, s_LBGS: Tensor | None) -> None:
        """Store the scores of the announced prompts."""
        self.known, self.s_LBGS = True, s_LBGS


class SharingEvictor:
    """Wraps an evictor: uses a batch's scores if they are stored, and stores them otherwise.

    Args:
        evictor: the policy at one budget.
        scores: the batch's scores.
    """

    def __init__(self, evictor: Evictor, scores: BatchScores) -> None:
        self.evictor, self.scores, self.name = evictor, scores, evictor.name
        self.scorer = evictor if isinstance(evictor, Scorer) else None
        own = self.scorer is None or bool(getattr(evictor, "scores_depend_on_budget", False))
        self.reuses = scores.reuse and not own
        self.decoding = goes_on(evictor)
        """Whether it goes on evicting while the answer is decoded (`GoingOn`)."""

    def extra_tokens(self, longest: int) -> int:
        """See `Evictor`."""
        return self.evictor.extra_tokens(longest)

    def hook(self, lengths: Sequence[int]) -> AttentionHook | None:
        """See `Evictor`; no hook is needed if the scores are stored."""
        known = self.reuses and self.scores.known and not self.decoding
        return None if known else self.evictor.hook(lengths)

    def thinning(self, run: PromptRun, keep: Keep, *, nodes: int) -> ThinningCache:
        """See `GoingOn`."""
        assert isinstance(self.evictor, GoingOn)
        return self.evictor.thinning(run, keep, nodes=nodes)

    def select(self, run: PromptRun) -> Keep | None:
        """See `Evictor`."""
        budget = getattr(self.evictor, "budget", None)
        if self.scorer is None or budget is None or (budget.covers(run.lengths) and not self.scores.wanted):
            return self.evictor.select(run)
        if not (self.reuses and self.scores.known):
            self.scores.put(self.scorer.scores(run))
        return self.scorer.select(run, self.scores.s_LBGS)

"""Eviction by predicted scores: KV entries are scored as they are written, and the best ones stay.

Shapes: L layers, B prompts, S prompt positions, G KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.cache.thinning import Rule, ThinningCache
from longtrain.decoding.evict import Budget, Budgeted, Keep, PromptRun
from longtrain.decoding.select import best_of_groups, rows_of
from longtrain.methods.kvzap.modules import PredictedScores
from longtrain.settings import Adaptive

if TYPE_CHECKING:
    from longtrain.methods.kvzap.config import Config
    from longtrain.methods.kvzap.modules import KVzap
    from longtrain.targets.attention import AttentionHook


class KVzapEvictor(Budgeted):
    """Keeps the KV entries with the best predicted scores (`decoding.evict.Evictor`), without a forward.

    Args:
        module: the module, in the target's dtype and on its device.
        config: hyperparameters.
        budget: entries kept of each layer and KV head; on average if budgets are adaptive.
        adaptive: how the budget is shared; among all layers, as KVzip does it.
        window: last tokens of a prompt, which stay.
        threshold: entries below this score are evicted even if the budget has room for them; None: there is
            none.
        decoding: keep evicting during decoding: tokens that leave the window compete with the others. The
            first token then always stays.
        stride: number of tokens that leave the window together.

    Source: KVzap (arXiv 2601.07891), whose eviction is by threshold alone (budget ratio 1 here).
    Note: that the window takes at most a quarter of a budget, that sinks stay, and budgets at all are ours.
    """

    name = "kvzap"
    wrappable = False
    any_scale = True

    def __init__(
        self,
        module: KVzap,
        config: Config,
        budget: Budget,
        *,
        adaptive: Adaptive = "layers",
        window: int | None = None,
        threshold: float | None = None,
        decoding: bool = False,
        stride: int = 16,
    ) -> None:
        self.module, self.config, self.budget = module, config, budget
        self.adaptive, self.threshold = adaptive, threshold
        self.window = config.window if window is None else window
        self.decoding, self.stride = decoding, stride
        self.sinks = max(config.sinks, int(decoding))

    @property
    def least_budget(self) -> int:
        """Number of entries that always stay: the sinks and the newest token."""
        return self.sinks + 1

    def hook(self, lengths: Sequence[int]) -> AttentionHook | None:
        """Return the observer that scores the tokens during prefill (see `Evictor`)."""
        return PredictedScores(self.module)

    def scores(self, run: PromptRun) -> Tensor:
        """Return the predicted score of every prompt token, s_LBGS in fp32."""
        assert isinstance(run.watched, PredictedScores)
        return torch.stack(run.watched.scores)

    def select(self, run: PromptRun, scores: Tensor | None = None) -> Keep | None:
        """Choose the entries to keep (see `Evictor`), by `scores` if they are known already."""
        if self.threshold is None and not self.decoding and self.budget.covers(run.lengths):
            return None
        return self.keep(self.scores(run) if scores is None else scores, run.lengths)

    def keep(self, s_LBGS: Tensor, lengths: Sequence[int]) -> Keep:
        """Choose the entries to keep of prompts with these scores.

        Args:
            s_LBGS: scores; those beyond a prompt's length are ignored.
            lengths: tokens of each prompt.
        """
        slot_S = torch.arange(s_LBGS.shape[-1], device=s_LBGS.device)
        n_B11, recent_B11 = (
            torch.tensor(values).to(s_LBGS.device, non_blocking=True)[:, None, None]
            for values in (lengths, [self.recent(n) for n in lengths])
        )
        # +inf always stays, -inf is padding and never does
        stays_B1S = (slot_S < self.sinks) | (slot_S >= n_B11 - recent_B11)
        ranked = s_LBGS.masked_fill(stays_B1S, torch.inf).masked_fill(slot_S >= n_B11, -torch.inf)
        return self._best(ranked, [min(self.budget.of(n), n) for n in lengths])

    def recent(self, length: int) -> int:
        """Return how many newest tokens stay: the window, or a quarter of an exceeded budget if less."""
        rows = self.budget.of(length)
        return max(1, min(self.window, rows // 4) if rows < length else self.window)

    def thinning(self, run: PromptRun, keep: Keep, *, nodes: int) -> ThinningCache:
        """Return the cache that keeps evicting during decoding (see `GoingOn`)."""
        s_LBGS = self.scores(run).clone()
        s_LBGS[..., : self.sinks] = torch.inf
        windows = [  # a prompt within its budget may exceed it once its answer is written
            self.recent(n if self.budget.of(n) < n else n + run.max_new_tokens) for n in run.lengths
        ]

        def best(s_LBGS: Tensor, rows: Sequence[int | None]) -> Keep:
            all_ = s_LBGS.shape[-1]
            return self._best(s_LBGS, [all_ if n is None else min(n, all_) for n in rows])

        rule = Rule(score=self.module.score, keep=best, rows=self.budget.of, stride=self.stride)
        return ThinningCache(
            run.cache, keep, s_LBGS, lengths=run.lengths, windows=windows, rule=rule, nodes=nodes
        )

    def _best(self, s_LBGS: Tensor, rows: Sequence[int]) -> Keep:
        """Choose the best entries; +inf always stays, -inf and scores below the threshold never."""
        if self.threshold is not None:
            s_LBGS = s_LBGS.masked_fill(s_LBGS < self.threshold, -torch.inf)
        return rows_of(best_of_groups(s_LBGS, rows, across=self.adaptive))

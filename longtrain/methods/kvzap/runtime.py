"""Eviction by foretold scores: rows are scored as they are written, and the best of them stay.

Shapes: L layers, B prompts, S prompt slots, G KV heads.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from longtrain.cache.thinning import Rule, ThinningCache
from longtrain.decoding.evict import Budget, Keep, PromptRun
from longtrain.decoding.select import best_of_groups, rows_of
from longtrain.errors import ConflictError
from longtrain.methods.kvzap.modules import Foretelling

if TYPE_CHECKING:
    from longtrain.methods.kvzap.config import Config
    from longtrain.methods.kvzap.modules import KVzap
    from longtrain.targets.attention import Watch

ADAPTIVE = (False, "heads", "layers")
"""Whether budgets are the same for all heads, or shared among the heads of a layer or of all layers."""


class KVzapEvictor:
    """Keeps the rows whose foretold scores are best (`decoding.evict.Evictor`); no further forward.

    Args:
        module: in the target's dtype and on its device.
        config: hyperparameters.
        budget: rows kept of each layer and KV head; on average where budgets are adaptive.
        adaptive: one of `ADAPTIVE`; across layers, as KVzip does it.
        window: last rows of a prompt, which stay.
        threshold: rows below this score go although the budget has room for them; None: there is none.
        decoding: go on while the text grows: the rows that leave the window compete with the others. The
            first row then stays in any case.
        stride: rows that do so together.

    Source: KVzap (arXiv 2601.07891), whose eviction is by threshold alone (budget ratio 1 here).
    Note: the window takes a quarter of a budget at most, sinks stay, and budgets are ours.
    """

    name = "kvzap"
    wrappable = False

    def __init__(
        self,
        module: KVzap,
        config: Config,
        budget: Budget,
        *,
        adaptive: Literal[False, "heads", "layers"] = "layers",
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
        """Rows that stay in any case: the sinks and the newest row."""
        return self.sinks + 1

    def with_budget(self, budget: Budget) -> KVzapEvictor:
        """The same with another budget."""
        other = copy.copy(self)
        other.budget = budget
        return other

    def extra_rows(self, longest: int) -> int:
        """See `Evictor`: none."""
        return 0

    def watch(self, lengths: Sequence[int]) -> Watch | None:
        """See `Evictor`: what scores the rows as they go by."""
        return Foretelling(self.module)

    def scores(self, run: PromptRun) -> Tensor:
        """The foretold score of every prompt token, s_LBGS in fp32.

        Raises:
            ConflictError: nothing watched the prefill.
        """
        if not isinstance(run.watched, Foretelling):
            raise ConflictError(
                "kvzap scores rows as the prefill writes them, and nothing watched it; run it through "
                "Engine.generate"
            )
        return torch.stack(run.watched.scores)

    def select(self, run: PromptRun, scores: Tensor | None = None) -> Keep | None:
        """See `Evictor`; `scores` are those of this run where they are known already."""
        fits = self.threshold is None and all(n <= self.budget.of(n) for n in run.lengths)
        if fits and not self.decoding:
            return None
        return self.keep(self.scores(run) if scores is None else scores, run.lengths)

    def keep(self, s_LBGS: Tensor, lengths: Sequence[int]) -> Keep:
        """The rows that stay of prompts with these scores.

        Args:
            s_LBGS: scores; slots from a prompt's length on mean nothing.
            lengths: tokens of each prompt.
        """
        slot_S = torch.arange(s_LBGS.shape[-1], device=s_LBGS.device)
        n_B11, recent_B11 = (
            torch.tensor(values).to(s_LBGS.device, non_blocking=True)[:, None, None]
            for values in (lengths, [self.recent(n) for n in lengths])
        )
        stays_B1S = (slot_S < self.sinks) | (slot_S >= n_B11 - recent_B11)
        ranked = s_LBGS.masked_fill(stays_B1S, torch.inf).masked_fill(slot_S >= n_B11, -torch.inf)
        return self._best(ranked, [min(self.budget.of(n), n) for n in lengths])

    def recent(self, length: int) -> int:
        """Newest rows of a text that stay: the window, and of a budget that it is above a quarter at most."""
        rows = self.budget.of(length)
        return max(1, min(self.window, rows // 4) if rows < length else self.window)

    def thinning(self, run: PromptRun, keep: Keep, *, nodes: int) -> ThinningCache:
        """See `GoingOn`."""
        s_LBGS = self.scores(run).clone()
        s_LBGS[..., : self.sinks] = torch.inf
        windows = [  # a prompt that fits may be above its budget when its answer was written
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
        """The best of these rows; those of +inf stay, and those of -inf or below the threshold go."""
        if self.threshold is not None:
            s_LBGS = s_LBGS.masked_fill(s_LBGS < self.threshold, -torch.inf)
        return rows_of(best_of_groups(s_LBGS, rows, across=self.adaptive))

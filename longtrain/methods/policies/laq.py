"""LAQ: a pseudo answer, decoded on a cache that SnapKV has cut, chooses what of the whole cache stays.

Shapes: L layers, B prompts, S prompt slots, G KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from longtrain.costs.hardware import Gpu
from longtrain.costs.method import PromptShape
from longtrain.costs.model import decode, score
from longtrain.decoding.evict import Keep, PromptRun
from longtrain.decoding.observe import AllQueries, Both, LastQueries, observed
from longtrain.decoding.select import max_pool, top
from longtrain.methods.policies.base import fits
from longtrain.methods.policies.snapkv import SnapKV
from longtrain.settings import Count


@dataclass
class LAQ(SnapKV):
    """Lookahead Q-Cache: the queries of `n_tokens` greedy tokens, decoded on an evicted copy, are observers.

    1. SnapKV cuts a copy of the cache to the budget. 2. The copy decodes greedily. 3. Those steps' queries
    score the whole prompt (mean over rows and heads, max-pool) and the best rows stay.
    The scores depend on the budget through the copy. Peak memory is the whole cache and the copy.

    Args:
        window: observers of the first cut; with `plus` of the second one too, and then they stay.
        n_tokens: tokens of the pseudo answer.
        plus: LAQ++: the prompt's window and the pseudo answer observe together.

    Source: Lookahead Q-Cache (arXiv 2505.20334), section 3.
    Note: the pseudo rows' softmax runs over the whole prompt and the pseudo rows up to their own, as if they
        were decoded on the whole cache with these queries. The authors' code (noforit/Lookahead_Q-Cache)
        leaves the pseudo rows' keys out of it, its script writes 8 pseudo tokens, and its LAQ++ has a second
        window. What these differences are worth has not been measured here.
    """

    name: ClassVar[str] = "laq"
    scores_depend_on_budget: ClassVar[bool] = True
    n_tokens: Count = 32
    plus: bool = False

    @property
    def least_budget(self) -> int:
        """See `BasePolicy`: the window, which the copy's cut keeps, although the last one need not."""
        return max(1, self.window)

    @property
    def protected(self) -> int:
        """Rows at the end of each prompt that stay whatever their score."""
        return self.window if self.plus else 0

    def extra_rows(self, longest: int) -> int:
        """See `Evictor`: the pseudo answer."""
        return self.n_tokens

    @classmethod
    def first_token(cls, prompt: PromptShape, gpu: Gpu) -> dict[str, float]:
        """See `BasePolicy`: SnapKV's scores, a pseudo answer on the evicted copy, and scores again."""
        seen = score(prompt.size, cls.window, prompt.tokens)
        pseudo = decode(prompt.size, cls.n_tokens, prompt.budget)
        added = [seen, pseudo, seen]
        return {
            "ms": sum(part.ms(gpu) for part in added),
            "tflop": (prompt.prefill.flops + sum(part.flops for part in added)) * 1e-12,
            "decode_gb": pseudo.bytes * 1e-9,
        }

    def scores(self, run: PromptRun) -> Tensor:
        """See `Scorer`."""
        assert isinstance(run.watched, LastQueries)
        first = None if fits(run.lengths, self.budget) else super().choose(run, super().scores(run))
        rows = AllQueries(run.lengths)
        run.decode(self.n_tokens, keep=first, watch=rows)
        return observed(run, Both(run.watched, rows) if self.plus else rows)

    def choose(self, run: PromptRun, scores: Tensor | None) -> Keep:
        """See `BasePolicy`."""
        assert scores is not None
        pooled = max_pool(scores, run.lengths, kernel=self.kernel)
        return top(pooled, run.lengths, self.budget, protect_last=self.protected)

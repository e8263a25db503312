"""Ada-KV: any policy's scores, with budgets that move to the heads that want them.

Shapes: L layers, B prompts, S prompt slots, G KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor

from longtrain.decoding.evict import Budget, Evictor, Keep, PromptRun
from longtrain.decoding.select import max_pool, top_adaptive
from longtrain.errors import ConfigError
from longtrain.methods.policies import POLICIES, make, policy_class
from longtrain.methods.policies.base import BasePolicy, Scorer
from longtrain.settings import Share
from longtrain.targets.attention import Watch


class ScoringEvictor(Scorer, Evictor, Protocol):
    """An evictor that can be wrapped: it chooses by scores."""


@dataclass
class AdaKV(BasePolicy):
    """A wrapper: the heads of a layer share their budgets, by what the pooled scores of all of them say.

    With b = budget - protected rows: the best b rows a head of all heads together are counted per head as c,
    and a head keeps round(c (1 - floor) + int(b floor)) of its own best rows and the protected ones.

    Args:
        over: who gives the scores: the name of a policy that is `wrappable`, or such an evictor
            (LookaheadKV's).
        options: options of the policy named by `over`.
        floor: share of the budget that every head keeps.
        normalise: weigh each head's scores by the share of its mass that its best b rows hold, before heads
            are compared.
        across: what shares one budget: the heads of a layer ("heads", the paper) or of all ("layers").

    Raises:
        ConfigError: what is to be wrapped has no scores that heads can be compared by, or brings budgets of
            its own (pyramidkv, kvzip, streaming_llm, adakv); or an option is wrong.

    Source: Ada-KV (arXiv 2407.11550), Algorithm 1; `normalise` is that of the authors' code.
    Note: rounding is that of the authors' code, so the total of those who share a budget may be missed: up to
        about 1.5 rows a head fewer, or half a row more. "layers" is ours. An evictor says by `kernel` and
        `protected` (else `window`) how its scores are pooled and how many last rows stay; it needs neither.
    """

    name: ClassVar[str] = "adakv"
    over: Any = "snapkv"
    options: dict[str, Any] = field(default_factory=dict)
    floor: Share = 0.2
    normalise: bool = False
    across: Literal["heads", "layers"] = "heads"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.over, str):
            if not policy_class(self.over).wrappable:
                raise ConfigError(_refusal(self.over))
            self.over = make(self.over, self.budget, self.options, group="evict.options")
        if not isinstance(self.over, Scorer) or not getattr(self.over, "wrappable", False):
            raise ConfigError(_refusal(getattr(self.over, "name", self.over)))

    @property
    def wrapped(self) -> ScoringEvictor:
        """The policy that gives the scores."""
        found: ScoringEvictor = self.over
        return found

    @property
    def scores_depend_on_budget(self) -> bool:
        """Whether the wrapped policy's do."""
        return bool(getattr(self.wrapped, "scores_depend_on_budget", False))

    @property
    def least_budget(self) -> int:
        """See `BasePolicy`: the wrapped policy's."""
        return int(getattr(self.wrapped, "least_budget", 1))

    def extra_rows(self, longest: int) -> int:
        """See `Evictor`: the wrapped policy's."""
        return self.wrapped.extra_rows(longest)

    def watch(self, lengths: Sequence[int]) -> Watch | None:
        """See `Evictor`: the wrapped policy's."""
        return self.wrapped.watch(lengths)

    def scores(self, run: PromptRun) -> Tensor | None:
        """See `Scorer`: the wrapped policy's."""
        return self.wrapped.scores(run)

    def choose(self, run: PromptRun, scores: Tensor | None) -> Keep:
        """See `BasePolicy`.

        Raises:
            ConfigError: the wrapped policy has no scores.
        """
        if scores is None:
            raise ConfigError(_refusal(self.wrapped.name))
        protected = int(getattr(self.wrapped, "protected", getattr(self.wrapped, "window", 0)))
        pooled = max_pool(scores, run.lengths, kernel=int(getattr(self.wrapped, "kernel", 1)))
        if self.normalise:
            pooled = pooled * _mass(pooled, run.lengths, self.budget, protected)
        return top_adaptive(
            pooled,
            run.lengths,
            self.budget,
            protect_last=protected,
            floor=self.floor,
            across=self.across,
            exact=False,
        )

    def with_budget(self, budget: Budget) -> Self:
        """See `Scorer`; the wrapped policy gets it too."""
        return replace(self, budget=budget, over=self.wrapped.with_budget(budget))


def _refusal(what: object) -> str:
    allowed = ", ".join(name for name in POLICIES if policy_class(name).wrappable)
    return (
        f"evict.over={what}: it has no scores by which heads can be compared, or budgets of its own; "
        f"allowed: {allowed}, or the evictor of a trained method that is `wrappable`"
    )


def _mass(s_LBGS: Tensor, lengths: Sequence[int], budget: Budget, protected: int) -> Tensor:
    """Share of a head's mass, without the protected rows, that its best rows hold: [L, B, G, 1]."""
    shares = []
    for b, length in enumerate(lengths):
        free_LGS = s_LBGS[:, b, :, : max(1, length - protected)].clamp(min=0)  # NaN came as -inf
        n = min(max(1, budget.of(length) - protected), free_LGS.shape[-1])
        total_LG = free_LGS.sum(-1).clamp(min=torch.finfo(free_LGS.dtype).tiny)
        shares.append(free_LGS.topk(n).values.sum(-1) / total_LG)
    return torch.stack(shares, 1)[..., None]

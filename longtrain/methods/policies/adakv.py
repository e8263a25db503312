"""Ada-KV: any policy's scores, with budgets distributed among the heads by need.

Shapes: L layers, B prompts, S prompt positions, G KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor

from longtrain.decoding.evict import Budget, Evictor, Keep, PromptRun
from longtrain.decoding.select import max_pool, top_adaptive
from longtrain.errors import ConfigError
from longtrain.methods.policies import POLICIES, make, policy_class
from longtrain.methods.policies.base import BasePolicy, Scorer
from longtrain.settings import Share
from longtrain.targets.attention import AttentionHook


class ScoringEvictor(Scorer, Evictor, Protocol):
    """An evictor that chooses by scores and can therefore be wrapped."""


@dataclass
class AdaKV(BasePolicy):
    """Wraps a policy and distributes a layer's budget among its heads, by the pooled scores of all of them.

    With b = budget - protected entries: the best b entries per head of all heads together are counted per
    head as c, and a head keeps round(c (1 - floor) + int(b floor)) of its own best entries and the protected
    ones.

    Args:
        over: source of the scores: the name of a policy that is `wrappable`, or such an evictor
            (LookaheadKV's).
        options: options of the policy named by `over`.
        floor: share of the budget that every head keeps.
        normalise: multiply each head's scores by the share of their sum that its best b entries have, before
            heads are compared.
        across: scope of one budget: the heads of a layer ("heads", the paper) or of all ("layers").

    Raises:
        ConfigError: the wrapped policy has no scores that heads can be compared by, or has budgets of
            its own (pyramidkv, kvzip, streaming_llm, adakv); or an option is wrong.

    Source: Ada-KV (arXiv 2407.11550), Algorithm 1; `normalise` is that of the authors' code.
    Note: rounding is that of the authors' code, so the total of a shared budget may be missed: up to about
        1.5 entries a head fewer, or half an entry more. "layers" is ours. An evictor's optional `kernel` and
        `protected` (else `window`) decide how its scores are pooled and how many last tokens stay.
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
        """The wrapped policy, which gives the scores."""
        found: ScoringEvictor = self.over
        return found

    @property
    def scores_depend_on_budget(self) -> bool:
        """True if the wrapped policy's scores depend on the budget."""
        return bool(getattr(self.wrapped, "scores_depend_on_budget", False))

    @property
    def least_budget(self) -> int:
        """Smallest budget of the wrapped policy (see `BasePolicy`)."""
        return int(getattr(self.wrapped, "least_budget", 1))

    def extra_tokens(self, longest: int) -> int:
        """Return the extra cache positions of the wrapped policy (see `Evictor`)."""
        return self.wrapped.extra_tokens(longest)

    def hook(self, lengths: Sequence[int]) -> AttentionHook | None:
        """Return the observer of the wrapped policy (see `Evictor`)."""
        return self.wrapped.hook(lengths)

    def scores(self, run: PromptRun) -> Tensor | None:
        """Return the scores of the wrapped policy (see `Scorer`)."""
        return self.wrapped.scores(run)

    def choose(self, run: PromptRun, scores: Tensor | None) -> Keep:
        """Choose the entries of all heads together (see `BasePolicy`).

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
        """Return a copy with another budget, for the wrapped policy too (see `Scorer`)."""
        other = super().with_budget(budget)
        other.over = self.wrapped.with_budget(budget)
        return other


def _refusal(what: object) -> str:
    allowed = ", ".join(name for name in POLICIES if policy_class(name).wrappable)
    return (
        f"evict.over={what}: it has no scores by which heads can be compared, or budgets of its own; "
        f"allowed: {allowed}, or the evictor of a trained method that is `wrappable`"
    )


def _mass(s_LBGS: Tensor, lengths: Sequence[int], budget: Budget, protected: int) -> Tensor:
    """Return the share of a head's scores that its best unprotected tokens have: [L, B, G, 1]."""
    shares = []
    for b, length in enumerate(lengths):
        free_LGS = s_LBGS[:, b, :, : max(1, length - protected)].clamp(min=0)  # NaN came as -inf
        n = min(max(1, budget.of(length) - protected), free_LGS.shape[-1])
        total_LG = free_LGS.sum(-1).clamp(min=torch.finfo(free_LGS.dtype).tiny)
        shares.append(free_LGS.topk(n).values.sum(-1) / total_LG)
    return torch.stack(shares, 1)[..., None]

"""Base classes of eviction policies: a budget, and scores that are pooled and cut to it.

Shapes: L layers, B sequences, G KV heads, S prompt positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self, runtime_checkable

from torch import Tensor

from longtrain.costs.hardware import Gpu
from longtrain.costs.method import PromptShape
from longtrain.decoding.evict import Budget, Budgeted, Keep, PromptRun
from longtrain.decoding.select import max_pool, top
from longtrain.settings import CountOrZero, Kernel, check, wrong
from longtrain.targets.attention import AttentionHook


@runtime_checkable
class Scorer(Protocol):
    """An evictor whose scores can be inspected, and shared by several budgets."""

    name: str

    def scores(self, run: PromptRun) -> Tensor | None:
        """Return the importance s_LBGS of each prompt token in fp32, not pooled; None if there is none."""

    def select(self, run: PromptRun, scores: Tensor | None = None) -> Keep | None:
        """Choose entries as `Evictor.select` does, by `scores` if this run's are known already."""

    def with_budget(self, budget: Budget) -> Self:
        """Return a copy with another budget."""


@dataclass
class BasePolicy(Budgeted):
    """An evictor with a budget that observes nothing during prefill.

    Args:
        budget: number of KV entries kept, protected ones included.
    """

    budget: Budget
    name: ClassVar[str] = ""
    wrappable: ClassVar[bool] = False
    """True if `AdaKV` may use its scores: heads are comparable by them, and it has no own budgets."""

    def __post_init__(self) -> None:
        check(self, "evict")

    @property
    def least_budget(self) -> int:
        """Smallest budget that is accepted: the entries that always stay."""
        return 1

    def hook(self, lengths: Sequence[int]) -> AttentionHook | None:
        """Return None: nothing is observed (see `Evictor`)."""
        return None

    def scores(self, run: PromptRun) -> Tensor | None:
        """Return None: there are no scores (see `Scorer`)."""
        return None

    def select(self, run: PromptRun, scores: Tensor | None = None) -> Keep | None:
        """Choose the entries to keep, or None if every prompt fits (see `Scorer`)."""
        if self.budget.covers(run.lengths):
            return None
        return self.choose(run, self.scores(run) if scores is None else scores)

    def choose(self, run: PromptRun, scores: Tensor | None) -> Keep:
        """Choose the entries to keep; called only if at least one prompt is above its budget."""
        raise NotImplementedError

    @classmethod
    def first_token(cls, prompt: PromptShape, gpu: Gpu) -> dict[str, float]:
        """Estimate the policy's share of the first token (`costs.method.FirstToken`); empty if unknown."""
        return {}


@dataclass
class Policy(BasePolicy):
    """Base of policies whose scores are max-pooled and cut to the budget; a prompt's last tokens stay.

    Args:
        window: tokens at the end of each prompt that stay.
        kernel: width of the max-pool, odd; 1: off.

    Raises:
        ConfigError: a window below what the policy needs, or a kernel that is even or below 1.
    """

    window: CountOrZero = 32
    kernel: Kernel = 7
    least_window: ClassVar[int] = 0

    @property
    def least_budget(self) -> int:
        """Smallest budget, the window (see `BasePolicy`)."""
        return max(1, self.window)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < self.least_window:
            raise wrong("evict.window", self.window, f"{self.least_window} or more for {self.name}")

    def choose(self, run: PromptRun, scores: Tensor | None) -> Keep:
        """Pool the scores and keep the best entries and the window (see `BasePolicy`)."""
        assert scores is not None
        pooled = max_pool(scores, run.lengths, kernel=self.kernel)
        return top(pooled, run.lengths, self.budget, protect_last=self.window)

"""What eviction policies share: a budget, and scores that are pooled and cut to it.

Shapes: L layers, B sequences, G KV heads, S prompt slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Self, runtime_checkable

from torch import Tensor

from longtrain.costs.hardware import Gpu
from longtrain.costs.method import PromptShape
from longtrain.decoding.evict import Budget, Keep, PromptRun
from longtrain.decoding.select import max_pool, top
from longtrain.settings import CountOrZero, Kernel, check, wrong
from longtrain.targets.attention import Watch


@runtime_checkable
class Scorer(Protocol):
    """An evictor whose scores can be looked at, and shared by several budgets."""

    name: str

    def scores(self, run: PromptRun) -> Tensor | None:
        """The importance s_LBGS of each prompt token in fp32, not pooled; None where there is none."""

    def select(self, run: PromptRun, scores: Tensor | None = None) -> Keep | None:
        """Choose rows as `Evictor.select` does; `scores` are those of this run if they are known."""

    def with_budget(self, budget: Budget) -> Self:
        """The same policy with another budget."""


@dataclass
class BasePolicy:
    """An evictor with a budget that looks at nothing during prefill.

    Args:
        budget: rows kept, whatever the policy protects included.
    """

    budget: Budget
    name: ClassVar[str] = ""
    wrappable: ClassVar[bool] = False
    """Whether `AdaKV` may take its scores: heads can be compared by them, and budgets are not its own."""

    def __post_init__(self) -> None:
        check(self, "evict")

    @property
    def least_budget(self) -> int:
        """Rows below which a budget is refused: those that stay in any case."""
        return 1

    def extra_rows(self, longest: int) -> int:
        """See `Evictor`: none."""
        return 0

    def watch(self, lengths: Sequence[int]) -> Watch | None:
        """See `Evictor`: nothing."""
        return None

    def scores(self, run: PromptRun) -> Tensor | None:
        """See `Scorer`: none."""
        return None

    def select(self, run: PromptRun, scores: Tensor | None = None) -> Keep | None:
        """See `Scorer`."""
        if fits(run.lengths, self.budget):
            return None
        return self.choose(run, self.scores(run) if scores is None else scores)

    def choose(self, run: PromptRun, scores: Tensor | None) -> Keep:
        """Which rows stay; called where at least one prompt is above its budget."""
        raise NotImplementedError

    @classmethod
    def first_token(cls, prompt: PromptShape, gpu: Gpu) -> dict[str, float]:
        """What the policy adds to the first token, as `costs.method.FirstToken`; nothing is known here."""
        return {}

    def with_budget(self, budget: Budget) -> Self:
        """See `Scorer`."""
        return replace(self, budget=budget)


@dataclass
class Policy(BasePolicy):
    """Scores, max-pooled, cut to the budget; the last rows of a prompt always stay.

    Args:
        window: rows at the end of each prompt that stay.
        kernel: slots of the max-pool, odd; 1: off.

    Raises:
        ConfigError: a window below what the policy needs, or a kernel that is even or below 1.
    """

    window: CountOrZero = 32
    kernel: Kernel = 7
    least_window: ClassVar[int] = 0

    @property
    def least_budget(self) -> int:
        """See `BasePolicy`: the window."""
        return max(1, self.window)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < self.least_window:
            raise wrong("evict.window", self.window, f"{self.least_window} or more for {self.name}")

    def choose(self, run: PromptRun, scores: Tensor | None) -> Keep:
        """See `BasePolicy`."""
        assert scores is not None
        pooled = max_pool(scores, run.lengths, kernel=self.kernel)
        return top(pooled, run.lengths, self.budget, protect_last=self.window)


def fits(lengths: Sequence[int], budget: Budget) -> bool:
    """Whether no prompt is above its budget."""
    return all(length <= budget.of(length) for length in lengths)

"""Who is compared in the eviction suite, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from longtrain.decoding.evict import Budget, Evictor
from longtrain.decoding.limits import Limits
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError
from longtrain.evaluation.eviction_tasks import CONTINUE, Prompt

if TYPE_CHECKING:
    from longtrain.targets.model import Target

Json = dict[str, Any]
Advance = Callable[[str, int], None]
"""Called with (what is running, answers done since the last call)."""
FULL, ORACLE, BASELINE, ARTIFACT = "full", "oracle", "baseline", "artifact"


@dataclass(frozen=True)
class Contender:
    """One line of the comparison.

    Args:
        name: unique.
        kind: `full`, `oracle`, `baseline` or `artifact`.
        make: its evictor with a budget; None for the full cache.
        facts: what it is made of; a kept piece of other facts is refused.
    """

    name: str
    kind: str
    make: Callable[[Budget], Evictor] | None = None
    facts: Json = field(default_factory=dict)


FULL_CACHE = Contender("full", FULL)


@dataclass(frozen=True)
class Protocol:
    """What is asked of every contender.

    Args:
        lengths: prompt tokens, the question included.
        budgets: rows of each layer and KV head.
        prompts: prompts of each length.
        tasks: asked in turn.
        after: the question comes after eviction, so that no policy sees it.
        max_new_tokens: most tokens of an answer.
        batch: prompts decoded together.
        sampling: greedy, or a temperature.
        samples: answers to each prompt, each with its own coins; 1 if greedy.
        rank_prompts: prompts of each length whose scores are compared with the true ones.
        rank_skip: last positions of a prompt left out there: a policy with a window keeps them unscored.
        time_prompts: prompts of each length whose time to first token is measured; 0: none.
        time_batch: prompts timed together.
        seed: of prompts, coins and bootstrap.
    """

    lengths: tuple[int, ...]
    budgets: tuple[Budget, ...]
    prompts: int = 100
    tasks: tuple[str, ...] = ("needles", "chains", "table", "quote")
    after: bool = False
    max_new_tokens: int = 96
    batch: int = 8
    sampling: Sampling = field(default_factory=Sampling)
    samples: int = 1
    rank_prompts: int = 16
    rank_skip: int = 32
    time_prompts: int = 4
    time_batch: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        counts = {
            key: getattr(self, key) for key in ("prompts", "max_new_tokens", "batch", "samples", "time_batch")
        }
        wrong = [f"suite.{key}={value}; allowed: 1 or more" for key, value in counts.items() if value < 1]
        for key in ("rank_prompts", "rank_skip", "time_prompts"):
            wrong += [f"suite.{key}={getattr(self, key)}; allowed: 0 or more"] * (getattr(self, key) < 0)
        if not self.lengths:
            wrong.append("lengths=[] measures nothing; pass e.g. lengths=[4k,8k]")
        if not self.budgets:
            wrong.append("suite.budgets=[] measures nothing; pass e.g. suite.budgets=[64,128]")
        if self.sampling.greedy and self.samples > 1:
            wrong.append(
                f"suite.samples={self.samples} greedy answers are the same; set decode.temperature above 0"
            )
        if self.after and CONTINUE in self.tasks:
            wrong.append("suite.question=after has no question for the task 'continue'; leave that task out")
        if wrong:
            raise ConfigError(wrong[0])

    @property
    def limits(self) -> Limits:
        """Bounds that let a batch of this size through."""
        return Limits(batch=max(self.batch, self.time_batch))

    def seen(self, prompt: Prompt) -> list[int]:
        """What of a prompt is there when rows are evicted."""
        return list(prompt.context) if self.after else prompt.whole

    def settings(self, target: Target, contender: Contender) -> Json:
        """Everything that the answers of a contender follow from, its length aside."""
        values = asdict(self)
        del values["lengths"], values["sampling"]["seed"]
        return {
            **values,
            "budgets": [label(b) for b in self.budgets] if contender.make else [],
            "target": target.info.weights_hash,
            "dtype": str(target.dtype),
            "policy": contender.facts,
        }


def label(budget: Budget) -> str:
    """`128` tokens, or `10%` of the prompt."""
    return str(budget.tokens) if budget.ratio is None else f"{100 * budget.ratio:g}%"

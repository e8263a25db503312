"""What a method says of its costs: a training step, a cycle of decoding, and what it adds to the first token.

Each is optional. `longtrain plan` and `longtrain bench` ask for them and know no method by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from longtrain.costs.cycle import Forward
from longtrain.costs.hardware import Gpu
from longtrain.costs.model import Sizes, Work, prefill
from longtrain.costs.training import PackedRow, StepCost, draft_step


@dataclass(frozen=True)
class CycleCost:
    """The forwards of one cycle of speculative decoding, and the memory beside the target's.

    Args:
        title: what the draft is called in tables.
        alone: the target's forward for one token on the method's cache, without a draft.
        draft: the draft's forwards; none where nothing is drafted.
        verify: the target's forward over the root and the drafted nodes.
        weight_bytes: bytes of weights beside the target's own.
        cache_bytes: (sequences, tokens of each) -> bytes of the method's cache; None: that of the target.
        before: what runs before each forward of the target: scores, by which it is chosen what that reads.
    """

    title: str
    alone: Forward
    draft: tuple[Forward, ...]
    verify: Forward
    weight_bytes: float = 0.0
    cache_bytes: Callable[[int, int], float] | None = None
    before: tuple[Forward, ...] = ()

    def reading(self, rows: int, *, every: int = 1) -> CycleCost:
        """The same, where the target reads so many rows, chosen once in `every` steps."""
        alone, verify = (replace(one, seen=rows) for one in (self.alone, self.verify))
        before = tuple(replace(one, times=one.times / every) for one in self.before)
        return replace(self, alone=alone, verify=verify, before=before)

    @property
    def forwards(self) -> tuple[Forward, ...]:
        """What runs before, the draft's forwards and then the target's."""
        return (*self.before, *self.draft, self.verify)


@dataclass(frozen=True)
class PromptShape:
    """The prompt whose first token is waited for.

    Args:
        size: the target.
        tokens: the prompt's length.
        budget: rows kept of each layer and KV head.
        draft: a small model of the same vocabulary, for methods that write with one.
        causal: whether attention counts half of its square.
    """

    size: Sizes
    tokens: int
    budget: int = 128
    draft: Sizes | None = None
    causal: bool = True

    @property
    def prefill(self) -> Work:
        """The work of the full cache's prefill."""
        return prefill(self.size, self.tokens, causal=self.causal)


FirstToken = Callable[[Any, PromptShape, Gpu], Mapping[str, float]]
"""(settings, prompt, device) -> figure -> value; `ms` and `..._ms` are milliseconds over the prefill."""


def _usual_step(config: Any, size: Sizes, row: PackedRow, trained: int, itemsize: int) -> StepCost:
    """A draft that reads the last layer's K, V and hidden states of its whole document, all rows at once."""
    return draft_step(size, row, trained=trained, itemsize=itemsize)


@dataclass(frozen=True)
class MethodCost:
    """What a method costs.

    Args:
        training: (config, target, row, trained weights, bytes of a number) -> what the module's step of a
            packed row takes; the target's own pass is not in it.
        cycle: (config, target, widths of the drafted tree, bytes of a number) -> a cycle of decoding; raises
            ConfigError where the target is not served. None: nothing is known.
        first_token: see `FirstToken`; None: it adds nothing that is known.
        as_built: the figure of `first_token` that our implementation should come near.
        note: a sentence for tables of the first token, such as what the paper measured.
        response_tokens: labels at the end of a random row for measuring; 0: all tokens but the first.
        suite: the suite of `longtrain bench` that measures the training step.
    """

    training: Callable[[Any, Sizes, PackedRow, int, int], StepCost] = _usual_step
    cycle: Callable[[Any, Sizes, tuple[int, ...], int], CycleCost] | None = None
    first_token: FirstToken | None = None
    as_built: str = "ms"
    note: str = ""
    response_tokens: int = 0
    suite: str = "draft_memory"

"""The costs that a method declares: a training step, a decoding cycle, and time to the first token.

Each is optional. `longtrain plan` and `longtrain bench` use them without knowing the methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from longtrain.costs.cycle import Forward
from longtrain.costs.hardware import Gpu
from longtrain.costs.model import Sizes, Work, prefill
from longtrain.costs.training import PackedSequence, StepCost, draft_step


@dataclass(frozen=True)
class CycleCost:
    """The forwards of one cycle of speculative decoding, and the memory besides the target's.

    Args:
        title: name of the draft in tables.
        alone: the target's forward for one token on the method's cache, without a draft.
        draft: the draft's forwards; empty: nothing is drafted.
        verify: the target's forward over the root and the drafted nodes.
        weight_bytes: bytes of weights besides the target's.
        cache_bytes: (sequences, tokens of each) -> bytes of the method's cache; None: the target's cache.
        before: forwards before each forward of the target, which score the KV entries to select.
    """

    title: str
    alone: Forward
    draft: tuple[Forward, ...]
    verify: Forward
    weight_bytes: float = 0.0
    cache_bytes: Callable[[int, int], float] | None = None
    before: tuple[Forward, ...] = ()

    def reading(self, rows: int, *, every: int = 1) -> CycleCost:
        """Return the cost if the target reads only `rows` KV entries, selected once in `every` steps."""
        alone, verify = (replace(one, seen=rows) for one in (self.alone, self.verify))
        before = tuple(replace(one, times=one.times / every) for one in self.before)
        return replace(self, alone=alone, verify=verify, before=before)

    @property
    def forwards(self) -> tuple[Forward, ...]:
        """All forwards of a cycle: scoring, then the draft's, then the target's."""
        return (*self.before, *self.draft, self.verify)


@dataclass(frozen=True)
class PromptShape:
    """A prompt for which the time to first token is predicted.

    Args:
        size: the target.
        tokens: the prompt's length.
        budget: KV entries kept for each layer and KV head.
        draft: a small model of the same vocabulary, for methods that generate with one.
        causal: True if attention counts half of the square.
    """

    size: Sizes
    tokens: int
    budget: int = 128
    draft: Sizes | None = None
    causal: bool = True

    @property
    def prefill(self) -> Work:
        """Return the work of the full cache's prefill."""
        return prefill(self.size, self.tokens, causal=self.causal)


FirstToken = Callable[[Any, PromptShape, Gpu], Mapping[str, float]]
"""(settings, prompt, device) -> metrics by name; `ms` and `..._ms` are milliseconds beyond the prefill's."""


def _usual_step(config: Any, size: Sizes, row: PackedSequence, trained: int, itemsize: int) -> StepCost:
    """Cost of a draft that reads the last layer's K, V and hidden states of whole documents, unchunked."""
    return draft_step(size, row, trained=trained, itemsize=itemsize)


@dataclass(frozen=True)
class MethodCost:
    """The cost functions of a method.

    Args:
        training: (config, target, packed sequence, trained weights, bytes of a number) -> cost of the
            module's step on the packed sequence, without the target's pass.
        cycle: (config, target, widths of the drafted tree, bytes of a number) -> cost of a decoding cycle;
            raises ConfigError if the target is not supported. None: unknown.
        first_token: see `FirstToken`; None: unknown.
        as_built: the metric of `first_token` that matches this implementation.
        note: a note for tables of times to first token, such as the paper's measurement.
        response_tokens: labels at the end of a random sequence in benchmarks; 0: all tokens except the first.
        suite: the suite of `longtrain bench` that measures the training step.
    """

    training: Callable[[Any, Sizes, PackedSequence, int, int], StepCost] = _usual_step
    cycle: Callable[[Any, Sizes, tuple[int, ...], int], CycleCost] | None = None
    first_token: FirstToken | None = None
    as_built: str = "ms"
    note: str = ""
    response_tokens: int = 0
    suite: str = "draft_memory"

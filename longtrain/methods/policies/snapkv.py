"""SnapKV: what the last rows of the prompt attend to stays, and so do they.

Shapes: L layers, B sequences, G KV heads, S prompt slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from longtrain.costs.hardware import Gpu
from longtrain.costs.method import Prompt
from longtrain.costs.model import score
from longtrain.decoding.evict import PromptRun
from longtrain.decoding.observe import LastQueries, observed
from longtrain.methods.policies.base import Policy


@dataclass
class SnapKV(Policy):
    """Attention of the last `window` queries, mean over them and over the heads of a KV head.

    Source: SnapKV (arXiv 2404.14469), Algorithm 1.
    Note: heads are averaged before pooling, as in later comparisons; the mean over rows ranks as the sum.
    """

    name: ClassVar[str] = "snapkv"
    wrappable: ClassVar[bool] = True
    least_window: ClassVar[int] = 1

    def watch(self, lengths: Sequence[int]) -> LastQueries:
        """See `Evictor`: the window's queries."""
        return LastQueries(lengths, self.window)

    @classmethod
    def first_token(cls, prompt: Prompt, gpu: Gpu) -> dict[str, float]:
        """See `BasePolicy`: the window's attention weights on all keys."""
        return {"ms": score(prompt.size, cls.window, prompt.tokens).ms(gpu)}

    def scores(self, run: PromptRun) -> Tensor:
        """See `Scorer`; 0 within the window."""
        assert isinstance(run.watched, LastQueries)
        return observed(run, run.watched)

"""SnapKV and TOVA: keep the last tokens (or the last one) of the prompt and what they attend to most.

Shapes: L layers, B sequences, G KV heads, S prompt positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from longtrain.costs.hardware import Gpu
from longtrain.costs.method import PromptShape
from longtrain.costs.model import score
from longtrain.decoding.evict import PromptRun
from longtrain.decoding.observe import LastQueries, observed
from longtrain.methods.policies.base import Policy
from longtrain.settings import Kernel, Words, within


@dataclass
class SnapKV(Policy):
    """Attention of the last `window` queries, mean over them and over the heads of a KV head.

    Source: SnapKV (arXiv 2404.14469), Algorithm 1.
    Note: heads are averaged before pooling, as in later comparisons; the mean over queries ranks like the
        sum.
    """

    name: ClassVar[str] = "snapkv"
    any_scale: ClassVar[bool] = True
    wrappable: ClassVar[bool] = True
    least_window: ClassVar[int] = 1

    def hook(self, lengths: Sequence[int]) -> LastQueries:
        """Return the observer of the window's queries (see `Evictor`)."""
        return LastQueries(lengths, self.window)

    @classmethod
    def first_token(cls, prompt: PromptShape, gpu: Gpu) -> dict[str, float]:
        """Estimate the window's attention weights on all keys (see `BasePolicy`)."""
        return {"ms": score(prompt.size, cls.window, prompt.tokens).ms(gpu)}

    def scores(self, run: PromptRun) -> Tensor:
        """Return the window's attention (see `Scorer`); 0 within the window."""
        assert isinstance(run.watched, LastQueries)
        return observed(run, run.watched)


@dataclass
class TOVA(Policy):
    """Attention of the last prompt token, with the same tokens kept in every head of a layer.

    Args:
        window: 1: the last token stays. Other values are not TOVA.
        kernel: 1: TOVA does not pool.

    Source: TOVA (arXiv 2401.06104), section 3, applied once after prefill.
    Note: the paper drops one token at each decoding step; here the prompt is cut to the budget at once.
    """

    name: ClassVar[str] = "tova"
    any_scale: ClassVar[bool] = True
    wrappable: ClassVar[bool] = True
    window: Annotated[int, within(1, 1), Words("1 (TOVA looks from the last token)")] = 1
    kernel: Kernel = 1

    def hook(self, lengths: Sequence[int]) -> LastQueries:
        """Return the observer of the last query (see `Evictor`)."""
        return LastQueries(lengths, 1)

    def scores(self, run: PromptRun) -> Tensor:
        """Return the last token's attention (see `Scorer`); equal for all KV heads, 0 at the last token."""
        assert isinstance(run.watched, LastQueries)
        s_LBGS = observed(run, run.watched)
        return s_LBGS.mean(2, keepdim=True).expand_as(s_LBGS).contiguous()

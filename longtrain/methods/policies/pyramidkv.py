"""PyramidKV: SnapKV's scores, with more entries for early layers and fewer for late ones.

Shapes: L layers, B prompts, S prompt positions, G KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from longtrain.decoding.evict import Keep, PromptRun
from longtrain.decoding.select import check_protected, max_pool, top
from longtrain.methods.policies.snapkv import SnapKV
from longtrain.settings import Count


@dataclass
class PyramidKV(SnapKV):
    """Budgets that fall from layer to layer in equal steps; all heads of a layer share one.

    Args:
        beta: steepness: the last layer keeps b // beta entries and its window (b: the budget less the
            window).

    Source: PyramidKV (arXiv 2406.02069), section 4; the integer arithmetic is that of the authors' code.
    Note: integer steps make the total differ a little from layers x budget, in the authors' code too.
    """

    name: ClassVar[str] = "pyramidkv"
    wrappable: ClassVar[bool] = False
    beta: Count = 20

    def choose(self, run: PromptRun, scores: Tensor | None) -> Keep:
        """Keep the best entries up to each layer's budget (see `BasePolicy`)."""
        assert scores is not None
        columns = [
            pyramid(len(scores), self.budget.of(length), length, window=self.window, beta=self.beta)
            for length in run.lengths
        ]
        pooled = max_pool(scores, run.lengths, kernel=self.kernel)
        return top(pooled, run.lengths, list(zip(*columns, strict=True)), protect_last=self.window)


def pyramid(n_layers: int, budget: int, length: int, *, window: int, beta: int) -> list[int]:
    """Return the budget of each layer, first to last, the window included.

    A prompt within the budget keeps everything; one shorter than 2 b (b = budget - window) gets the same in
    every layer; else layer l keeps most - l * step entries and the window, where least = b // beta and
    most = 2 b - least. If the prompt is shorter than that, most is its length without the window and
    least = 2 b - most.

    Raises:
        ConfigError: the budget is below the window.
    """
    if budget >= length:
        return [length] * n_layers
    check_protected(budget, window)
    spare = budget - window
    if length < 2 * spare or n_layers == 1:
        return [budget] * n_layers
    least = spare // beta
    most = 2 * spare - least
    if most >= length - window:
        most = length - window
        least = 2 * spare - most
    step = (most - least) // (n_layers - 1)
    return [most - layer * step + window for layer in range(n_layers)]

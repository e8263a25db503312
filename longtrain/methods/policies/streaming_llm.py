"""StreamingLLM: the first few rows and the most recent ones.

Shapes: L layers, B sequences, G KV heads, S prompt slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from longtrain.decoding.evict import Keep, PromptRun
from longtrain.decoding.select import top
from longtrain.methods.policies.base import BasePolicy
from longtrain.settings import CountOrZero


@dataclass
class StreamingLLM(BasePolicy):
    """Attention sinks and a sliding window, cut once after the prompt.

    Args:
        sinks: rows at the start of each prompt that stay.

    Raises:
        ConfigError: fewer than 0 sinks.

    Source: StreamingLLM (arXiv 2309.17453) §3.2.
    Note: the paper numbers positions within the cache; here rows keep their own, as in later comparisons.
    """

    sinks: CountOrZero = 4
    name: ClassVar[str] = "streaming_llm"

    @property
    def least_budget(self) -> int:
        """See `BasePolicy`: the sinks."""
        return max(1, self.sinks)

    def choose(self, run: PromptRun, scores: Tensor | None) -> Keep:
        """See `BasePolicy`: the later a row, the better."""
        info, S = run.target.info, max(run.lengths)
        age_S = torch.arange(S, device=run.tokens_BS.device, dtype=torch.float32)
        s_LBGS = age_S.expand(info.n_layers, len(run.lengths), info.n_kv_heads, S)
        return top(s_LBGS, run.lengths, self.budget, protect_first=self.sinks)

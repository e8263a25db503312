"""Policies that use no attention: StreamingLLM (first and newest tokens) and random tokens.

Shapes: L layers, B sequences, G KV heads, S prompt positions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from longtrain.decoding.evict import Keep, PromptRun
from longtrain.decoding.select import top
from longtrain.methods.policies.base import BasePolicy, Policy
from longtrain.settings import CountOrZero, Kernel


@dataclass
class StreamingLLM(BasePolicy):
    """Attention sinks and a sliding window, cut once after the prompt.

    Args:
        sinks: first tokens of each prompt, which stay.

    Raises:
        ConfigError: fewer than 0 sinks.

    Source: StreamingLLM (arXiv 2309.17453) §3.2.
    Note: the paper numbers positions within the cache; here entries keep their own, as in later comparisons.
    """

    sinks: CountOrZero = 4
    name: ClassVar[str] = "streaming_llm"
    any_scale: ClassVar[bool] = True

    @property
    def least_budget(self) -> int:
        """Smallest budget, the sinks (see `BasePolicy`)."""
        return max(1, self.sinks)

    def choose(self, run: PromptRun, scores: Tensor | None) -> Keep:
        """Keep the sinks and the newest tokens (see `BasePolicy`)."""
        info, S = run.target.info, max(run.lengths)
        age_S = torch.arange(S, device=run.tokens_BS.device, dtype=torch.float32)
        s_LBGS = age_S.expand(len(run.layers), len(run.lengths), info.n_kv_heads, S)
        return top(s_LBGS, run.lengths, self.budget, protect_first=self.sinks)


@dataclass
class Random(Policy):
    """Tokens drawn uniformly, independently in each layer and KV head, plus the last `window` tokens.

    A prompt's draw depends on its tokens and the seed alone: the same in any batch and on any device.

    Args:
        kernel: 1: draws are not pooled.
        seed: seed of the draws.
    """

    name: ClassVar[str] = "random"
    any_scale: ClassVar[bool] = True
    wrappable: ClassVar[bool] = True
    kernel: Kernel = 1
    seed: int = 0

    def scores(self, run: PromptRun) -> Tensor:
        """Return uniform draws from [0, 1): s_LBGS in fp32; 0 beyond a prompt."""
        info = run.target.info
        tokens = run.tokens_BS.tolist()
        shape = (len(run.layers), info.n_kv_heads)
        s_LBGS = torch.zeros(len(run.layers), len(tokens), info.n_kv_heads, run.tokens_BS.shape[1])
        for seq, length in enumerate(run.lengths):
            text = f"{self.seed}:{tokens[seq][:length]}".encode()
            seed = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
            rng = torch.Generator().manual_seed(seed)
            s_LBGS[:, seq, :, :length] = torch.rand(*shape, length, generator=rng)
        return s_LBGS.to(run.tokens_BS.device)

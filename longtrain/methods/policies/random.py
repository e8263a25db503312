"""Random eviction: the floor under every policy.

Shapes: L layers, B prompts, S prompt slots, G KV heads.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from longtrain.decoding.evict import PromptRun
from longtrain.methods.policies.base import Policy
from longtrain.settings import Kernel


@dataclass
class Random(Policy):
    """Rows drawn evenly, each layer and KV head for itself, plus the last `window` rows.

    A prompt's draw depends on its tokens and the seed alone: the same in any batch and on any device.

    Args:
        kernel: 1, that is none: draws are not pooled.
        seed: the seed of the draws.
    """

    name: ClassVar[str] = "random"
    wrappable: ClassVar[bool] = True
    kernel: Kernel = 1
    seed: int = 0

    def scores(self, run: PromptRun) -> Tensor:
        """Even draws from [0, 1): s_LBGS in fp32; 0 beyond a prompt."""
        info = run.target.info
        tokens = run.tokens_BS.tolist()
        shape = (info.n_layers, info.n_kv_heads)
        s_LBGS = torch.zeros(info.n_layers, len(tokens), info.n_kv_heads, run.tokens_BS.shape[1])
        for seq, length in enumerate(run.lengths):
            text = f"{self.seed}:{tokens[seq][:length]}".encode()
            seed = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
            coins = torch.Generator().manual_seed(seed)
            s_LBGS[:, seq, :, :length] = torch.rand(*shape, length, generator=coins)
        return s_LBGS.to(run.tokens_BS.device)

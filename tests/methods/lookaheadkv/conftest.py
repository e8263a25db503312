"""Small targets, modules with weights that matter, and packed rows of prompts and responses."""

from __future__ import annotations

import pytest
import torch

from longtrain.data.packing.batch import Batch
from longtrain.methods.lookaheadkv.config import Config
from longtrain.methods.lookaheadkv.modules import LookaheadKV
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES

_KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
_WINDOW = {"num_hidden_layers": 5, "layer_types": _KINDS, "sliding_window": 8}
WINDOWS = {
    "gemma3": {**SHAPES["gemma3_micro"], **_WINDOW, "query_pre_attn_scalar": 20},
    "windows of 3": {**SHAPES["qwen3_micro"], **_WINDOW, "sliding_window": 3, "use_sliding_window": True},
}
"""Targets with windows: of more tokens than the lookahead tokens, and of fewer."""


@pytest.fixture
def three_layers():
    """(family, dtype) -> a random target of three layers with grouped heads and sharp attention."""

    def make(family="llama", dtype=torch.float64, seed=1):
        shape = WINDOWS.get(family) or {**SHAPES[f"{family}_micro"], "num_hidden_layers": 3}
        target, gen = random_target(shape, seed=seed, dtype=dtype), torch.Generator().manual_seed(6)
        with torch.no_grad():
            for name, value in target.model.named_parameters():
                if name.endswith("bias"):
                    value.normal_(0, 0.1)
                elif name.endswith("norm.weight") and family in WINDOWS:
                    value.add_(0.2 * torch.randn(value.shape, generator=gen, dtype=value.dtype))
                elif value.dim() == 2 and ("q_proj" in name or "k_proj" in name):
                    value.mul_(2)  # a uniform attention would hide faults
        return target

    return make


@pytest.fixture
def make_module():
    """A module whose LoRA is not zero."""

    def make(target, config=None, dtype=torch.float64) -> LookaheadKV:
        module = LookaheadKV(config or Config(n_lookahead=5, lora_rank=3), target.info).to(dtype)
        gen = torch.Generator().manual_seed(5)
        for name, p in module.state_dict().items():
            size = 0.3 if "embeddings" not in name else 1.0
            p.copy_(size * torch.randn(p.shape, generator=gen, dtype=torch.float64))
        return module

    return make


@pytest.fixture
def make_batch():
    """A packed row of (prompt, response) lengths; a response of 0 is a document without labels."""

    def make(target, pairs, *, seed=3) -> Batch:
        gen = torch.Generator().manual_seed(seed)
        bounds = [0]
        for pair in pairs:
            bounds.append(bounds[-1] + sum(pair))
        ids = torch.randint(2, target.info.vocab_size, (bounds[-1],), generator=gen)
        learn = torch.zeros(bounds[-1], dtype=torch.bool)
        for (prompt, response), start in zip(pairs, bounds, strict=False):
            learn[start + prompt : start + prompt + response] = True
        documents = sum(response > 0 for _, response in pairs)
        return Batch(
            ids,
            tuple(bounds),
            learn,
            seed=seed,
            tokens_in_step=int(learn.sum()),
            documents_in_step=documents,
            names=tuple(f"doc{i}" for i in range(len(pairs))),
        )

    return make

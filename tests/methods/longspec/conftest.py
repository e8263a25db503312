"""Small targets, and drafts for the LongSpec tests."""

from __future__ import annotations

import pytest
import torch

from longtrain.methods.longspec.config import Config
from longtrain.methods.longspec.modules import LongSpecDraft
from longtrain.targets.loading import random_target


@pytest.fixture(params=["llama_micro", "qwen3_micro", "qwen2_micro"])
def target(request):
    return random_target(request.param, seed=1, dtype=torch.float64, device="cpu")


@pytest.fixture
def llama():
    return random_target("llama_micro", seed=1, dtype=torch.float64, device="cpu")


@pytest.fixture
def make_draft():
    """A random draft with weights large enough that every attention matters."""

    def make(target, config: Config | None = None, dtype=torch.float64) -> LongSpecDraft:
        draft = LongSpecDraft(config or Config(), target.info).to(dtype)
        gen = torch.Generator().manual_seed(5)
        for name, p in draft.named_parameters():
            noise = torch.randn(p.shape, generator=gen, dtype=torch.float64)
            p.data = (1 + 0.2 * noise if "norm" in name else noise * 0.25).to(dtype)
        return draft

    return make

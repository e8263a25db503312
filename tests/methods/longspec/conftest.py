"""Small targets, and drafts for the LongSpec tests."""

from __future__ import annotations

import pytest
import torch

from longtrain.methods.longspec.config import Config
from longtrain.methods.longspec.modules import LongSpecDraft
from longtrain.targets.loading import random_target
from tests.helpers import noisy


@pytest.fixture(params=["llama_micro", "qwen3_micro", "qwen2_micro", "gemma3_micro"])
def target(request):
    return random_target(request.param, seed=1, dtype=torch.float64, device="cpu")


@pytest.fixture
def llama():
    return random_target("llama_micro", seed=1, dtype=torch.float64, device="cpu")


@pytest.fixture
def make_draft():
    """A random draft with weights large enough that every attention matters."""

    def make(target, config: Config | None = None, dtype=torch.float64) -> LongSpecDraft:
        return noisy(LongSpecDraft(config or Config(), target.info).to(dtype))

    return make

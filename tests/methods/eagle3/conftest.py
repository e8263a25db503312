"""Small targets, and drafts for the EAGLE-3 tests."""

from __future__ import annotations

import pytest
import torch

from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.modules import Eagle3Draft
from longtrain.targets.loading import random_target


@pytest.fixture
def llama():
    return random_target("llama_micro", seed=1, dtype=torch.float64, device="cpu")


@pytest.fixture
def make_draft():
    """A random draft with weights large enough that every part matters, over some of the tokens."""

    def make(target, config: Config, dtype=torch.float64) -> Eagle3Draft:
        draft = Eagle3Draft(config, target.info).to(dtype)
        gen = torch.Generator().manual_seed(5)
        for name, p in draft.named_parameters():
            noise = torch.randn(p.shape, generator=gen, dtype=torch.float64)
            p.data = (1 + 0.2 * noise if "norm" in name else noise * 0.25).to(dtype)
        if config.draft_vocab_size:
            some = torch.randperm(target.info.vocab_size, generator=gen)[: config.draft_vocab_size]
            draft.draft_ids_K.copy_(some.sort().values)
        return draft

    return make

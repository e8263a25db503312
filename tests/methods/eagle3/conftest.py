"""Small targets, and drafts for the EAGLE-3 tests."""

from __future__ import annotations

import pytest
import torch

from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.modules import Eagle3Draft
from longtrain.targets.loading import random_target
from tests.helpers import noisy


@pytest.fixture
def llama():
    return random_target("llama_micro", seed=1, dtype=torch.float64, device="cpu")


@pytest.fixture
def make_draft():
    """A random draft with weights large enough that every part matters, over some of the tokens."""

    def make(target, config: Config, dtype=torch.float64) -> Eagle3Draft:
        draft = noisy(Eagle3Draft(config, target.info).to(dtype))
        gen = torch.Generator().manual_seed(7)
        if config.draft_vocab_size:
            some = torch.randperm(target.info.vocab_size, generator=gen)[: config.draft_vocab_size]
            draft.draft_ids_K.copy_(some.sort().values)
        return draft

    return make

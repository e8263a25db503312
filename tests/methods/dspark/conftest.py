"""Small targets, and drafts for the DSpark tests."""

from __future__ import annotations

import pytest
import torch

from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.mask_token import choose_mask_token
from longtrain.methods.dspark.modules import DSparkDraft
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from tests.helpers import noisy


@pytest.fixture
def llama():
    """Four layers, so that a draft reads several below the last."""
    shape = {**SHAPES["llama_micro"], "num_hidden_layers": 4}
    return random_target(shape, seed=1, dtype=torch.float64, device="cpu")


@pytest.fixture
def make_draft():
    """A random draft with weights large enough that every part matters."""

    def make(target, config: Config, dtype=torch.float64) -> DSparkDraft:
        draft = noisy(DSparkDraft(config, target.info).to(dtype))
        choose_mask_token(draft, target, config)
        if draft.draft_ids_K is not None:
            gen, size = torch.Generator().manual_seed(5), len(draft.draft_ids_K)
            draft.draft_ids_K.copy_(
                torch.randperm(target.info.vocab_size, generator=gen)[:size].sort().values
            )
        return draft

    return make

"""On a GPU: flash attention gives the gradient of the masked twin, and a step waits for nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longtrain.kernels.attention import flash
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.objective import Eagle3Objective
from longtrain.targets.loading import random_target
from tests.methods.drafts import check_gradients_in_bf16

pytestmark = pytest.mark.gpu
CONFIG = Config(layers=[0, 1], draft_vocab_size=31, intermediate_size=40, chunk_tokens=32)


@pytest.mark.parametrize("keys", [{}, {"window": 9, "sinks": 2}], ids=["all keys", "window and sinks"])
def test_training_in_bf16_is_close_to_fp64_and_does_not_wait(make_draft, make_batch, monkeypatch, keys):
    monkeypatch.setattr(flash, "BLOCK", 16)  # a chunk's prefix is gone over in blocks
    config = replace(CONFIG, **keys)
    exact = random_target("llama_micro", seed=1, dtype=torch.float64, device="cpu")
    batch = make_batch(exact, [70, 3, 90, 1])
    check_gradients_in_bf16(make_draft, Eagle3Objective, exact, config, batch)

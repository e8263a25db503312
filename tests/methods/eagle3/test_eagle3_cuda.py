"""On a GPU: flash attention gives the gradient of the masked twin, and a step waits for nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longtrain.kernels.attention import flash
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.objective import Eagle3Objective
from longtrain.targets.loading import random_target

pytestmark = pytest.mark.gpu
CONFIG = Config(layers=[0, 1], draft_vocab_size=31, intermediate_size=40, chunk_tokens=32)


@pytest.mark.parametrize("keys", [{}, {"window": 9, "sinks": 2}], ids=["all keys", "window and sinks"])
def test_training_in_bf16_is_close_to_fp64_and_does_not_wait(make_draft, make_batch, monkeypatch, keys):
    monkeypatch.setattr(flash, "BLOCK", 16)  # a chunk's prefix is gone over in blocks
    config = replace(CONFIG, **keys)
    exact = random_target("llama_micro", seed=1, dtype=torch.float64, device="cpu")
    half = random_target("llama_micro", seed=1, dtype=torch.float64, device="cpu").bfloat16().cuda()
    batch = make_batch(exact, [70, 3, 90, 1])
    outputs = make_draft(exact, config)
    Eagle3Objective(outputs, exact, config)(batch).total.backward()
    truth = torch.cat([p.grad.flatten() for p in outputs.parameters()])

    def distance(chunk):
        draft = make_draft(exact, config, torch.float32).cuda()
        objective = Eagle3Objective(draft, half, replace(config, chunk_tokens=chunk))
        moved = batch.to("cuda", non_blocking=True)
        for guarded in (False, True):  # the first pass compiles and caches
            draft.zero_grad()
            torch.cuda.set_sync_debug_mode("error" if guarded else "default")
            try:
                with torch.autocast("cuda", torch.bfloat16):
                    loss = objective(moved)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            loss.total.backward()
        got = torch.cat([p.grad.flatten() for p in draft.parameters()]).double().cpu()
        return float((got - truth).norm() / truth.norm())

    whole, chunked = distance(0), distance(32)
    assert whole < 0.3
    assert chunked <= 1.2 * whole

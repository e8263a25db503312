"""On a GPU: nothing waits for the device, and flash attention gives the same draft."""

from __future__ import annotations

import pytest
import torch

from longtrain.decoding.roles import ChildChoice
from longtrain.methods.longspec.config import Config
from longtrain.methods.longspec.objective import LongSpecObjective
from longtrain.methods.longspec.runtime import LongSpecRuntime
from longtrain.targets.loading import random_target
from tests.methods.drafts import check_drafting_on_both_devices, check_gradients_in_bf16, on

pytestmark = pytest.mark.gpu
CONFIG = Config(window=12, chunk_tokens=32)


def test_training_in_bf16_is_close_to_fp64_and_does_not_wait(make_draft, make_batch):
    exact = random_target("llama_micro", seed=1, dtype=torch.float64, device="cpu")
    batch = make_batch(exact, [70, 3, 90, 1])
    check_gradients_in_bf16(make_draft, LongSpecObjective, exact, CONFIG, batch)


@pytest.mark.parametrize("children", [ChildChoice.POINT, ChildChoice.IID])
def test_drafting_does_not_wait_and_equals_the_cpu(make_draft, children):
    def runtime_of(target, device):
        return LongSpecRuntime(make_draft(target, CONFIG, torch.float32).to(device), target, CONFIG)

    check_drafting_on_both_devices(on("llama_micro"), runtime_of, children)

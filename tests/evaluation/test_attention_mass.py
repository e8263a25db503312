from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from longtrain.evaluation.suites.acceptance import MASS_ROWS, SINKS, attention_mass
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import shape_config


@pytest.mark.parametrize("shape", ["llama_micro", "qwen3_micro"])
@pytest.mark.parametrize("layer", [0, -1])
def test_it_is_what_eager_attention_says(shape, layer):
    target = random_target(shape, seed=2)
    for name, tensor in target.model.named_parameters():
        if "q_proj" in name or "k_proj" in name or "norm" in name:
            tensor.data.mul_(4)
    eager = AutoModelForCausalLM.from_config(shape_config(shape), attn_implementation="eager")
    eager.load_state_dict(target.model.state_dict())
    prompt = torch.randint(97, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    found = attention_mass(target, prompt, layer=layer, window=20)
    with torch.no_grad():
        maps = eager.eval()(torch.tensor([prompt]), output_attentions=True).attentions[layer]
    outside = no_sinks = 0.0
    for row in range(60 - MASS_ROWS, 60):
        outside += float(maps[:, :, row, : row - 20].sum(-1).mean()) / MASS_ROWS
        no_sinks += float(maps[:, :, row, SINKS : row - 20].sum(-1).mean()) / MASS_ROWS
    assert found["outside"] == pytest.approx(outside, abs=1e-5)
    assert found["outside_no_sinks"] == pytest.approx(no_sinks, abs=1e-5)
    assert 0.1 < found["outside"] < 0.9


def test_a_window_over_everything_leaves_nothing_outside():
    target = random_target("llama_micro")
    assert attention_mass(target, [1, 2, 3] * 10, layer=-1, window=64)["outside"] == 0

"""Views on a GPU: the kernels that serve there give what the CPU's reference gives."""

from __future__ import annotations

import copy

import pytest
import torch
from test_views import SHAPE, row_of

from longtrain.methods.viewed import viewed
from longtrain.methods.views import draw, views_of
from longtrain.targets.loading import random_target
from longtrain.targets.step import Want

VIEWS = ({"cache": "int4"}, {"cache": "int8"}, {"policy": "streaming_llm", "budget": 0.3})


@pytest.mark.gpu
@pytest.mark.parametrize("entry", VIEWS, ids=str)
def test_documents_in_a_view_on_a_gpu(entry):
    """In bf16 against fp32; a policy that looks at nothing keeps the same rows on both."""
    exact = random_target(SHAPE, seed=2, dtype=torch.float32)
    half = copy.deepcopy(exact).to("cuda", torch.bfloat16)
    batch, (view,) = row_of([420, 60, 700], prompts=[300, 0, 350]), views_of([entry])
    drawn = {d: one for d, one in draw([view], batch).items() if d != 1}
    want, pos_T = Want("none", (0, -1), kv=(1,)), torch.cat([torch.arange(n) for n in (420, 60, 700)])
    cpu, seen = viewed(exact, batch, pos_T, want, drawn)
    gpu, other = viewed(half, batch.to("cuda"), pos_T.cuda(), want, drawn)
    for d, one in seen.items():
        assert other[d].stretches == one.stretches
        old = max(stretch.old for stretch in one.stretches)
        for heads, found in zip(one.old[1], other[d].old[1], strict=True):
            for expected, got in zip(heads, found, strict=True):
                close(got[:old], expected[:old])
    for layer in want.hidden:
        close(gpu.hidden[layer], cpu.hidden[layer])
    for expected, got in zip(cpu.kv[1], gpu.kv[1], strict=True):
        close(got, expected)


def close(got, expected):
    """Within what bf16 rounds, and a code of 4 bits that falls on the other side."""
    assert got.shape == expected.shape
    error = (got.float().cpu() - expected).norm() / expected.norm()
    assert error < 0.1, float(error)

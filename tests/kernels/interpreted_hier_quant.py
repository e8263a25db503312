"""Run by test_hier_quant.py under TRITON_INTERPRET=1: the kernel's bytes are the twin's."""

import pytest
import torch
from hier_cases import planes_of, ring_of, rows, same, strided

from longtrain.kernels import hier_quant, hier_quant_reference
from longtrain.kernels.hier_layout import Split

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("dim", [64, 128])
def test_prompts(split, dim):
    for dtype in DTYPES if dim == 64 else DTYPES[:1]:
        k, v = (strided(rows(2, 2, 300, dim, seed=seed, dtype=dtype)) for seed in (3, 4))
        v[0, 1, 7] = 0  # a token of nothing
        count_B = torch.tensor([2, 1])
        mine, want = planes_of(split, dim=dim), planes_of(split, dim=dim)
        assert hier_quant.kernel_serves(k)
        hier_quant.quantise_blocks(k, v, mine.layer(0), count_B)
        first_B = torch.zeros_like(count_B)
        hier_quant_reference.quantise_blocks(k[:, :, :256], v[:, :, :256], want.layer(0), first_B, count_B)
        assert same(mine, want) == []
        assert not mine.k_step[0, 1, :, 1:].any() and mine.k_step[0, 0, :, 1].all()


def test_flush():
    ring = ring_of(2, 3, 1, 64)
    block_B, due_B = torch.tensor([0, 1, 2]), torch.tensor([True, False, True])
    mine = planes_of(Split.FLOOR, layers=2, batch=3, heads=1)
    hier_quant.flush_blocks(ring, mine, block_B, due_B)
    want = planes_of(Split.FLOOR, layers=2, batch=3, heads=1)
    for layer in range(2):
        for b, block in ((0, 0), (2, 2)):
            k, v = (x[layer][:, :, 128 * block : 128 * block + 128] for x in (ring.k, ring.v))
            one_B = torch.zeros(3, dtype=torch.int64)
            one_B[b] = 1
            hier_quant_reference.quantise_blocks(k, v, want.layer(layer), one_B * block, one_B)
    assert same(mine, want) == []

"""Linear layers for few rows: plain torch, the interpreted kernel, and what only a GPU can show."""

import os

import pytest
import small_linear_cases as small_linear_reference
import torch
from small_linear_cases import CLOSE, made
from torch.nn.functional import linear, silu

from longtrain.kernels import small_linear

BF16 = torch.bfloat16


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreted kernel serves a CPU")
def test_plain_torch_elsewhere():
    x, weight, add = made(3, 32), made(10, 32, seed=1), made(10, seed=2)
    assert not small_linear.serves(x, weight)
    assert torch.equal(small_linear.small_linear(x, weight, residual=add), linear(x, weight) + add)
    gate, up = linear(x, weight).split(5, -1)
    assert torch.equal(small_linear.small_swiglu(x, weight), silu(gate) * up)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 384), (192, 704), (97 * 2, 48), (4096, 4096)])
@pytest.mark.parametrize("rows", [1, 8, 11])
def test_the_kernel_on_a_gpu(shape, rows):
    F, K = shape
    x, weight = made(rows, K, dtype=BF16, device="cuda"), made(F, K, dtype=BF16, seed=1, device="cuda")
    add = made(rows, F, dtype=BF16, seed=2, device="cuda")
    assert small_linear.serves(x, weight)
    for name, options in (("small_linear", {}), ("small_linear", {"residual": add}), ("small_swiglu", {})):
        got = getattr(small_linear, name)(x, weight, **options)
        wide = {key: value.double() for key, value in options.items()}
        expected = getattr(small_linear_reference, name)(x.double(), weight.double(), **wide)
        assert float((got - expected).norm() / expected.norm()) < CLOSE[BF16] / 2


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(6144, 4096), (1024, 14336), (512, 384)])
def test_a_row_alone_gives_the_same_bits(shape):
    F, K = shape
    x, weight = made(16, K, dtype=BF16, device="cuda"), made(F, K, dtype=BF16, seed=1, device="cuda")
    whole = small_linear.small_linear(x, weight), small_linear.small_swiglu(x, weight)
    for rows in (1, 3, 8, 9):
        part = (small_linear.small_linear(x[:rows], weight), small_linear.small_swiglu(x[:rows], weight))
        assert all(torch.equal(a, b[:rows]) for a, b in zip(part, whole, strict=True))

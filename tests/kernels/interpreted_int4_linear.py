"""Run by test_interpreted.py under TRITON_INTERPRET=1: the kernel against the written-out weights."""

import pytest
import torch
from small_linear_cases import made
from torch import nn
from torch.nn.functional import linear, silu

from longtrain.kernels.int4_linear import Int4Linear, written_out
from longtrain.kernels.int4_linear.kernel import Int4Tile, small_linear

TILES = (Int4Tile(32, 8), Int4Tile(16, 2, held=1, groups=2, stages=2), Int4Tile(64, 1, held=0, rows=8))


def layer_of(features, inputs, group, *, bias=False):
    torch.manual_seed(features)
    return Int4Linear(nn.Linear(inputs, features, bias=bias).requires_grad_(False), group)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.lines}x{tile.slices}")
@pytest.mark.parametrize(("features", "inputs", "group"), [(40, 256, 128), (97, 96, 32), (32, 320, 64)])
def test_product(tile, features, inputs, group):
    """Also where tiles and slices do not fit."""
    layer = layer_of(features, inputs, group)
    weight = written_out(layer.codes, layer.table, torch.float32)[:features]
    for rows in (1, 5, 16):
        x, add = made(rows, inputs), made(rows, features, seed=1)
        got = small_linear(x, layer.codes, layer.table, add, features=features, tile=tile)
        torch.testing.assert_close(got, linear(x, weight) + add, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tile", [Int4Tile(32, 4), Int4Tile(16, 2)], ids=lambda tile: str(tile.lines))
def test_gates(tile):
    layer, x = layer_of(80, 128, 32), made(3, 128)
    weight = written_out(layer.codes, layer.table, torch.float32)
    got = small_linear(x, layer.codes, layer.table, None, features=40, gated=True, tile=tile)
    gate, up = linear(x, weight).chunk(2, -1)
    torch.testing.assert_close(got, silu(gate) * up, rtol=1e-4, atol=1e-4)


def test_a_layer_goes_through_the_kernel():
    """Of any shape, more rows than one launch takes, biases and residuals."""
    layer = layer_of(48, 64, 32, bias=True)
    weight = written_out(layer.codes, layer.table, torch.float32)
    x, residual = made(3, 7, 64), made(3, 7, 48, seed=1)
    want = linear(x, weight, layer.bias)
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer(x, residual), want + residual, rtol=1e-4, atol=1e-4)
    assert not torch.equal(layer(x), want), "the kernel sums in another order"

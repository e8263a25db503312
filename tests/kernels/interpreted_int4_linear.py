"""Run by test_interpreted.py under TRITON_INTERPRET=1: the kernel with its machine text."""

import pytest
import torch
import warp_emulator
from small_linear_cases import made
from torch import nn
from torch.nn.functional import linear, silu

from longtrain.kernels.int4_linear import Int4Linear
from longtrain.kernels.int4_linear.kernel import Int4Tile, small_linear

TILES = (Int4Tile(4, 2), Int4Tile(1, 3), Int4Tile(2, 1))


@pytest.fixture(autouse=True)
def machine_text(monkeypatch):
    warp_emulator.install(monkeypatch)


def layer_of(features, inputs, group, *, bias=False):
    torch.manual_seed(features)
    return Int4Linear(nn.Linear(inputs, features, bias=bias).requires_grad_(False), group)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.warps} warps")
@pytest.mark.parametrize(
    ("features", "inputs", "group"), [(40, 256, 128), (97, 96, 32), (32, 320, 64), (64, 2048, 128)]
)
def test_product(tile, features, inputs, group):
    """Also where lines, steps and tiles do not fit. The input is exact in bf16."""
    layer = layer_of(features, inputs, group)
    weight = layer.written_out(torch.float32)
    for rows in (1, 5, 16):
        x, add = made(rows, inputs).bfloat16(), made(rows, features, seed=1)
        out = small_linear(x, layer.codes, layer.table, add, features=features, tile=tile)
        want = linear(x.float(), weight).bfloat16().float() + add
        torch.testing.assert_close(out.float(), want, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.warps} warps")
def test_gates(tile):
    layer, x = layer_of(80, 128, 32), made(3, 128).bfloat16()
    got = small_linear(x, layer.codes, layer.table, None, features=40, gated=True, tile=tile)
    gate, up = linear(x.float(), layer.written_out(torch.float32)).chunk(2, -1)
    torch.testing.assert_close(got.float(), silu(gate) * up, rtol=2**-6, atol=2**-6)


def test_rows_that_kernels_choose_tiles_for():
    """One to sixteen rows by the tile that a launch chooses; columns hold 8, 4 and 2 units, or one."""
    layer, x = layer_of(48, 1152, 64), made(16, 1152).bfloat16()
    want = linear(x.float(), layer.written_out(torch.float32))
    for rows in (1, 2, 3, 4, 8, 16):
        got = small_linear(x[-rows:], layer.codes, layer.table, None, features=48)
        torch.testing.assert_close(got.float(), want[-rows:], rtol=2**-7, atol=2**-7)

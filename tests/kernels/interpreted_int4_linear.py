"""Run by test_interpreted.py under TRITON_INTERPRET=1: the kernel with its machine text."""

import pytest
import torch
import warp_emulator
from small_linear_cases import among_nan, made
from torch import nn
from torch.nn.functional import linear, silu

from longtrain.kernels.int4_linear import Int4Linear, kernel
from longtrain.kernels.int4_linear.kernel import Int4Tile, small_linear

TILES = (Int4Tile(4, 2), Int4Tile(1, 3), Int4Tile(2, 1))


@pytest.fixture(autouse=True)
def machine_text(monkeypatch):
    warp_emulator.install(monkeypatch)


def layer_of(features, inputs, group, *, bias=False):
    torch.manual_seed(features)
    return Int4Linear(nn.Linear(inputs, features, bias=bias).requires_grad_(False), group)


@pytest.mark.parametrize(
    ("tile", "features", "inputs", "group"),
    [
        *((tile, 97, 96, 32) for tile in TILES),
        (TILES[0], 40, 256, 128),
        (TILES[1], 8, 96, 32),
        (TILES[2], 32, 320, 64),
        (TILES[0], 24, 448, 64),
        (TILES[1], 16, 2048, 128),
    ],
)
def test_product(tile, features, inputs, group):
    """Also where lines, steps, tiles and units do not fit. The input is exact in bf16."""
    layer = layer_of(features, inputs, group)
    weight = layer.written_out(torch.float32)
    for rows in (5, 16):
        x, add = among_nan(made(rows, inputs).bfloat16()), made(rows, features, seed=1)
        out = small_linear(x, layer.codes, layer.table, add, features=features, tile=tile)
        expected = linear(x.float(), weight).bfloat16().float() + add
        torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.warps} warps")
def test_gates(tile):
    layer, x = layer_of(80, 128, 32), made(3, 128).bfloat16()
    got = small_linear(x, layer.codes, layer.table, None, features=40, gated=True, tile=tile)
    gate, up = linear(x.float(), layer.written_out(torch.float32)).chunk(2, -1)
    torch.testing.assert_close(got.float(), silu(gate) * up, rtol=2**-6, atol=2**-6)


def test_rows_that_kernels_choose_tiles_for():
    """One to sixteen rows by the tile that a launch chooses; columns hold 8, 4 and 2 units, or one."""
    layer, x = layer_of(48, 1152, 64), made(16, 1152).bfloat16()
    expected = linear(x.float(), layer.written_out(torch.float32))
    for rows in (1, 2, 3, 4, 8, 16):
        got = small_linear(x[-rows:], layer.codes, layer.table, None, features=48)
        torch.testing.assert_close(got.float(), expected[-rows:], rtol=2**-7, atol=2**-7)


@pytest.fixture
def launches(monkeypatch):
    """What is launched while layers take a CPU for a GPU: rows of each launch."""
    found = []

    def counted(x, *of, **how):
        found.append(len(x))
        return small_linear(x, *of, **how)

    monkeypatch.setattr("longtrain.kernels.int4_linear.compiles_for", lambda device: True)
    monkeypatch.setattr(kernel, "small_linear", counted)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_goes_through_the_kernel(launches, dtype):
    """Inputs of any shape, more rows than a launch takes, a bias, a residual, and gates."""
    layer, x = layer_of(48, 192, 64, bias=True), made(3, 7, 192, dtype=dtype)
    residual = made(3, 7, 48, dtype=dtype, seed=1)
    close = {"rtol": 2**-6, "atol": 2**-6}
    expected = linear(x.float(), layer.written_out(torch.float32), layer.bias)
    for got, whole in ((layer(x), expected), (layer(x, residual), expected + residual.float())):
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), whole, **close)
    assert launches == [16, 5] * 2
    gates = Int4Linear.joined([layer_of(32, 192, 64), layer_of(32, 192, 64)])
    gate, up = linear(x.float(), gates.written_out(torch.float32)).chunk(2, -1)
    torch.testing.assert_close(gates.swiglu(x).float(), silu(gate) * up, **close)
    assert launches == [16, 5] * 3


def test_a_layer_whose_kernel_is_laid_out_otherwise_writes_its_weights_out(launches, monkeypatch):
    monkeypatch.setattr(kernel, "laid_out", lambda built, warps: False)
    layer, x = layer_of(48, 192, 64, bias=True), made(18, 192).bfloat16()
    expected = linear(x, layer.written_out(torch.bfloat16), layer.bias.bfloat16())
    assert torch.equal(layer(x), expected) and launches

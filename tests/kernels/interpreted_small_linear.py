"""Run by test_interpreted.py under TRITON_INTERPRET=1: the kernel against its twin."""

import pytest
import small_linear_cases as small_linear_reference
import torch
from small_linear_cases import CLOSE, made

from longtrain.kernels import small_linear
from longtrain.kernels.small_linear import kernel as small_linear_launch
from longtrain.kernels.small_linear.kernel import LinearTile

TILES = (
    LinearTile(32, 2, step=32, stages=2),
    LinearTile(16, 4, step=16),
    LinearTile(64, 1, step=32),
    LinearTile(8, 8, step=16),
)


@pytest.mark.corners
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.outputs}x{tile.slices}")
@pytest.mark.parametrize(("rows", "features"), [(1, 70), (5, 64), (16, 70)])
def test_product(tile, rows, features):
    """Also where tiles and slices do not fit: 70 outputs, 144 inputs."""
    for dtype in (torch.float32, torch.float16):
        x, weight = made(rows, 144, dtype=dtype), made(features, 160, dtype=dtype, seed=1)[:, :144]
        assert small_linear.serves(x, weight)
        residuals = (
            made(rows, features, dtype=dtype, seed=2),
            made(features, dtype=dtype, seed=3),
            None,
        )
        for residual in residuals if dtype == torch.float32 else residuals[:1]:
            got = small_linear_launch.small_linear(x, weight, residual, tile=tile)
            expected = small_linear_reference.small_linear(x, weight, residual=residual)
            torch.testing.assert_close(got, expected, rtol=CLOSE[dtype], atol=12 * CLOSE[dtype])


@pytest.mark.parametrize("tile", [LinearTile(32, 1, step=32), LinearTile(8, 4, step=16)])
def test_gates(tile):
    x, weight = made(3, 96), made(80, 96, seed=1)
    got = small_linear_launch.small_swiglu(x, weight, tile=tile)
    expected = small_linear_reference.small_swiglu(x, weight)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


def test_dispatch():
    x, weight = made(2, 128), made(48, 128, seed=1)
    for name in ("small_linear", "small_swiglu"):
        got, expected = (getattr(where, name)(x, weight) for where in (small_linear, small_linear_reference))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)

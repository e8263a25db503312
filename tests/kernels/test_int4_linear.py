"""4-bit weights: their codes, their error, and the product."""

import pytest
import torch
from small_linear_cases import among_nan, made
from torch import nn
from torch.nn.functional import linear, silu

from longtrain.errors import ConfigError
from longtrain.kernels.int4_linear import MAX_ROWS, Int4Linear, group_of, quantise_weight, written_out


@pytest.mark.parametrize("group", [32, 64, 128])
def test_weights_are_half_a_step_off_at_most(group):
    """Half a step, and what bf16 takes from the group's ends: 2^-9 of a zero, and of 8 scales."""
    weight = torch.randn(40, 256) + 0.5
    codes, table = quantise_weight(weight, group)
    assert codes.shape == (5, 2, 32, 4) and table.shape == (5, 2, 8, 128 // group, 2)
    assert codes.dtype == torch.int32 and table.dtype == torch.bfloat16
    spread = table.float().transpose(1, 2).flatten(2, 3).flatten(0, 1).repeat_interleave(group, 1)
    scale, zero = spread.unbind(-1)
    error = (written_out(codes, table, torch.float32) - weight).abs()
    assert (error <= scale * (0.5 + 8 * 2**-8) + zero.abs() * 2**-8).all()
    assert float((error / scale).square().mean()) < 1.2 / 12  # a uniform error of a step has 1/12


def test_the_order_of_codes_in_a_word():
    """Two eights of two units, whose codes say where they lie: every eight inputs are one word.

    From the lowest bits on it has the inputs 0, 2, 4, 6 (here the place 4 m + t, the unit, 0 and 15), then
    1, 3, 5, 7 (the row, 5, 9 and 7).
    """
    row, unit, place = torch.meshgrid(torch.arange(16), torch.arange(2), torch.arange(16), indexing="ij")
    same = torch.ones_like(row)
    codes_of_word = [place, row, unit, 5 * same, 0 * same, 9 * same, 15 * same, 7 * same]
    weight = torch.stack(codes_of_word, -1).flatten(1).float()
    codes, table = quantise_weight(weight, 32)
    assert codes.shape == (2, 2, 32, 4)
    places = ((0, 0, 0, 0, 0), (0, 0, 0, 1, 0), (0, 0, 0, 0, 1), (1, 0, 6, 3, 2), (1, 1, 7, 2, 3))
    for eight, unit, g, t, m in places:
        word = 0x7950F000 + (8 * eight + g << 16) + (unit << 4) + 4 * m + t
        assert codes[eight, unit, 4 * g + t, m] == word, (eight, unit, g, t, m)
    assert (table == torch.tensor([1.0, 8.0])).all()
    assert torch.equal(written_out(codes, table, torch.float64), weight.double())


@pytest.mark.parametrize(
    ("inputs", "group", "units"), [(96, 32, 1), (192, 64, 2), (320, 64, 3), (352, 32, 3)]
)
def test_units_are_filled_up_with_nothing(inputs, group, units):
    """Scales and zeros behind a row's end are 0, so that whatever a kernel multiplies there adds nothing."""
    weight = torch.randn(24, inputs)
    codes, table = quantise_weight(weight, group)
    assert codes.shape == (3, units, 32, 4) and table.shape == (3, units, 8, 128 // group, 2)
    assert (table.transpose(1, 2).flatten(2, 3)[:, :, inputs // group :] == 0).all()
    written = written_out(codes, table, torch.float32)
    assert written.shape == (24, 128 * units) and (written[:, inputs:] == 0).all()
    for first in range(0, inputs, group):  # a group is what it is alone
        alone = written_out(*quantise_weight(weight[:, first : first + group], group), torch.float32)
        assert torch.equal(written[:, first : first + group], alone[:, :group])


def test_a_constant_group_is_kept():
    weight = torch.full((8, 32), 0.75)
    assert torch.equal(written_out(*quantise_weight(weight, 32), torch.float32)[:, :32], weight)


def test_a_layer_is_quantised_piece_by_piece(monkeypatch):
    source = nn.Linear(64, 37, bias=False).requires_grad_(False)
    whole = Int4Linear(source, 32)
    monkeypatch.setattr("longtrain.kernels.int4_linear._QUANTISED", 16)
    pieces = Int4Linear(source, 32)
    assert torch.equal(pieces.codes, whole.codes) and torch.equal(pieces.table, whole.table)


def test_groups():
    assert [group_of(4096, 128), group_of(704, 128), group_of(96, 128), group_of(4096, 64)] == [
        128,
        64,
        32,
        64,
    ]
    with pytest.raises(ConfigError, match="48 input features"):
        group_of(48, 128)


@pytest.mark.parametrize("features", [8, 97, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_that_of_the_written_out_weights(features, bias):
    source = nn.Linear(192, features, bias=bias).double().requires_grad_(False)
    layer = Int4Linear(source, 128)
    rows = -(-features // 8) * 8
    assert layer.codes.shape == (rows // 8, 2, 32, 4) and layer.table.shape == (rows // 8, 2, 8, 2, 2)
    x = torch.randn(2, 3, 192, dtype=torch.float64)
    weight = layer.written_out(torch.float64)
    assert weight.shape == (features, 192)
    assert torch.equal(weight, written_out(layer.codes, layer.table, torch.float64)[:features, :192])
    assert torch.equal(layer(x), linear(x, weight, source.bias))
    assert float((layer(x) - source(x)).std() / source(x).std()) < 0.15
    assert layer.bytes() == rows * 256 // 2 + 256 // 64 * rows * 4, "with what fills the second unit"
    assert not list(layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_bf16_bias_is_added_to_any_input(dtype):
    """A layer of a bf16 target is the reference for its kernel in fp32, so its input may be wider."""
    source = nn.Linear(64, 16, dtype=torch.bfloat16).requires_grad_(False)
    layer, x = Int4Linear(source, 32), torch.randn(3, 64).to(dtype)
    weight = layer.written_out(dtype)
    got = layer(x)
    assert got.dtype == dtype and torch.equal(got, linear(x, weight, source.bias.to(dtype)))
    gate, up = got.chunk(2, -1)
    assert torch.equal(layer.swiglu(x), silu(gate) * up)


def test_layers_joined():
    """They give their outputs side by side, share the weights and can have them back."""
    sources = [nn.Linear(64, features, bias=True) for features in (16, 24)]
    parts = [Int4Linear(source.requires_grad_(False), 32) for source in sources]
    x, residual = torch.randn(3, 64), torch.randn(3, 40)
    expected = torch.cat([part(x) for part in parts], -1)
    whole = Int4Linear.joined(parts)
    torch.testing.assert_close(whole(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole(x, residual), expected + residual, rtol=1e-5, atol=1e-5)
    gate, up = expected.chunk(2, -1)
    torch.testing.assert_close(whole.swiglu(x), silu(gate) * up, rtol=1e-5, atol=1e-5)
    assert parts[1].codes.data_ptr() == whole.codes[2:].data_ptr()
    torch.testing.assert_close(torch.cat([part(x) for part in parts], -1), expected)
    parts[1].part()
    assert parts[1].codes.data_ptr() != whole.codes[2:].data_ptr()
    with pytest.raises(ConfigError, match="multiples of 8"):
        Int4Linear.joined([Int4Linear(nn.Linear(32, 12), 32)])


@pytest.mark.parametrize("first", [True, False])
def test_layers_with_and_without_a_bias_are_not_joined(first):
    parts = [Int4Linear(nn.Linear(32, 8, bias=bias), 32) for bias in (first, not first, False)]
    with pytest.raises(
        ConfigError, match="1 of 3 have a bias cannot be joined; allowed: all of them or none"
    ):
        Int4Linear.joined(parts)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("features", "inputs", "group"),
    [
        (512, 256, 32), (1408, 512, 64), (512, 1408, 128), (8193, 512, 128), (384, 96, 32), (8, 192, 64),
        (80, 2240, 64), (16384, 2048, 128), (48, 14336, 128), (32, 14336, 64), (48, 17408, 128),
        (16, 17408, 32),
    ],
)  # fmt: skip
def test_the_kernel_gives_the_twins_product(features, inputs, group, bias):
    """bf16 inputs, exact codes, fp32 sums: what is rounded is the product alone, 2^-9 of it.

    Rows lie among NaN, which no product may read.
    """
    source = nn.Linear(inputs, features, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    host, layer = Int4Linear(source, group), Int4Linear(source.cuda(), group)
    assert layer.codes.is_cuda and layer.bytes() == host.bytes()
    weight = host.written_out(torch.float32).cuda()
    for rows in (1, 2, 3, 4, 8, 16, 40, 100):
        x, residual = (made(rows, width, dtype=torch.bfloat16, device="cuda") for width in (inputs, features))
        expected = linear(x.float(), weight, source.bias.float() if bias else None)
        x = among_nan(x)
        small = layer._small(x, None, gated=False)
        assert (small is not None) == (rows <= MAX_ROWS), "it is the kernel that is looked at"
        assert distance(layer(x), expected) < 8e-3
        assert distance(layer(x, residual), expected + residual) < 8e-3
        if features % 16 == 0:
            gate, up = expected.chunk(2, -1)
            assert distance(layer.swiglu(x), silu(gate) * up) < 1.6e-2


def distance(got, expected):
    """Of all numbers together, relative to what is wanted."""
    return float((got.float() - expected).norm() / expected.norm())

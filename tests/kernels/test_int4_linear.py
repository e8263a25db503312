"""4-bit weights: their codes, their error, and the product."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, silu

from longtrain.errors import ConfigError
from longtrain.kernels.int4_linear import Int4Linear, group_of, quantise_weight, written_out


@pytest.mark.parametrize("group", [32, 64, 128])
def test_weights_are_half_a_step_off_at_most(group):
    """Half a step, and what bf16 takes from the group's ends: 2^-9 of a zero, and of 8 scales."""
    weight = torch.randn(40, 256) + 0.5
    codes, table = quantise_weight(weight, group)
    assert codes.shape == (5, 256 // group, 8, group // 2) and table.shape == (5, 256 // group, 8, 2)
    spread = table.float().transpose(1, 2).flatten(0, 1).repeat_interleave(group, 1)
    scale, zero = spread.unbind(-1)
    error = (written_out(codes, table, torch.float32) - weight).abs()
    assert (error <= scale * (0.5 + 8 * 2**-8) + zero.abs() * 2**-8).all()
    assert float((error / scale).square().mean()) < 1.2 / 12  # a uniform error of a step has 1/12


def test_the_order_of_codes_in_a_byte():
    """Of a group of 32, byte 1 has the third code in its lower half and the nineteenth in its upper half."""
    weight = torch.cat((torch.arange(16.0), torch.arange(15.0, -1, -1)))[None].repeat(8, 1)
    codes, table = quantise_weight(weight, 32)
    assert codes[0, 0, 0, :8].tolist() == [0xF0, 0xD2, 0xE1, 0xC3, 0xB4, 0x96, 0xA5, 0x87]
    assert table[0, 0, 0].tolist() == [1.0, 8.0]
    assert torch.equal(written_out(codes, table, torch.float64), weight.double())


def test_a_constant_group_is_kept():
    weight = torch.full((8, 32), 0.75)
    assert torch.equal(written_out(*quantise_weight(weight, 32), torch.float32), weight)


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
    assert layer.codes.shape[1] == 3  # groups of 64
    x = torch.randn(2, 3, 192, dtype=torch.float64)
    weight = written_out(layer.codes, layer.table, torch.float64)[:features]
    assert torch.equal(layer(x), linear(x, weight, source.bias))
    assert float((layer(x) - source(x)).std() / source(x).std()) < 0.15
    rows = -(-features // 8) * 8
    assert layer.bytes() == rows * 192 // 2 + 192 // 64 * rows * 4
    assert not list(layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_bf16_bias_is_added_to_any_input(dtype):
    """A layer of a bf16 target is the reference for its kernel in fp32, so its input may be wider."""
    source = nn.Linear(64, 16, dtype=torch.bfloat16).requires_grad_(False)
    layer, x = Int4Linear(source, 32), torch.randn(3, 64).to(dtype)
    weight = written_out(layer.codes, layer.table, dtype)
    got = layer(x)
    assert got.dtype == dtype and torch.equal(got, linear(x, weight, source.bias.to(dtype)))
    gate, up = got.chunk(2, -1)
    assert torch.equal(layer.swiglu(x), silu(gate) * up)


def test_layers_joined():
    """They give their outputs side by side, share the weights and can have them back."""
    sources = [nn.Linear(64, features, bias=True) for features in (16, 24)]
    parts = [Int4Linear(source.requires_grad_(False), 32) for source in sources]
    x, residual = torch.randn(3, 64), torch.randn(3, 40)
    want = torch.cat([part(x) for part in parts], -1)
    whole = Int4Linear.joined(parts)
    torch.testing.assert_close(whole(x), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole(x, residual), want + residual, rtol=1e-5, atol=1e-5)
    gate, up = want.chunk(2, -1)
    torch.testing.assert_close(whole.swiglu(x), silu(gate) * up, rtol=1e-5, atol=1e-5)
    assert parts[1].codes.data_ptr() == whole.codes[2:].data_ptr()
    torch.testing.assert_close(torch.cat([part(x) for part in parts], -1), want)
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
@pytest.mark.parametrize("shape", [(512, 256), (1408, 512), (512, 1408), (8193, 512), (384, 96)])
@pytest.mark.parametrize("rows", [1, 5, 16, 40, 100])
def test_the_kernel_gives_the_twins_product(shape, rows):
    """bf16 inputs, exact codes, fp32 sums: what is rounded is the product alone, 2^-9 of it."""
    source = nn.Linear(shape[1], shape[0], device="cuda", dtype=torch.bfloat16)
    layer, host = Int4Linear(source, 128), Int4Linear(source.cpu(), 128)
    x = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
    want = host(x.cpu().float()).cuda()
    error = (layer(x).float() - want).norm() / want.norm()
    assert float(error) < 8e-3 and layer.codes.is_cuda and layer.bytes() == host.bytes()
    if shape[0] % 16 == 0 and rows <= 16:
        whole, want = layer.swiglu(x).float(), host.swiglu(x.cpu().float()).cuda()
        assert float((whole - want).norm() / want.norm()) < 1.6e-2

"""4-bit weights: their codes, their error, and the product."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from longtrain.errors import ConfigError
from longtrain.kernels.int4_linear import Int4Linear, group_of, quantise_weight, written_out


@pytest.mark.parametrize("group", [32, 64, 128])
def test_weights_are_half_a_step_off_at_most(group):
    """Half a step, and what bf16 takes from the group's ends: 2^-9 of a zero, and of 8 scales."""
    weight = torch.randn(40, 256) + 0.5
    codes, table = quantise_weight(weight, group)
    assert codes.shape == (40, 128) and table.shape == (256 // group, 40, 2)
    scale, zero = (part.float().T.repeat_interleave(group, 1) for part in table.unbind(-1))
    error = (written_out(codes, table, torch.float32) - weight).abs()
    assert (error <= scale * (0.5 + 8 * 2**-8) + zero.abs() * 2**-8).all()
    assert float((error / scale).square().mean()) < 1.2 / 12  # a uniform error of a step has 1/12


def test_the_order_of_codes_in_a_byte():
    """An even input feature in the upper nibble: what torch's packing expects."""
    weight = torch.arange(16.0).repeat(4)[None].repeat(8, 1)
    codes, table = quantise_weight(weight, 64)
    assert codes[0, :8].tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]
    assert table[0, 0].tolist() == [1.0, 8.0]
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
    assert layer.group == 64
    x = torch.randn(2, 3, 192, dtype=torch.float64)
    weight = written_out(layer.codes, layer.table_JN2, torch.float64)[:features]
    assert torch.equal(layer(x), linear(x, weight, source.bias))
    assert float((layer(x) - source(x)).std() / source(x).std()) < 0.15
    rows = -(-features // 8) * 8
    assert layer.bytes() == rows * 192 // 2 + 192 // 64 * rows * 4
    assert not list(layer.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 256), (1408, 512), (512, 1408), (8193, 512), (384, 96)])
@pytest.mark.parametrize("rows", [1, 5, 16, 40])
def test_torchs_operation_gives_the_twins_product(shape, rows):
    """bf16 products summed in fp32 by both; the twin rounds the weight to bf16, the operation each of its
    factors: 2^-8 of what is summed."""
    source = nn.Linear(shape[1], shape[0], device="cuda", dtype=torch.bfloat16)
    layer, host = Int4Linear(source, 128), Int4Linear(source.cpu(), 128)
    x = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
    want = host(x.cpu().float()).cuda()
    error = (layer(x).float() - want).norm() / want.norm()
    assert float(error) < 2e-2 and layer.codes.is_cuda and layer.bytes() == host.bytes()

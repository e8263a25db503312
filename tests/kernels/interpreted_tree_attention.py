"""Run by test_interpreted.py under TRITON_INTERPRET=1: the Triton kernels on a CPU against their twin."""

import warnings

import pytest
import torch
from attention_cases import dense_case, grown, heads_alone, mask_named, per_head_case, rows_alone

import longtrain.kernels.tree_attention as package
from longtrain.costs.model import TILE
from longtrain.kernels.tree_attention import (
    CAUSAL,
    kernel_serves,
    launch,
    reference,
    tree_attention,
    tree_bits,
)

CASES = {
    "one row, no prefix": ("causal", 1, {"lens": (0,), "T": 1}),
    "prefix of none, no mask": ("none", 2, {"lens": (0,)}),
    "a tile of keys less one": ("tree", 1, {"lens": (31,), "S": 64}),
    "a tile of keys": ("none", 2, {"lens": (32,), "S": 64}),
    "a tile of keys and one, no groups": ("causal", 2, {"H": 2, "G": 2, "lens": (33,), "S": 64}),
    "ragged batch, groups of 8": ("tree", 3, {"B": 3, "H": 8, "G": 1, "lens": (0, 7, 65), "S": 99, "T": 7}),
    "evicted rows in front": ("tree", 2, {"B": 2, "lens": (3, 40), "S": 90, "base": 33, "G": 1}),
    "head dim 24": ("causal", 1, {"D": 24, "G": 1}),
    "head dim 256": ("causal", 2, {"D": 256, "lens": (40,), "S": 50, "G": 1}),
    "head dim 128": ("tree", None, {"D": 128, "lens": (70,), "S": 80, "G": 1}),
    "a level of a tree": ("tree", 2, {"B": 2, "T": 5, "lens": (3, 40), "S": 90, "nodes": 11}),
    "a level of a large tree": ("tree", 2, {"T": 9, "lens": (20,), "S": 100, "H": 1, "G": 1, "nodes": 70}),
    "two words of bits": ("tree", 2, {"T": 70, "lens": (20,), "S": 100, "H": 1, "G": 1}),
}
"""Name -> mask, splits, inputs."""


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():  # log2(0) and 0 * inf of rows that see nothing
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@pytest.mark.parametrize(("mask", "splits", "case"), CASES.values(), ids=CASES)
def test_the_kernel_follows_the_reference(mask, splits, case):
    """fp32 keeps 24 bits; sums of 100 products of numbers around 1; logits of more terms are larger."""
    q, k, v, lens = dense_case(**case)
    bound = 2e-6 * max(1, q.shape[3] / 64)
    how = {"scale": 0.4, "base": case.get("base", 0), "nodes": case.get("nodes")}
    bits, _ = mask_named(mask, len(lens), q.shape[2], nodes=case.get("nodes"))
    assert kernel_serves(q, k, v)
    expected, expected_lse = reference.tree_attention(q.double(), k.double(), v.double(), lens, bits, **how)
    got, lse = tree_attention(q, k, v, lens, bits, splits=splits, **how)
    torch.testing.assert_close(got, expected, atol=bound, rtol=2e-5, check_dtype=False)
    torch.testing.assert_close(lse, expected_lse, atol=2e-6, rtol=2e-6, check_dtype=False)


PER_HEAD = {
    "a token": ("causal", 2, [[5, 70], [33, 1]], 1, {}),
    "a chain": ("causal", 3, [[32, 64], [0, 100]], 4, {}),
    "a tree": ("tree", None, [[31, 70]], 7, {}),
    "a large tree": ("tree", 2, [[3, 65]], 20, {}),
    "a level of a tree": ("tree", 2, [[40, 3], [12, 77]], 5, {"nodes": 11}),
    "no mask": ("none", 2, [[1, 99, 64, 32]], 3, {}),
    "bulk copies": ("tree", 2, [[200, 64], [5, 131]], 3, {"D": 64, "dtype": torch.float16}),
    "bulk copies of one token": ("causal", 1, [[200, 64], [5, 131]], 1, {"D": 64, "dtype": torch.float16}),
}
"""Name -> mask, splits, entries of each sequence and KV head, new tokens, inputs."""


@pytest.mark.parametrize(("mask", "splits", "lens", "T", "case"), PER_HEAD.values(), ids=PER_HEAD)
def test_heads_of_different_lengths_have_the_bits_of_each_alone(mask, splits, lens, T, case):
    """With the splits of the whole launch: the same tiles are summed in the same order."""
    q, k, v, len_BG, first_BG = per_head_case(lens, T=T, **case)
    nodes = case.get("nodes", T)
    bits, _ = mask_named(mask, len(lens), T, nodes=nodes)
    how = {"scale": 0.4, "nodes": case.get("nodes")}
    assert kernel_serves(q, k, v)
    out, lse = tree_attention(q, k, v, len_BG, bits, splits=splits, **how, first_BG=first_BG)
    double = (x.double() for x in (q, k, v))
    expected, _ = reference.tree_attention(*double, len_BG, bits, **how, first_BG=first_BG)
    bound = 2e-6 if q.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(out.double(), expected, atol=bound, rtol=max(2e-5, bound))
    for b, heads, alone in heads_alone(q, k, v, len_BG, first_BG, nodes):
        own = bits[b : b + 1] if mask == "tree" else bits
        one, one_lse = tree_attention(*alone, own, splits=splits, **how)
        if splits is not None:
            assert torch.equal(out[b : b + 1, heads], one) and torch.equal(lse[b : b + 1, heads], one_lse)


WINDOWS = {
    "causal, over two tiles": ("causal", 2, 40, {"T": 5, "lens": (90,), "S": 99}),
    "causal, one key": ("causal", 1, 1, {"T": 3, "lens": (33,), "S": 40}),
    "longer than the text": ("tree", 2, 500, {"T": 7, "lens": (33,), "S": 64}),
    "tree, ragged batch": ("tree", 3, 9, {"B": 3, "H": 8, "G": 1, "lens": (0, 7, 65), "S": 99, "T": 7}),
    "deeper than the window": ("tree", 2, 3, {"B": 2, "T": 20, "lens": (5, 31), "S": 99}),
    "two words of bits": ("tree", 4, 33, {"T": 70, "lens": (100,), "S": 180, "H": 1, "G": 1}),
    "a chunk": ("causal", 3, 8, {"T": 50, "lens": (50,), "S": 120, "G": 1}),
}
"""Name -> mask, splits, window, inputs."""


@pytest.mark.parametrize(("mask", "splits", "window", "case"), WINDOWS.values(), ids=WINDOWS)
def test_the_kernel_follows_the_reference_with_a_window(mask, splits, window, case):
    """NaN before the window is not read either, but in the tile where it begins."""
    q, k, v, lens = dense_case(**case)
    bits, visible_BTT = mask_named(mask, len(lens), q.shape[2])
    depth = visible_BTT.sum(-1).expand(len(lens), -1) - 1 if mask == "tree" else None
    how = {"scale": 0.4, "window": window, "depth_BT": depth}
    expected, expected_lse = reference.tree_attention(q.double(), k.double(), v.double(), lens, bits, **how)
    for b, n in enumerate(lens.tolist()):
        k[b, :, : max(0, n - window + 1) // 32 * 32] = float("nan")
    got, lse = tree_attention(q, k, v, lens, bits, splits=splits, **how)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-5, check_dtype=False)
    torch.testing.assert_close(lse, expected_lse, atol=2e-6, rtol=2e-6, check_dtype=False)


@pytest.mark.parametrize(
    ("mask", "window", "T", "splits", "dtype"),
    [
        ("causal", 1, 1, 2, torch.float32),
        ("causal", 8, 3, 5, torch.float16),
        ("tree", 8, 3, 3, torch.float32),
        ("tree", 40, 20, 1, torch.float16),
        ("tree", 70, 2, 2, torch.float32),
    ],
)
def test_dropped_tiles_change_no_bits(mask, window, T, splits, dtype):
    """Any number of whole tiles before the window, another in each sequence."""
    lens = (window + 130, window + 63)
    q, k, v, lens_B = dense_case(B=2, H=2, G=1, T=T, lens=lens, S=max(lens) + T, dtype=dtype)
    bits, visible_BTT = mask_named(mask, len(lens), T)
    depth = visible_BTT.sum(-1).expand(len(lens), -1) - 1 if mask == "tree" else None
    how = {"scale": 0.3, "window": window, "depth_BT": depth, "splits": splits}
    whole = tree_attention(q, k, v, lens_B, bits, **how)
    for dropped in ([128, 64], [64, 0]):
        dropped_B = torch.tensor(dropped)
        index = (dropped_B[:, None] + torch.arange(k.shape[2])).clamp(max=k.shape[2] - 1)
        last = [x.gather(2, index[:, None, :, None].expand_as(x)) for x in (k, v)]
        same = tree_attention(q, *last, lens_B, bits, **how, dropped_B=dropped_B)
        assert all(torch.equal(*pair) for pair in zip(whole, same, strict=True))


def test_tiles_fit_what_is_dropped():
    for tile in (*launch.TILES, *launch.WIDE_TILES, launch.FLOAT):
        assert TILE % tile.keys == 0


@pytest.mark.parametrize(("rows", "nodes"), [(1, 1), (5, 21), (64, 64), (17, 128)])
def test_bits_of_a_mask(rows, nodes, monkeypatch):
    """A view of any strides; the sixty-fourth bit is the sign."""
    visible = torch.rand(2, nodes, rows, generator=torch.Generator().manual_seed(0)).lt(0.5).transpose(1, 2)
    got = tree_bits(visible)
    monkeypatch.setattr(package, "runs_on", lambda device: False)
    assert torch.equal(got, tree_bits(visible))


@pytest.mark.parametrize("bulk", [False, True])
def test_tiles_of_half_precision(bulk):
    """fp16 keeps 11 bits of the weights: errors of 5e-4 each, which average out."""
    q, k, v, lens = dense_case(D=64, H=4, G=1, T=20, lens=(100,), S=150, dtype=torch.float16)
    tile = launch.TreeTile(rows=64, keys=64, warps=4, stages=2, resident=1, bulk=bulk)
    bits, _ = mask_named("tree", 1, 20)
    got, lse = launch.tree_attention(q, k, v, lens, bits, 0.125, 0, 2, tile)
    expected, expected_lse = reference.tree_attention(q, k, v, lens, bits, scale=0.125)
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("widths", "batch", "lens", "G", "window"),
    [
        ((2, 4, 4), 1, (30,), 1, 0),
        ((2, 4, 4), 1, (9,), 1, 0),
        ((1, 3, 2), 2, (28, 3), 2, 0),
        ((2, 4, 4), 1, (30,), 1, 12),
        ((1, 3, 2), 2, (28, 3), 2, 3),
    ],
)
def test_a_row_of_a_tree_has_the_bits_of_the_row_alone(widths, batch, lens, G, window):
    """Where no tile is whole: a CPU's product rounds by a row's place among the others."""
    visible_BTT = torch.stack([grown(widths) for _ in range(batch)])
    T = visible_BTT.shape[1]
    q, k, v, len_B = dense_case(B=batch, T=T, H=4, G=G, D=16, lens=lens, S=max(lens) + T + 3)
    how = {"scale": 0.3, "splits": 2, "window": window}
    out, lse = tree_attention(q, k, v, len_B, tree_bits(visible_BTT), **how, depth_BT=visible_BTT.sum(-1) - 1)
    for row, case in enumerate(rows_alone(q, k, v, len_B, visible_BTT)):
        own, own_lse = tree_attention(*case, CAUSAL, **how)
        assert torch.equal(own[:, :, 0], out[:, :, row]) and torch.equal(own_lse[:, :, 0], lse[:, :, row])


def test_peaky_scores():
    """Scores of several hundred: the softmax must not overflow, between splits neither."""
    q, k, v, lens = dense_case(lens=(130,), S=140, H=1, G=1)
    got, lse = tree_attention(q, 30 * k, v, lens, None, scale=1.0, splits=4)
    expected, expected_lse = reference.tree_attention(
        q.double(), 30 * k.double(), v.double(), lens, None, scale=1.0
    )
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-4)
    torch.testing.assert_close(lse.double(), expected_lse, atol=0, rtol=1e-6)

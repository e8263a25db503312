import torch

from longtrain.kernels.attention.split import lse_merge
from tests.kernels import plain_attention as reference


def parts(dtype=torch.float64, size=30.0):
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 5, 8, generator=rng, dtype=dtype) * size
    k, v = torch.randn(2, 2, 2, 11, 8, generator=rng, dtype=dtype)
    return q, k, v


def test_two_halves_merge_to_the_whole_even_when_peaked():
    q, k, v = parts()
    whole = torch.rand(2, 5, 11, generator=torch.Generator().manual_seed(1)) < 0.6
    whole[0, 0] = False  # a row that sees nothing
    whole[1, 1, :6] = False  # a row that sees nothing of the first half
    whole[1, 2, 6:] = False  # nor of the second
    expected, lse = reference.masked_attention(q, k, v, whole, scale=1.0)
    left = reference.masked_attention(q, k[:, :, :6], v[:, :, :6], whole[..., :6], scale=1.0)
    right = reference.masked_attention(q, k[:, :, 6:], v[:, :, 6:], whole[..., 6:], scale=1.0)
    for merge in (lse_merge, reference.lse_merge):
        out, merged = merge(*left, *right)
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(merged, lse, atol=1e-12, rtol=1e-12)
    assert not out[0, :, 0].any() and (merged[0, :, 0] == -torch.inf).all()


def test_half_precision_merges_in_fp32():
    q, k, v = parts()
    left = reference.masked_attention(q, k, v, torch.ones(2, 5, 11, dtype=torch.bool), scale=0.1)
    out, lse = lse_merge(left[0].bfloat16(), left[1].float(), left[0].bfloat16(), left[1].float())
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out, left[0].bfloat16().float(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse, (left[1] + torch.log(torch.tensor(2.0))).float())


def test_tree_attention_is_prefix_plus_ancestors():
    q, k, v = parts(size=1.0)
    tree = torch.tril(torch.ones(2, 5, 5, dtype=torch.bool))
    len_B = torch.tensor([0, 6])
    out, _ = reference.tree_attention(q, k, v, len_B, tree, scale=0.3)
    for b, n in enumerate(len_B.tolist()):
        for row in range(5):
            keys = slice(0, n + row + 1)
            seen = torch.ones(1, 1, n + row + 1, dtype=torch.bool)
            one = slice(b, b + 1)
            alone, _ = reference.masked_attention(
                q[one, :, row : row + 1], k[one, :, keys], v[one, :, keys], seen, scale=0.3
            )
            torch.testing.assert_close(out[b, :, row], alone[0, :, 0])

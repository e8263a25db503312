import pytest
import torch

from longtrain.kernels.attention import ragged
from longtrain.kernels.attention.ragged import (
    even_attention,
    masked_rows,
    merge_pieces,
    ragged_attention,
    segments_of,
)
from tests.kernels import plain_attention as reference

B, G, D = 2, 3, 16


def case(counts, R, dtype=torch.float64, device="cpu"):
    rng = torch.Generator().manual_seed(0)
    q = (2 * torch.randn(B, G, R, D, generator=rng)).to(device, dtype)
    k, v = torch.randn(2, sum(counts), D, generator=rng).to(device, dtype)
    return q, k, v


def expected(q, k, v, counts, scale):
    """Segment by segment."""
    outs, lses, at = [], [], 0
    for x, n in enumerate(counts):
        rows = q.flatten(0, 1)[x][None, None]
        seen = torch.ones(1, rows.shape[2], n, dtype=torch.bool, device=q.device)
        keys, values = k[at : at + n][None, None], v[at : at + n][None, None]
        out, lse = reference.masked_attention(rows, keys, values, seen, scale=scale)
        outs.append(out[0, 0])
        lses.append(lse[0, 0])
        at += n
    return torch.stack(outs).view(q.shape), torch.stack(lses).view(q.shape[:3])


@pytest.mark.parametrize("R", [1, 4, 12])
@pytest.mark.parametrize("counts", [(1, 5, 2, 9, 1, 7), (40, 3, 3, 3, 3, 3)])
def test_segments_of_any_length(counts, R):
    q, k, v = case(counts, R)
    out, lse = ragged_attention(q, k, v, segments_of(counts, q.device), scale=0.3)
    result, expected_lse = expected(q, k, v, counts, 0.3)
    torch.testing.assert_close(out, result, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=1e-12)


def test_even_segments():
    q, k, v = case((7,) * 6, 4)
    out, lse = even_attention(q, k.view(B, G, 7, D), v.view(B, G, 7, D), scale=0.3)
    result, expected_lse = expected(q, k, v, (7,) * 6, 0.3)
    torch.testing.assert_close(out, result, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, expected_lse, atol=1e-12, rtol=1e-12)


def test_pieces_of_a_segment_merge_to_the_whole(monkeypatch):
    monkeypatch.setattr(ragged, "PIECE", 4)
    counts = (1, 4, 5, 13, 8, 2)
    q, k, v = case(counts, 3)
    segments = segments_of(counts, q.device)
    assert segments.owner_P.tolist() == [0, 1, 2, 2, 3, 3, 3, 3, 4, 4, 5]
    assert segments.bounds_P.tolist() == [0, 1, 5, 9, 10, 14, 18, 22, 23, 27, 31, 33]
    bounds = segments.bounds_P.tolist()
    parts = [
        masked_rows(q.flatten(0, 1)[x][None, None], k[a:b][None, None], v[a:b][None, None], None, scale=0.3)
        for x, a, b in zip(segments.owner_P.tolist(), bounds[:-1], bounds[1:], strict=True)
    ]
    out_PRD, lse_PR = (torch.stack([part[i][0, 0] for part in parts]) for i in (0, 1))
    out, lse = merge_pieces(out_PRD, lse_PR, segments.piece_XJ)
    result, expected_lse = expected(q, k, v, counts, 0.3)
    torch.testing.assert_close(out.view(q.shape), result, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse.view(q.shape[:3]), expected_lse, atol=1e-12, rtol=1e-12)


def test_a_row_that_sees_nothing():
    q, k, v = case((5,) * 6, 2)
    seen = torch.ones(B, 1, 2, 5, dtype=torch.bool)
    seen[1, :, 0] = False
    out, lse = masked_rows(q, k.view(B, G, 5, D), v.view(B, G, 5, D), seen, scale=0.3)
    assert not out[1, :, 0].any() and (lse[1, :, 0] == -torch.inf).all()
    assert out[1, :, 1].all() and lse[1, :, 1].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("R", [1, 4, 20])
@pytest.mark.parametrize("counts", [(1, 5, 200, 900, 33, 7), (5000, 1024, 1025, 3, 2048, 1), (64,) * 6])
def test_on_a_gpu_it_stays_near_fp32(counts, R):
    q, k, v = case(counts, R, torch.bfloat16, "cuda")
    out, lse = ragged_attention(q, k, v, segments_of(counts, q.device), scale=0.25)
    result, expected_lse = expected(q.float(), k.float(), v.float(), counts, 0.25)
    assert (out.float() - result).norm() <= 5e-3 * result.norm()  # bf16 outputs and weights
    assert (lse - expected_lse).abs().max() <= 2e-3
    if len(set(counts)) == 1:
        k, v = k.view(B, G, -1, D), v.view(B, G, -1, D)
        out, lse = even_attention(q, k, v, scale=0.25)
        assert (out.float() - result).norm() <= 5e-3 * result.norm()
        assert (lse - expected_lse).abs().max() <= 2e-3

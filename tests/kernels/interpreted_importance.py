"""Run by test_interpreted.py under TRITON_INTERPRET=1: the Triton kernels on a CPU against the definition."""

import warnings

import pytest
import torch
from importance_cases import Case, eager, one, several

from longtrain.kernels.importance import (
    Span,
    importance,
    kernels_serve,
    launch,
    own_importance,
    reference,
    suffix_attention,
    suffix_lse,
)

SMALL = launch.SpanTile(rows=16, keys=16, warps=4, stages=2, waves=1)
LARGE = launch.SpanTile(rows=128, keys=128, warps=4, stages=2, waves=1)
OWN = launch.SpanTile(rows=16, keys=16, warps=4, stages=1, waves=0)

CASES = {
    "one key": (one(1, 1, 2, 2, 16), SMALL),
    "31 keys, head dim 128": (one(4, 31, 8, 1, 128), LARGE),
    "127 keys, no groups": (one(3, 127, 2, 2, 64, strided=False), LARGE),
    "257 keys, groups of 4": (one(6, 257, 4, 1, 16), SMALL),
    "4097 keys": (one(2, 4097, 4, 1, 16), LARGE),
    "groups of 8": (one(2, 127, 8, 1, 16), SMALL),
    "groups of 3, head dim 24": (one(5, 33, 6, 2, 24), SMALL),
    "no prefix": (one(20, 0, 2, 1, 16), SMALL),
    "more rows than a tile": (one(37, 40, 2, 1, 16), SMALL),
    "several spans": (several(4, 2, 16), SMALL),
    "several spans of packed rows": (several(4, 1, 32, strided=False), LARGE),
}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():  # rows of a tile that do not exist divide 0 by 0 and are not stored
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def tiles(monkeypatch, tile):
    monkeypatch.setattr(launch, "FLOAT", tile)
    monkeypatch.setattr(launch, "OWN_FLOAT", OWN)
    launch._cut.cache_clear()


@pytest.mark.parametrize(("case", "tile"), CASES.values(), ids=CASES)
def test_results_and_gradients(case, tile, monkeypatch):
    """fp32 keeps 24 bits; logits up to about 10 make errors of 1e-6 in the exponent."""
    tiles(monkeypatch, tile)
    inputs = case.tensors(torch.float32)
    q, own_k, _, k, _ = inputs
    assert kernels_serve(q, k)
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    expected = eager(case, *wide)
    close = {"atol": 2e-6, "rtol": 2e-5, "check_dtype": False}
    lse = suffix_lse(q.detach(), own_k.detach(), k, case.spans, scale=case.scale)
    torch.testing.assert_close(lse, expected["lse"], **close)
    for how in ("mean", "max"):
        got = importance(q.detach(), lse, k, case.spans, scale=case.scale, reduce=how)
        torch.testing.assert_close(got, expected[how], **close)
    got = own_importance(q.detach(), own_k.detach(), lse, case.spans, scale=case.scale)
    torch.testing.assert_close(got, expected["own"], **close)

    out, scores = suffix_attention(*inputs, case.spans, scale=case.scale)
    torch.testing.assert_close(out, expected["out"], **close)
    torch.testing.assert_close(scores, expected["mean"], **close)
    d_out, d_s = torch.randn(out.shape), torch.randn(scores.shape)
    got = torch.autograd.grad((out, scores), inputs[:3], (d_out, d_s))
    pair = (expected["out"], expected["mean"])
    expected = torch.autograd.grad(pair, wide[:3], (d_out.double(), d_s.double()))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **close)


@pytest.mark.parametrize("given", ["out", "scores"])
def test_gradient_of_one_result_alone(given, monkeypatch):
    tiles(monkeypatch, SMALL)
    case = one(5, 33, 4, 2, 16)
    inputs = case.tensors(torch.float32)
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    out, scores = suffix_attention(*inputs, case.spans, scale=case.scale)
    expected = eager(case, *wide)
    got, expected = (out, expected["out"]) if given == "out" else (scores, expected["mean"])
    cotangent = torch.randn(got.shape)
    mine = torch.autograd.grad(got, inputs[:3], cotangent)
    theirs = torch.autograd.grad(expected, wide[:3], cotangent.double(), materialize_grads=True)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-5, check_dtype=False)


def test_tiny_gradients_survive_fp16():
    """Weights of 1/100 times gradients of 1e-4 are few steps of the smallest fp16 number, unless scaled."""
    case = one(4, 100, 2, 1, 16)
    inputs = case.tensors(torch.float16)
    wide = [x.detach().float().requires_grad_(x.requires_grad) for x in inputs]
    cotangent = 1e-4 * torch.randn(1, 2, case.T)
    _, scores = suffix_attention(*inputs, case.spans, scale=case.scale)
    _, exact = reference.suffix_attention(*wide, case.spans, scale=case.scale)
    (got,) = torch.autograd.grad(scores, inputs[0], cotangent)
    (expected,) = torch.autograd.grad(exact, wide[0], cotangent)
    rounded = expected.half().float()  # what fp16 can hold at all
    assert (got.float() - rounded).norm() <= 1e-2 * expected.norm()


def test_scores_add_up_with_the_own_columns():
    """Each row's attention sums to 1, so prefix and own columns of a span do as well."""
    case = Case((Span((0, 7), 0, (0, 50)), Span((7, 30), 1, (10, 20))), 4, 2, 16, 2, 50)
    q, own_k, _, k, _ = (x.detach() for x in case.tensors(torch.float32))
    lse = suffix_lse(q, own_k, k, case.spans, scale=case.scale)
    prefix = importance(q, lse, k, case.spans, scale=case.scale).sum(-1)
    own = own_importance(q, own_k, lse, case.spans, scale=case.scale)
    total = torch.stack([prefix[0] + own[:7].sum(0), prefix[1] + own[7:].sum(0)])
    torch.testing.assert_close(total, torch.ones(2, 4), atol=1e-5, rtol=0)

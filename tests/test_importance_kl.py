"""KL of importance over a packed row, against each prompt written out."""

from __future__ import annotations

import pytest
import torch

from longtrain.losses import importance_kl

BOUNDS = [(0, 7), (9, 40), (40, 41)]


def row(dtype=torch.float64, heads=3, tokens=45, bounds=BOUNDS, seed=0):
    gen = torch.Generator().manual_seed(seed)
    pred, true = (torch.rand(heads, tokens, generator=gen, dtype=torch.float64) ** 4 for _ in range(2))
    prompt = torch.full((tokens,), len(bounds))
    for number, (a, b) in enumerate(bounds):
        prompt[a:b] = number
    return pred.to(dtype), true.to(dtype), prompt


def plainly(pred, true, bounds=BOUNDS):
    total = 0.0
    for a, b in bounds:
        q, p = (x[:, a:b] / x[:, a:b].sum(-1, keepdim=True) for x in (pred, true))
        terms = p * (p.clamp_min(1e-300).log() - q.clamp_min(1e-12).log())
        total = total + terms.masked_fill(p == 0, 0).sum(-1).mean()
    return total


@pytest.mark.parametrize("bounds", [BOUNDS, [(3, 30)], [(0, 45)]], ids=str)
def test_it_and_its_gradient_are_those_of_each_prompt(bounds):
    pred, true, prompt = row(bounds=bounds)
    true[:, 12], true[1, 3] = 0.0, 0.0
    pred.requires_grad_()
    got, outputs = importance_kl(pred, true, prompt, len(bounds)), plainly(pred, true, bounds)
    torch.testing.assert_close(got, outputs, rtol=1e-12, atol=0)
    mine, theirs = (torch.autograd.grad(3 * x, pred)[0] for x in (got, outputs))
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)
    outside = torch.ones(45, dtype=torch.bool)
    for a, b in bounds:
        outside[a:b] = False
    assert not mine[:, outside].any()


def test_gradcheck():
    pred, true, prompt = row()
    pred = (pred + 0.05).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: importance_kl(x, true, prompt, 3), pred)


def test_scale_says_nothing_and_equal_rankings_cost_nothing():
    pred, true, prompt = row()
    assert float(importance_kl(true * 7, true, prompt, 3)) == pytest.approx(0, abs=1e-14)
    torch.testing.assert_close(
        importance_kl(pred * 5, true * 0.1, prompt, 3), importance_kl(pred, true, prompt, 3)
    )


def test_a_vanished_prediction_is_clamped_and_has_no_gradient():
    pred, true, prompt = row(torch.float32)
    with torch.no_grad():
        pred[0, 1] = pred[2, 20] = 0.0
    pred.requires_grad_()
    loss = importance_kl(pred, true, prompt, 3)
    torch.testing.assert_close(loss, plainly(pred.double(), true.double()).float(), rtol=1e-5, atol=0)
    (grad,) = torch.autograd.grad(loss, pred)
    assert torch.isfinite(grad).all() and grad[0, 1] < 1 and grad[0, 1] >= 0  # only through the sum


def test_a_prompt_without_any_mass_gives_no_nan():
    pred, true, prompt = row(torch.float32)
    true[:, 40], pred[:, 9:40] = 0.0, 0.0
    pred.requires_grad_()
    loss = importance_kl(pred, true, prompt, 3)
    (grad,) = torch.autograd.grad(loss, pred)
    assert torch.isfinite(loss) and torch.isfinite(grad).all() and not grad[:, 9:40].any()


def test_half_precision_is_summed_in_fp32():
    pred, true, prompt = row(torch.bfloat16)
    loss = importance_kl(pred, true, prompt, 3)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, plainly(pred.double(), true.double()).float(), rtol=1e-5, atol=0)

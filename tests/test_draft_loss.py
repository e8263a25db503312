"""The draft's loss over its own vocabulary against the plain formulas, in blocks, with rows left out."""

from __future__ import annotations

import pytest
import torch

from longtrain.losses.draft import DRAFT_OBJECTIVES, DraftTeacher, fused_draft_loss

J, R, W, E, V, K = 3, 10, 7, 6, 23, 9


@pytest.fixture
def parts():
    gen = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    ids = torch.randperm(V, generator=gen)[:K].sort().values
    teacher = DraftTeacher(draw(W, E), draw(V, E), ids)
    rows = torch.stack([torch.randperm(R, generator=gen)[:W] for _ in range(J)])
    rows[0, 2] = rows[2, 0] = rows[2, 6] = -1
    passes = [draw(R, E) for _ in range(J)]
    for some, at in zip(passes, rows, strict=True):
        some[at[at >= 0]] += 2 * teacher.hidden_WE[at >= 0]  # now and then both choose the same token
    return passes, teacher.head_VE[ids].clone(), teacher, rows, torch.rand(J, W, generator=gen)


def plain_loss(passes, head, teacher, rows, weights, objective, decay):
    p_all = torch.softmax(teacher.hidden_WE @ teacher.head_VE.t(), -1)
    total, hits = torch.zeros((), dtype=torch.float64), torch.zeros(J, W, dtype=torch.bool)
    for j in range(J):
        for w in range(W):
            if rows[j, w] < 0:
                continue
            q = torch.softmax(head @ passes[j][rows[j, w]], -1)
            p = p_all[w, teacher.draft_ids_K]
            known = p / p.sum()
            kl, accept = (known * (known.log() - q.log())).sum(), torch.minimum(p, q).sum()
            mix = torch.exp(-decay * accept.detach())
            values = {"kl": kl, "lk": -accept.log(), "tv": 1 - accept}
            values["lk_hybrid"] = mix * kl + (1 - mix) * (1 - accept)
            total = total + weights[j, w] * values[objective]
            hits[j, w] = teacher.draft_ids_K[q.argmax()] == p_all[w].argmax()
    return total, hits


@pytest.mark.parametrize("block_rows", [0, 2])
@pytest.mark.parametrize("objective", DRAFT_OBJECTIVES)
def test_value_gradients_and_hits_equal_the_plain_formula(parts, objective, block_rows):
    passes, head, teacher, rows, weights = parts
    leaves = [x.requires_grad_() for x in (*passes, head)]
    settings = {"objective": objective, "kl_decay": 1.7}
    loss = fused_draft_loss(passes, head, teacher, rows, weights, block_rows=block_rows, **settings)
    outputs, hits = plain_loss(passes, head, teacher, rows, weights, objective, 1.7)
    torch.testing.assert_close(loss.total, outputs, rtol=1e-12, atol=0)
    assert torch.equal(loss.hit_T, hits) and hits.any()
    got = torch.autograd.grad(0.3 * loss.total, leaves)
    for mine, theirs in zip(got, torch.autograd.grad(0.3 * outputs, leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)


def test_a_frozen_head_gets_no_gradient_and_no_gradient_is_asked_of_the_teacher(parts):
    passes, head, teacher, rows, weights = parts
    passes = [x.requires_grad_() for x in passes]
    loss = fused_draft_loss(passes, head, teacher, rows, weights, objective="lk_hybrid")
    loss.total.backward()
    assert head.grad is None and all(x.grad.abs().sum() > 0 for x in passes)
    frozen = fused_draft_loss([x.detach() for x in passes], head, teacher, rows, weights, objective="lk")
    assert not frozen.total.requires_grad


def test_half_precision_keeps_the_heads_gradient_in_fp32(parts):
    passes, head, teacher, rows, weights = parts
    exact = fused_draft_loss(
        [x.requires_grad_() for x in passes], head.requires_grad_(), teacher, rows, weights, objective="kl"
    )
    (outputs,) = torch.autograd.grad(exact.total, head)
    half = DraftTeacher(teacher.hidden_WE.bfloat16(), teacher.head_VE.bfloat16(), teacher.draft_ids_K)
    single = head.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = fused_draft_loss([x.bfloat16() for x in passes], single, half, rows, weights, objective="kl")
    (got,) = torch.autograd.grad(loss.total, single)
    assert got.dtype == torch.float32
    assert 1e-4 < (got - outputs).norm() / outputs.norm() < 3e-2

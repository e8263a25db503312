"""The loss of slots against the formulas written out over all logits at once."""

from __future__ import annotations

import pytest
import torch

from longtrain.methods.dspark.loss import Learned, Weighing, slot_loss

N, E, V, F = 11, 6, 29, 4


def operands(dtype=torch.float64):
    gen = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)

    hidden, before, markov = draw(N, E), draw(N, F), 0.3 * draw(V, F)
    teacher = draw(N, E)
    # now and then both choose the same token; equal distributions would have no gradient to compare
    teacher[::3] = 1.1 * hidden[::3]
    labels = torch.randint(V, (N,), generator=gen)
    return hidden, before, markov, Learned(teacher, draw(V, E), labels, torch.rand(N, generator=gen))


def eager(hidden, before, markov, learned, ce, l1):
    """Every logit in memory, and the L1 distance as a sum of differences."""
    z = hidden @ learned.head_VE.t()
    if markov is not None:
        z = z + before @ markov.t()
    q, p = z.softmax(-1), (learned.hidden_WE @ learned.head_VE.t()).softmax(-1)
    away = (q - p).abs().sum(-1)
    each = ce * -q.log().gather(-1, learned.labels_N[:, None])[:, 0] + l1 * away
    return (each * learned.weights_N).sum(), 1 - away.detach() / 2, q.argmax(-1) == p.argmax(-1)


@pytest.mark.parametrize("block_rows", [0, 4])
@pytest.mark.parametrize("markov", [True, False])
@pytest.mark.parametrize(("ce", "l1"), [(0.1, 0.9), (1.0, 0.0), (0.0, 0.5)])
def test_value_share_hits_and_gradients_equal_the_formulas(ce, l1, markov, block_rows):
    hidden, before, matrix, learned = operands()
    leaves = [x.requires_grad_() for x in ((hidden, before, matrix) if markov else (hidden,))]
    given = (hidden, before, matrix) if markov else (hidden, None, None)
    found = slot_loss(*given, learned, Weighing("ce_l1", ce, l1), block_rows=block_rows)
    total, accept, hit = eager(*given, learned, ce, l1)
    torch.testing.assert_close(found.total, total, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.accept_N, accept, rtol=1e-12, atol=0)
    assert torch.equal(found.hit_N, hit) and hit.any() and not hit.all()
    got = torch.autograd.grad(0.3 * found.total, leaves)
    for mine, theirs in zip(got, torch.autograd.grad(0.3 * total, leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("markov", [True, False])
def test_the_hybrid_goes_from_kl_to_the_refused_share(markov):
    hidden, before, matrix, learned = operands()
    leaves = [x.requires_grad_() for x in ((hidden, before, matrix) if markov else (hidden,))]
    given = (hidden, before, matrix) if markov else (hidden, None, None)
    found = slot_loss(*given, learned, Weighing("lk_hybrid", kl_decay=2.0), block_rows=4)
    z = hidden @ learned.head_VE.t() + (before @ matrix.t() if markov else 0)
    q, p = z.softmax(-1), (learned.hidden_WE @ learned.head_VE.t()).softmax(-1)
    accept = torch.minimum(p, q).sum(-1)
    share = torch.exp(-2.0 * accept.detach())
    each = share * (p * (p.log() - q.log())).sum(-1) + (1 - share) * (1 - accept)
    total = (each * learned.weights_N).sum()
    torch.testing.assert_close(found.total, total, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.accept_N, accept.detach(), rtol=1e-12, atol=0)
    got = torch.autograd.grad(found.total, leaves)
    for mine, theirs in zip(got, torch.autograd.grad(total, leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("block_rows", [0, 4])
def test_a_vocabulary_of_its_own_has_a_head_that_learns_and_slots_share_the_teachers_tokens(block_rows):
    """Slots in blocks predict tokens that overlap; the teacher has more tokens than the draft."""
    hidden, before, _, whole = operands()
    gen = torch.Generator().manual_seed(1)
    ids = torch.randperm(V, generator=gen)[:13].sort().values
    own, matrix = (torch.randn(13, n, generator=gen, dtype=torch.float64) for n in (E, F))
    token = torch.tensor([0, 1, 2, 1, 2, 3, 3, 4, 5, 5, 6])
    teacher = whole.hidden_WE[:7]
    learned = Learned(teacher, whole.head_VE, whole.labels_N, whole.weights_N, token, ids)
    leaves = [x.requires_grad_() for x in (hidden, before, matrix, own)]
    found = slot_loss(
        hidden, before, matrix, learned, Weighing("lk_hybrid"), head_KE=own, block_rows=block_rows
    )
    q = (hidden @ own.t() + before @ matrix.t()).softmax(-1)
    p = (teacher[token] @ whole.head_VE.t()).softmax(-1)
    known, accept = p[:, ids] / p[:, ids].sum(-1, keepdim=True), torch.minimum(p[:, ids], q).sum(-1)
    share = torch.exp(-3.0 * accept.detach())
    each = share * (known * (known / q).log()).sum(-1) + (1 - share) * (1 - accept)
    total = (each * learned.weights_N).sum()
    torch.testing.assert_close(found.total, total, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.accept_N, accept.detach(), rtol=1e-12, atol=0)
    assert torch.equal(found.hit_N, ids[q.argmax(-1)] == p.argmax(-1))
    got = torch.autograd.grad(0.3 * found.total, leaves)
    for mine, theirs in zip(got, torch.autograd.grad(0.3 * total, leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)


def test_fp32_is_equal_to_its_rounding_and_without_a_gradient_nothing_else_changes():
    hidden, before, matrix, learned = operands(torch.float32)
    total, accept, _ = eager(hidden, before, matrix, learned, 0.1, 0.9)
    found = slot_loss(hidden, before, matrix, learned, Weighing())
    assert not found.total.requires_grad
    torch.testing.assert_close(found.total, total, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.accept_N, accept, rtol=1e-6, atol=1e-6)


def test_half_precision_keeps_the_matrix_gradient_in_fp32():
    hidden, before, matrix, learned = operands()
    exact = slot_loss(hidden, before, matrix.requires_grad_(), learned, Weighing()).total
    (expected,) = torch.autograd.grad(exact, matrix)
    single = matrix.detach().float().requires_grad_()
    half = Learned(learned.hidden_WE.bfloat16(), learned.head_VE.bfloat16(), *learned[2:])
    with torch.autocast("cpu", torch.bfloat16):
        loss = slot_loss(hidden.bfloat16(), before.float(), single, half, Weighing())
    (got,) = torch.autograd.grad(loss.total, single)
    assert got.dtype == loss.total.dtype == torch.float32
    assert 1e-4 < (got - expected).norm() / expected.norm() < 5e-2


@pytest.mark.gpu
def test_on_a_gpu_in_bf16_it_is_as_near_to_fp64_as_rounded_logits_allow():
    gen = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=gen, device="cuda").bfloat16()

    rows, tokens = 700, 49152
    head, teacher, before, matrix = draw(tokens, 128) * 0.3, draw(rows, 128), draw(rows, 64), draw(tokens, 64)
    hidden = teacher + 0.3 * draw(rows, 128)
    labels = torch.randint(tokens, (rows,), generator=gen, device="cuda")
    weights = torch.rand(rows, generator=gen, device="cuda")
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden, before, 0.03 * matrix)]
        learned = Learned(teacher.to(dtype), head.to(dtype), labels, weights)
        loss = slot_loss(*leaves, learned, Weighing())
        loss.total.backward()
        found.append((loss.total.double(), loss.accept_N.double(), [x.grad.double() for x in leaves]))
    (total, accept, grads), (exact_total, exact_accept, exact_grads) = found
    torch.testing.assert_close(total, exact_total, rtol=5e-3, atol=0)
    # a logit of 8 is rounded by up to 0.016 in bf16
    assert (accept - exact_accept).abs().max() < 0.04
    for grad, exact in zip(grads, exact_grads, strict=True):
        # rounded logits change the sign of q - p where q is near p
        assert (grad - exact).norm() < 0.3 * exact.norm()

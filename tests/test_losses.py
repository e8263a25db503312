"""Head losses against the plain formula that holds every logit."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from longtrain.losses import (
    IGNORE,
    fused_linear_ce,
    fused_linear_kl,
    fused_linear_top_kl,
    greedy_hits,
    top_tokens,
)

T, E, V = 23, 12, 57


@pytest.fixture
def parts():
    gen = torch.Generator().manual_seed(0)
    hidden, teacher = (torch.randn(T, E, generator=gen, dtype=torch.float64) for _ in range(2))
    head = torch.randn(V, E, generator=gen, dtype=torch.float64)
    labels = torch.randint(V, (T,), generator=gen)
    labels[::4] = IGNORE
    return hidden, teacher, head, labels


def plain_kl(hidden, teacher, head, mask):
    log_q, log_p = (torch.log_softmax(x @ head.t(), -1) for x in (hidden, teacher))
    return (log_p.exp() * (log_p - log_q)).sum(-1)[mask].sum()


@pytest.mark.parametrize("block_rows", [0, 1, 7, 23, 100])
def test_ce_equals_plain_formula(parts, block_rows):
    hidden, _, head, labels = parts
    a, b = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss = fused_linear_ce(a, head, labels, block_rows=block_rows)
    plain = functional.cross_entropy(b @ head.t(), labels, ignore_index=IGNORE, reduction="sum")
    (3 * loss).backward()
    (3 * plain).backward()
    torch.testing.assert_close(loss, plain, rtol=1e-13, atol=0)
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-13)


def test_ce_trains_a_head_that_asks_and_weights_rows(parts):
    hidden, _, head, labels = parts
    weights = torch.linspace(0, 2, T)
    mine, theirs = head.clone().requires_grad_(), head.clone().requires_grad_()
    loss = fused_linear_ce(hidden, mine, labels, weights_T=weights, block_rows=5)
    rows = functional.cross_entropy(hidden @ theirs.t(), labels, ignore_index=IGNORE, reduction="none")
    plain = (rows * weights).sum()
    loss.backward()
    plain.backward()
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("block_rows", [0, 1, 7, 100])
def test_kl_equals_plain_formula(parts, block_rows):
    hidden, teacher, head, labels = parts
    mask = labels != IGNORE
    a, b = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    got = fused_linear_kl(a, teacher, head, weights_T=mask.double(), block_rows=block_rows)
    plain = plain_kl(b, teacher, head, mask)
    (0.5 * got.total).backward()
    (0.5 * plain).backward()
    torch.testing.assert_close(got.total, plain, rtol=1e-12, atol=0)
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-13)
    agree = ((hidden @ head.t()).argmax(-1) == (teacher @ head.t()).argmax(-1)) & mask
    assert torch.equal(got.hit_T, agree)


def test_kl_weights_rows(parts):
    hidden, teacher, head, _ = parts
    weights = torch.linspace(0, 2, T, dtype=torch.float64)
    each = [plain_kl(hidden[i : i + 1], teacher[i : i + 1], head, slice(None)) for i in range(T)]
    outputs = (torch.stack(each) * weights).sum()
    torch.testing.assert_close(fused_linear_kl(hidden, teacher, head, weights_T=weights).total, outputs)


def test_kl_gradient_by_finite_differences(parts):
    hidden, teacher, head, _ = parts
    total = lambda h: fused_linear_kl(h, teacher[:4], head, block_rows=3).total  # noqa: E731
    assert torch.autograd.gradcheck(total, (hidden[:4].clone().requires_grad_(),))


def test_ce_gradient_by_finite_differences(parts):
    hidden, _, head, labels = parts
    total = lambda h, w: fused_linear_ce(h, w, labels[:5], block_rows=3)  # noqa: E731
    inputs = (hidden[:5].clone().requires_grad_(), head.clone().requires_grad_())
    assert torch.autograd.gradcheck(total, inputs)


def test_kl_of_itself_is_zero_and_teacher_and_head_get_no_gradient(parts):
    hidden, _, head, _ = parts
    student, teacher, head = (x.clone().requires_grad_() for x in (hidden, hidden, head))
    got = fused_linear_kl(student, teacher, head)
    got.total.backward()
    assert abs(got.total.item()) < 1e-12
    assert got.hit_T.all()
    assert student.grad.abs().max() < 1e-12
    assert teacher.grad is None
    assert head.grad is None


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_bf16_autocast_is_close_to_fp64(parts, loss):
    hidden, teacher, head, labels = parts
    h, t, w = (x.float() for x in (hidden, teacher, head.bfloat16()))
    h.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        if loss == "kl":
            got = fused_linear_kl(h, t, w).total
            outputs = plain_kl(hidden, teacher, head, slice(None))
        else:
            got = fused_linear_ce(h, w, labels)
            outputs = functional.cross_entropy(
                hidden @ head.t(), labels, ignore_index=IGNORE, reduction="sum"
            )
    got.backward()
    assert got.dtype == torch.float32  # summed in fp32; operands rounded to bf16: 2^-8 a logit
    assert h.grad.dtype == torch.float32
    torch.testing.assert_close(got.double(), outputs, rtol=3e-2, atol=0)


def test_hits_count_only_supervised_rows(parts):
    hidden, _, head, _ = parts
    labels = (hidden @ head.t()).argmax(-1)
    labels[3] = (labels[3] + 1) % V
    labels[5] = IGNORE
    hits = greedy_hits(hidden, head, labels, block_rows=4)
    assert (~hits).nonzero().flatten().tolist() == [3, 5]


def test_no_rows(parts):
    _, _, head, _ = parts
    empty = torch.zeros(0, E, dtype=torch.float64, requires_grad=True)
    assert fused_linear_kl(empty, empty, head).total == 0
    assert fused_linear_ce(empty, head, torch.zeros(0, dtype=torch.long)) == 0
    assert greedy_hits(empty, head, torch.zeros(0, dtype=torch.long)).shape == (0,)


@pytest.mark.gpu
def test_liger_equals_eager_twin_on_cuda(parts):
    hidden, _, head, labels = (x.cuda() for x in parts)
    a, b = (hidden.float().clone().requires_grad_() for _ in range(2))
    fused = fused_linear_ce(a, head.float(), labels)
    eager = fused_linear_ce(b, head.float(), labels, block_rows=5)
    fused.backward()
    eager.backward()
    torch.testing.assert_close(fused, eager, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("block_rows", [0, 7])
@pytest.mark.parametrize("k", [1, 5, V])
def test_top_kl_equals_the_kl_of_merged_laws(parts, k, block_rows):
    hidden, teacher, head, _ = parts
    weights = torch.linspace(0, 2, T, dtype=torch.float64)
    law = top_tokens(teacher, head, k)
    a, b = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    got = fused_linear_top_kl(a, law, head, weights_T=weights, block_rows=block_rows)
    (3 * got.total).backward()
    q, p = (torch.softmax(x @ head.t(), -1) for x in (b, teacher))
    q_k, p_k = (
        torch.cat([x.gather(-1, law.ids_TK), 1 - x.gather(-1, law.ids_TK).sum(-1, True)], -1) for x in (q, p)
    )
    if k == V:
        q_k, p_k = q_k[:, :V], p_k[:, :V]
    plain = ((p_k * (p_k / q_k).log()).sum(-1) * weights).sum()
    (3 * plain).backward()
    torch.testing.assert_close(got.total, plain, rtol=2e-6, atol=0)  # the law's numbers are fp32
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    whole = fused_linear_kl(hidden, teacher, head, weights_T=weights)
    assert torch.equal(got.hit_T, whole.hit_T) and got.total <= whole.total * (1 + 1e-6)
    if k == V:
        torch.testing.assert_close(got.total, whole.total, rtol=2e-6, atol=0)

"""A draft's loss: the kernels, interpreted, beside the reference implementation and fp64."""

import pytest
import torch

from longtrain.kernels import draft_loss as module
from longtrain.losses.draft import DRAFT_OBJECTIVES, DraftTeacher, fused_draft_loss


def case(J, R, W, E, V, K, dtype):
    """Random operands in fp64 that `dtype` can represent; some pairs do not exist."""
    gen = torch.Generator().manual_seed(J)

    def draw(*shape):
        return torch.randn(*shape, generator=gen).to(dtype).double()

    ids = torch.randperm(V, generator=gen)[:K].sort().values
    teacher = DraftTeacher(draw(W, E), draw(V, E), ids)
    rows = torch.stack([torch.randperm(R, generator=gen)[:W] for _ in range(J)])
    rows[torch.rand(J, W, generator=gen) < 0.2] = -1
    rows[0, 0] = 0
    passes = [draw(R, E) for _ in range(J)]
    for some, at in zip(passes, rows, strict=True):  # now and then both choose the same token
        some[at[at >= 0]] = (some[at[at >= 0]] + 2 * teacher.hidden_WE[at >= 0]).to(dtype).double()
    return passes, teacher.head_VE[ids].clone(), teacher, rows, torch.rand(J, W, generator=gen)


def loss_and_gradients(parts, dtype, *, trained, objective, block_rows=0):
    """The loss, where it hits, and the gradients of the passes and (where `trained`) of the head, in fp64."""
    passes, head, teacher, rows, weights = parts
    passes = [x.to(dtype).requires_grad_() for x in passes]
    head = head.to(dtype).requires_grad_(trained)
    teacher = DraftTeacher(*(x.to(dtype) for x in teacher[:2]), teacher.draft_ids_K)
    loss = fused_draft_loss(
        passes, head, teacher, rows, weights, objective=objective, kl_decay=1.7, block_rows=block_rows
    )
    leaves = [*passes, head] if trained else passes
    grads = torch.autograd.grad(0.3 * loss.total, leaves)
    return loss.total.detach().double(), loss.hit_T, [grad.double() for grad in grads]


@pytest.mark.corners
@pytest.mark.parametrize("objective", DRAFT_OBJECTIVES)
@pytest.mark.parametrize(
    ("J", "R", "W", "V", "K", "dtype"),
    [
        (1, 5, 4, 37, 37, torch.float32),
        (3, 7, 4, 300, 97, torch.float32),
        (3, 5, 4, 2500, 2100, torch.float32),
        (4, 5, 3, 300, 129, torch.bfloat16),
        (2, 4, 3, 2600, 2049, torch.float16),
    ],
)
def test_as_fp64_and_as_the_reference(J, R, W, V, K, dtype, objective, monkeypatch):
    """The kernels are as close to fp64 as the reference implementation in the same dtype."""
    parts = case(J, R, W, 8, V, K, dtype)
    trained = J != 2
    settings = {"trained": trained, "objective": objective}
    total, hits, grads = loss_and_gradients(parts, dtype, **settings, block_rows=3)
    exact_total, exact_hits, exact_grads = loss_and_gradients(parts, torch.float64, **settings)
    monkeypatch.setattr(module, "kernels_serve", lambda x: False)
    plain_total, plain_hits, plain_grads = loss_and_gradients(parts, dtype, **settings, block_rows=3)
    assert torch.equal(hits, plain_hits) and hits.any() and not hits.all()
    torch.testing.assert_close(total, plain_total, rtol=1e-5, atol=1e-6)
    loose = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 1e-1}[dtype]
    torch.testing.assert_close(total, exact_total, rtol=loose, atol=0)
    if dtype == torch.float32:
        assert torch.equal(hits, exact_hits)
    for mine, plain, exact in zip(grads, plain_grads, exact_grads, strict=True):
        assert (mine - exact).norm() <= loose * exact.norm()
        assert (mine - plain).norm() <= (1e-5 if dtype == torch.float32 else loose) * exact.norm()
    for grad, rows in zip(grads, parts[3], strict=False):
        left_out = torch.ones(R, dtype=torch.bool)
        left_out[rows[rows >= 0]] = False
        assert not grad[left_out].any()


@pytest.mark.parametrize("objective", DRAFT_OBJECTIVES)
def test_equal_logits_and_very_unlikely_tokens(objective, monkeypatch):
    """Of equal logits the first counts; a share of 0, and logits far apart, give finite numbers."""
    logits = torch.zeros(2, 3, 70)
    logits[0, 0] = 5.0
    logits[0, 1, 3], logits[1, 1, 69] = 300.0, -4e4
    logits[1, 2, 1] = 90.0
    teacher_logits = torch.zeros(3, 90)
    teacher_logits[0, [4, 8]] = 3.0
    teacher_logits[1, 2], teacher_logits[2, 88] = 250.0, 200.0
    ids = torch.arange(10, 80)
    ids[:8] = torch.arange(8)
    found = []
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setattr(module, "kernels_serve", lambda x: False)
        mine = logits.clone()
        rows, weights = torch.tensor([[0, 1, 2], [0, 1, -1]]), torch.rand(2, 3).fill_(0.5)
        weights[0, 2] = 0.0
        pairs = module.DraftPairs(rows, weights, torch.empty(2, 3), torch.empty(2, 3, dtype=torch.bool))
        teacher = module.teacher_of(teacher_logits, ids)
        module.draft_passes(mine, teacher, ids, pairs, objective=objective, kl_decay=3.0, gradient=True)
        found.append((*teacher, mine, pairs.value_JB, pairs.hit_JB))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert one.isfinite().all()


def test_without_a_gradient_the_logits_stay():
    logits = torch.randn(2, 3, 50)
    before, ids = logits.clone(), torch.arange(50)
    pairs = module.DraftPairs(
        torch.zeros(2, 3).long(), torch.ones(2, 3), torch.empty(2, 3), torch.empty(2, 3, dtype=torch.bool)
    )
    teacher = module.teacher_of(torch.randn(3, 64), ids)
    module.draft_passes(logits, teacher, ids, pairs, objective="lk", kl_decay=3.0, gradient=False)
    assert torch.equal(logits, before) and (pairs.value_JB > 0).all()


@pytest.mark.corners
@pytest.mark.parametrize("ce_share", [0.0, 1 / 19, 1.0, None], ids=lambda x: "hybrid" if x is None else None)
@pytest.mark.parametrize(
    ("B", "V", "dtype"), [(5, 37, torch.float32), (3, 2500, torch.float32), (4, 300, torch.bfloat16)]
)
def test_the_loss_of_blocks_as_fp64_and_as_the_reference(B, V, dtype, ce_share, monkeypatch):
    """`ce_tv` and `lk_hybrid` over one vocabulary; one position is missing, in one both agree."""
    gen = torch.Generator().manual_seed(B)
    teacher_logits, logits = torch.randn(2, B, V, generator=gen).mul(2).to(dtype)
    # the same token is most likely, and no probability is equal, where the gradient is not unique
    logits[0] = 1.25 * teacher_logits[0]
    labels, weights = torch.randint(V, (1, B), generator=gen), torch.rand(1, B, generator=gen)
    rows = torch.arange(B)[None].clone()
    rows[0, 2] = -1

    def run(kind):
        mine, wide = logits.to(kind)[None].clone(), torch.promote_types(kind, torch.float32)
        outputs = [torch.full((1, B), -9.0, dtype=wide) for _ in range(2)]
        hit = torch.ones(1, B, dtype=torch.bool)
        pairs = module.DraftPairs(rows, weights.to(wide), outputs[0], hit, labels, outputs[1])
        teacher = module.teacher_of(teacher_logits.to(kind), None)
        settings = {"objective": "ce_tv", "ce_share": ce_share}
        if ce_share is None:
            settings = {"objective": "lk_hybrid", "kl_decay": 1.7}
        module.draft_passes(mine, teacher, None, pairs, gradient=True, **settings)
        return [x.double() for x in (outputs[0], outputs[1], hit, mine)]

    got, exact = run(dtype), run(torch.float64)
    monkeypatch.setattr(module, "kernels_serve", lambda x: False)
    plain = run(dtype)
    assert got[2][0, 0] == 1 and not any(one[0, 2].any() for one in got)
    for mine, other, truth in zip(got[:3], plain[:3], exact[:3], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-6)
    loose = 1e-5 if dtype == torch.float32 else 1e-2
    assert (got[3] - exact[3]).norm() <= loose * exact[3].norm()
    assert (got[3] - plain[3]).norm() <= loose * exact[3].norm()

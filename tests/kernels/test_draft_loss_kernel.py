"""A draft's loss: the kernels compiled for compute capability 9.0, and run on a GPU at real sizes."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from longtrain.kernels import draft_loss
from longtrain.losses.draft import DRAFT_OBJECTIVES, DraftTeacher, fused_draft_loss


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted, not compiled")
def test_the_kernels_compile_for_hopper_without_spills():
    """Logits are loaded 16 bytes at once; the registers leave room for three programs of 256 threads."""
    import aot

    from longtrain.kernels.draft_loss import kernel as draft_loss_kernel

    types = {"logit_ptr": "*bf16", "ids_ptr": "*i64", "chosen_ptr": "*bf16", "all_ptr": "*fp32"}
    types |= {"known_ptr": "*fp32", "best_ptr": "*i64"}
    built = aot.compile_kernel(
        getattr(draft_loss_kernel, "_teacher_kernel"),  # noqa: B009 (the check of all kernels looks for the name)
        types,
        {"IDS": True, "COLUMNS": 2048},
        aligned=["logit_b", "V", "K"],
        warps=8,
    )
    assert built.stack_bytes == 0 and built.registers <= 64 and built.count("LDG.E.128")
    types |= {"row_ptr": "*i64", "weight_ptr": "*fp32", "value_ptr": "*fp32", "hit_ptr": "*i8"}
    types |= {"label_ptr": "*i64", "accept_ptr": "*fp32", "factor": "fp32"}
    for objective in range(draft_loss_kernel.CE_TV + 1):
        built = aot.compile_kernel(
            getattr(draft_loss_kernel, "_passes_kernel"),  # noqa: B009
            types,
            {
                "OBJECTIVE": objective,
                "GRADIENT": True,
                "IDS": objective != draft_loss_kernel.CE_TV,
                "COLUMNS": 2048,
            },
            aligned=["K"],
            warps=8,
        )
        assert built.stack_bytes == 0 and built.registers <= 80
        assert built.count("LDG.E.128") >= 4 and built.count("STG.E.128")


@pytest.mark.gpu
@pytest.mark.parametrize("objective", DRAFT_OBJECTIVES)
@pytest.mark.parametrize(("R", "V", "K", "J"), [(700, 49152, 16384, 5), (300, 128256, 32000, 3)])
def test_loss_and_gradients_on_a_gpu(objective, R, V, K, J, monkeypatch):
    """Against plain torch in fp64 from the same rounded operands, no further than plain torch in bf16 is.

    Logits in bf16 decide which of the target's and the draft's probabilities is smaller, so the gradients of
    the accepted share are far from fp64 either way.
    """
    gen = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=gen, device="cuda").bfloat16()

    ids = torch.randperm(V, generator=gen, device="cuda")[:K].sort().values
    head, states = draw(V, 128) * 0.3, draw(R, 128)
    own = head[ids] + 0.1 * draw(K, 128)
    passes = [states + 0.5 * draw(R, 128) for _ in range(J)]
    rows = torch.arange(R, device="cuda") - torch.arange(J, device="cuda")[:, None]
    rows = rows.where(rows >= 0, -1)
    weights = torch.rand(J, R, generator=gen, device="cuda")
    found = []
    for dtype, kernels in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float64, False)):
        if not kernels:
            monkeypatch.setattr(draft_loss, "kernels_serve", lambda _: False)
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in (*passes, own)]
        shifted = [x[: R - j] for j, x in enumerate(leaves[:-1])]
        shifted = [torch.cat((x, x.new_zeros(R - len(x), x.shape[1]))) for x in shifted]
        teacher = DraftTeacher(states.to(dtype), head.to(dtype), ids)
        loss = fused_draft_loss(shifted, leaves[-1], teacher, rows, weights, objective=objective)
        loss.total.backward()
        found.append((loss.total.double(), loss.hit_T, [x.grad.double() for x in leaves]))
    (total, hits, grads), (_, _, plain_grads), (exact_total, exact_hits, exact_grads) = found
    torch.testing.assert_close(total, exact_total, rtol=5e-3, atol=0)
    assert (hits != exact_hits).float().mean() < 0.03  # logits in bf16 are often equal
    for grad, plain, exact in zip(grads, plain_grads, exact_grads, strict=True):
        assert (grad - exact).norm() < 1.05 * (plain - exact).norm() + 0.005 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("objective", DRAFT_OBJECTIVES)
def test_the_kernels_equal_the_reference_on_a_gpu(objective, monkeypatch):
    """From the same logits: values to 1e-4, hits exactly, gradients to the rounding of bf16."""
    gen = torch.Generator("cuda").manual_seed(1)
    J, B, V, K = 3, 65, 49152, 16384
    ids = torch.randperm(V, generator=gen, device="cuda")[:K].sort().values
    teacher_logits = torch.randn(B, V, generator=gen, device="cuda").mul(3).bfloat16()
    logits = torch.randn(J, B, K, generator=gen, device="cuda").mul(3).bfloat16()
    logits[:, ::2] = teacher_logits[::2, ids]
    rows = torch.randint(-1, 4, (J, B), generator=gen, device="cuda")
    weights = torch.rand(J, B, generator=gen, device="cuda")
    found = []
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setattr(draft_loss, "kernels_serve", lambda x: False)
        mine = logits.clone()
        pairs = draft_loss.DraftPairs(rows, weights, torch.empty_like(weights), rows > 0)
        teacher = draft_loss.teacher_of(teacher_logits, ids)
        draft_loss.draft_passes(mine, teacher, ids, pairs, objective=objective, kl_decay=3.0, gradient=True)
        found.append((pairs.value_JB, pairs.hit_JB, mine.float(), teacher.best_B))
    (value, hits, grad, best), (exact_value, exact_hits, exact_grad, exact_best) = found
    torch.testing.assert_close(value, exact_value, rtol=1e-4, atol=1e-5)
    assert torch.equal(best, exact_best) and torch.equal(hits, exact_hits) and hits.any()
    assert (grad - exact_grad).norm() < 0.01 * exact_grad.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("objective", ["ce_tv", "lk_hybrid"])
def test_the_loss_of_blocks_equals_the_reference_on_a_gpu(monkeypatch, objective):
    """Losses and accepted share over one vocabulary: values to 1e-4, gradients to bf16's rounding."""
    gen = torch.Generator("cuda").manual_seed(1)
    B, V = 65, 128256
    teacher_logits = torch.randn(B, V, generator=gen, device="cuda").mul(3).bfloat16()
    logits = torch.randn(1, B, V, generator=gen, device="cuda").mul(3).bfloat16()
    # near the teacher's, not equal to them: there the sign of q - p depends on the order of a sum
    logits[0, ::2] = teacher_logits[::2] + 0.1 * logits[0, ::2]
    labels = torch.randint(V, (1, B), generator=gen, device="cuda")
    weights = torch.rand(1, B, generator=gen, device="cuda")
    found = []
    for kernels in (True, False):
        if not kernels:
            monkeypatch.setattr(draft_loss, "kernels_serve", lambda x: False)
        mine, outputs = logits.clone(), [torch.empty_like(weights) for _ in range(2)]
        pairs = draft_loss.DraftPairs(
            torch.zeros_like(labels), weights, outputs[0], labels < 0, labels, outputs[1]
        )
        teacher = draft_loss.teacher_of(teacher_logits, None)
        settings = {"objective": objective, "ce_share": 0.05, "kl_decay": 3.0, "gradient": True}
        draft_loss.draft_passes(mine, teacher, None, pairs, **settings)
        found.append((pairs.value_JB, pairs.accept_JB, pairs.hit_JB, mine.float()))
    (value, accept, hits, grad), (exact_value, exact_accept, exact_hits, exact_grad) = found
    torch.testing.assert_close(value, exact_value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(accept, exact_accept, rtol=1e-4, atol=1e-5)
    assert torch.equal(hits, exact_hits) and hits.any()
    assert (grad - exact_grad).norm() < 0.01 * exact_grad.norm()

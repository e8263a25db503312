"""The loss of drafted tokens with a Markov correction of the LM head, a block of rows at a time.

With z = h U' + b W2' the logits of a slot (h the draft's state, U its head, b the Markov embedding of
the token before), q = softmax(z), p the target's distribution and y the token of the data:

    ce_l1      value = ce * (-log q_y) + l1 * sum |q - p|
               d value / dz = ce * (q - 1_y) + l1 * q * (s - sum q s),  s = sign(q - p)
    lk_hybrid  EAGLE-3's: value = w KL(p | q) + (1 - w) (1 - a),
               w = exp(-kl_decay a),  a = 1 - sum |q - p| / 2

With a vocabulary of the draft's own q is over its tokens, and `losses.draft` says what the hybrid is then.

With a selector W2 and b are its table and its context, and this loss is that of u = h U' alone. To it comes
the cross-entropy of the choice among the C candidates of the largest u, with scores u + b W2':

    value += selector * (-log softmax(score)_y),  y the target's likeliest token

Where y is no candidate it replaces the last one, in training alone, as in speculators 0.9.0 (DFlash2's
authors have not published an objective).

Shapes: N slots, W tokens that slots predict, E hidden dim, V vocabulary, K tokens that the draft can propose
(V, unless it has a vocabulary of its own), F rank of the Markov head, R slots of a block, C candidates, D
candidates and the target's token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longtrain.data.packing.packed_sequences import to_device
from longtrain.kernels.draft_loss import DraftPairs, TeacherLogits, draft_passes, teacher_of
from longtrain.losses.blocks import kernel_rows_of, operands, plain, scaled


class SlotLoss(NamedTuple):
    """The loss of drafted tokens.

    Args:
        total: weighted sum, with a gradient, nats; fp32 (fp64 in fp64).
        accept_N: share of the draft's samples that the target accepts, 1 - |q - p|_1 / 2; no gradient.
        hit_N: bool, the draft's most likely token is the target's; no gradient.
        known_N: bool, the target's likeliest token is a candidate; True without a selector; no gradient.
    """

    total: Tensor
    accept_N: Tensor
    hit_N: Tensor
    known_N: Tensor


class Weighing(NamedTuple):
    """What a slot's loss is made of.

    Args:
        objective: ce_l1 or lk_hybrid.
        ce: for ce_l1 the factor of the cross-entropy to the data.
        l1: for ce_l1 the factor of the L1 distance to the target's distribution.
        kl_decay: for lk_hybrid how fast the weight of the KL divergence falls with the accepted share.
        selector: factor of the cross-entropy of the choice among candidates.
        candidates: C; 0: there is no selector.
    """

    objective: str = "ce_l1"
    ce: float = 0.1
    l1: float = 0.9
    kl_decay: float = 3.0
    selector: float = 1.0
    candidates: int = 0


class Learned(NamedTuple):
    """What the slots learn.

    Args:
        hidden_WE: the target's input of its head for each token that slots predict.
        head_VE: its head.
        labels_N: the token of the data.
        weights_N: weight of each slot.
        token_N: which of the W tokens each slot predicts, on the host, so that slots which predict the same
            token share its distribution; None: W = N, in order.
        draft_ids_K: the target's token id of each token of the draft's vocabulary; None: all tokens.
    """

    hidden_WE: Tensor
    head_VE: Tensor
    labels_N: Tensor
    weights_N: Tensor
    token_N: Tensor | None = None
    draft_ids_K: Tensor | None = None

    def teacher(self, part: slice) -> TeacherLogits:
        """Return the target's distributions for some slots."""
        if self.token_N is None:
            return teacher_of(self.hidden_WE[part] @ self.head_VE.t(), self.draft_ids_K)
        token_R = self.token_N[part]
        low, high = int(token_R.min()), int(token_R.max()) + 1
        found = teacher_of(self.hidden_WE[low:high] @ self.head_VE.t(), self.draft_ids_K)
        at_R = to_device(token_R - low, self.hidden_WE.device)
        return TeacherLogits(*(each[at_R] for each in found))


def slot_loss(
    hidden_NE: Tensor,
    before_NF: Tensor | None,
    markov_KF: Tensor | None,
    learned: Learned,
    weighing: Weighing,
    *,
    head_KE: Tensor | None = None,
    block_rows: int = 0,
) -> SlotLoss:
    """Weighted sum of the slots' losses; the logits of one block of slots exist at a time.

    Gradients for the draft's states, the Markov embeddings, the Markov matrix and the draft's own head are
    computed in the forward; the last two are summed in fp32 (fp64 in fp64).

    Args:
        hidden_NE: the draft's input of the head.
        before_NF: context of each slot (`heads.PathHead`), such as the Markov embedding of the token before;
            None: no correction.
        markov_KF: the matrix W2; None: no correction.
        learned: what to learn; no gradient flows into it.
        weighing: the objective and its factors; ce_l1 and candidates need the whole vocabulary.
        head_KE: the draft's own head; None: the target's.
        block_rows: slots whose logits exist at once; 0: as many as fit the budget.

    Source: DSpark eq. 9-11; the authors' code, whose L1 distance has no half.
    """
    hidden_NE, head_VE = operands(hidden_NE, learned.head_VE.detach())
    learned = learned._replace(hidden_WE=learned.hidden_WE.detach().to(hidden_NE.dtype), head_VE=head_VE)
    if before_NF is not None and markov_KF is not None:
        before_NF = before_NF.to(hidden_NE.dtype)
    drafted = len(head_VE) if head_KE is None else len(head_KE)
    rows = block_rows or kernel_rows_of(head_VE, len(head_VE) + 2 * drafted, len(hidden_NE))
    return SlotLoss(*_SlotLoss.apply(hidden_NE, before_NF, markov_KF, head_KE, learned, (weighing, rows)))


class _SlotLoss(torch.autograd.Function):
    """Computes gradients in the forward, block by block; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        before_NF: Tensor | None,
        markov_KF: Tensor | None,
        own_KE: Tensor | None,
        learned: Learned,
        settings: tuple[Weighing, int],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `slot_loss`."""
        (weighing, rows), (labels_N, weights_N) = settings, (learned.labels_N, learned.weights_N)
        head_KE = learned.head_VE if own_KE is None else own_KE.to(hidden_NE.dtype)
        wide = torch.promote_types(hidden_NE.dtype, torch.float32)
        authors = weighing.objective == "ce_l1"
        # of the kernel's loss; the L1 distance is twice the refused share
        scale = weighing.ce + 2 * weighing.l1 if authors else 1.0
        label_1N, weight_1N = labels_N[None], (weights_N.to(wide) * scale)[None]
        hit_1N = torch.empty_like(label_1N, dtype=torch.bool)
        known_N = torch.ones_like(hit_1N[0])
        value_1N, accept_1N = torch.empty_like(weight_1N), torch.empty_like(weight_1N)
        pairs = (torch.zeros_like(label_1N), weight_1N, value_1N, hit_1N, label_1N, accept_1N)
        w2_KF = None if markov_KF is None else markov_KF.to(hidden_NE.dtype)
        need = any(ctx.needs_input_grad[:4])
        grad_NE = torch.empty_like(hidden_NE) if need else None
        grad_NF = torch.empty_like(before_NF) if need and before_NF is not None else None
        grad_KF = torch.zeros_like(markov_KF, dtype=wide) if need and markov_KF is not None else None
        grad_KE = torch.zeros_like(own_KE, dtype=wide) if need and own_KE is not None else None
        with plain(hidden_NE):
            for a in range(0, len(labels_N), rows):
                part = slice(a, a + rows)
                z_RK = hidden_NE[part] @ head_KE.t()
                teacher, choice = learned.teacher(part), None
                if before_NF is not None and w2_KF is not None and weighing.candidates:
                    factor_R = weights_N[part].to(wide) * weighing.selector
                    choice = _choose(z_RK, before_NF[part], w2_KF, teacher, factor_R, weighing.candidates)
                elif before_NF is not None and w2_KF is not None:
                    z_RK.addmm_(before_NF[part], w2_KF.t())
                draft_passes(
                    z_RK[None],
                    teacher,
                    learned.draft_ids_K,
                    DraftPairs(*(one_1N[:, part] for one_1N in pairs)),
                    objective="ce_tv" if authors else weighing.objective,
                    gradient=need,
                    ce_share=weighing.ce / scale,
                    kl_decay=weighing.kl_decay,
                )
                # the logits are their gradient now
                if choice is not None:
                    value_1N[0, part] += choice.value_R
                    accept_1N[0, part], hit_1N[0, part] = choice.accept_R, choice.hit_R
                    known_N[part] = choice.known_R
                    z_RK.scatter_add_(1, choice.ids_RD, choice.grad_RD.to(z_RK.dtype))
                if grad_NE is not None:
                    grad_NE[part] = z_RK @ head_KE
                if grad_NF is not None and grad_KF is not None and before_NF is not None:
                    assert w2_KF is not None
                    if choice is None:
                        grad_NF[part] = z_RK @ w2_KF
                        grad_KF += z_RK.t() @ before_NF[part]
                    else:
                        grad_RD1 = choice.grad_RD[..., None]
                        grad_NF[part] = (grad_RD1 * w2_KF[choice.ids_RD]).sum(1)
                        each_RDF = grad_RD1 * before_NF[part][:, None]
                        grad_KF.index_add_(0, choice.ids_RD.flatten(), each_RDF.flatten(0, 1))
                if grad_KE is not None:
                    grad_KE += z_RK.t() @ hidden_NE[part]
        ctx.save_for_backward(grad_NE, grad_NF, grad_KF, grad_KE)
        ctx.dtypes = [None if one is None else one.dtype for one in (markov_KF, own_KE)]
        accept_N, hit_N = accept_1N[0], hit_1N[0]
        ctx.mark_non_differentiable(accept_N, hit_N, known_N)
        return value_1N.sum(), accept_N, hit_N, known_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The stored gradients times the incoming one."""
        hidden, before, *summed = (scaled(grad, grads[0]) for grad in ctx.saved_tensors)
        pairs = zip(summed, ctx.dtypes, strict=True)
        markov, head = (one if one is None else one.to(dtype) for one, dtype in pairs)
        return hidden, before, markov, head, None, None


class _Choice(NamedTuple):
    """The choice among the candidates of some slots.

    Args:
        value_R: weighted cross-entropy.
        accept_R: as in `SlotLoss`, of the choice that decoding makes.
        hit_R: likewise.
        known_R: as in `SlotLoss`.
        ids_RD: the candidates and the target's token.
        grad_RD: gradient of the weighted cross-entropy to their scores; 0 for the one that is left out.
    """

    value_R: Tensor
    accept_R: Tensor
    hit_R: Tensor
    known_R: Tensor
    ids_RD: Tensor
    grad_RD: Tensor


def _choose(
    base_RK: Tensor, context_RF: Tensor, codes_KF: Tensor, teacher: TeacherLogits, weight_R: Tensor, top: int
) -> _Choice:
    """Score the candidates of some slots, and learn to choose the target's token among as many."""
    at_RC = base_RK.topk(min(top, base_RK.shape[1])).indices
    C, label_R1 = at_RC.shape[1], teacher.best_B[:, None]
    same_RC = at_RC == label_R1
    known_R1 = same_RC.any(1, keepdim=True)
    ids_RD = torch.cat((at_RC, label_R1), 1)
    score_RD = base_RK.gather(1, ids_RD) + (codes_KF[ids_RD] @ context_RF[..., None])[..., 0]
    score_RD = score_RD.to(weight_R.dtype)
    # the token is counted once; where it is no candidate, it takes the place of the last
    left_out_R1 = torch.where(known_R1, C, C - 1)
    logp_RD = score_RD.scatter(1, left_out_R1, float("-inf")).log_softmax(1)
    place_R1 = torch.where(known_R1, same_RC.int().argmax(1, keepdim=True), C)
    value_R = -logp_RD.gather(1, place_R1)[:, 0] * weight_R
    grad_RD = logp_RD.exp().scatter_add(1, place_R1, -torch.ones_like(logp_RD[:, :1])) * weight_R[:, None]
    served_RC = score_RD[:, :C]
    p_RC = (teacher.logit_BK.gather(1, at_RC).to(weight_R.dtype) - teacher.all_B[:, None]).exp()
    accept_R = torch.minimum(served_RC.softmax(1), p_RC).sum(1)
    hit_R = same_RC.gather(1, served_RC.argmax(1, keepdim=True))[:, 0]
    return _Choice(value_R, accept_R, hit_R, known_R1[:, 0], ids_RD, grad_RD)

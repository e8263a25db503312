"""Reference implementation of the draft's recursion over given tokens, which runtimes and engines must equal.

The training-time test and decoding are the same arithmetic: a chain continues from a position of the prompt,
and at depth k it is k positions further and also sees its own keys of the depths before (EAGLE-3 §3.2).

Shapes: T positions of the prompt, R of them that chains start from, K depths, E hidden dim, H query heads, G
KV heads, D head dim, V tokens of the draft's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from longtrain.methods.eagle3.config import Config
    from longtrain.methods.eagle3.modules import Eagle3Draft

Rope = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Function from positions [T] to cos and sin, each [T, D]."""


@dataclass(frozen=True)
class Chains:
    """Outputs of the chains at every depth.

    Args:
        logits_KRV: the draft's logits over its own vocabulary.
        mixed_KRHD: attention output, before the output projection.
    """

    logits_KRV: Tensor
    mixed_KRHD: Tensor


def rows_back(config: Config, depths: int) -> tuple[int, ...] | None:
    """Return how many prompt positions before its own a chain sees at each depth, as in engines; None: all.

    The window moves with the chain: at depth k, the chain's own tokens take up k of its places.
    """
    return tuple(max(config.window - depth, -1) for depth in range(depths)) if config.window else None


def recursion(
    module: Eagle3Draft,
    feature_TE: Tensor,
    embeds: tuple[Tensor, Tensor],
    *,
    rope: Rope,
    pos_T: Tensor,
    back_K: Sequence[int] | None = None,
    sinks: int = 0,
) -> Chains:
    """Compute chains of given tokens from the last R positions of a prompt.

    Args:
        module: the draft.
        feature_TE: feature of each position (`module.feature`).
        embeds: embeddings of each position's token [T, E], and of the given tokens at later depths [K-1, R,
            E].
        rope: the draft's rotary embedding.
        pos_T: positions, ascending, int64; gaps are allowed.
        back_K: number of positions before its own that a chain sees at each depth; None: all.
        sinks: first positions that are always seen.
    """
    first_TE, later_KRE = embeds
    n_chains = later_KRE.shape[1]
    attention, start_R = module.self_attn, pos_T[-n_chains:]
    entry, residual = module.enter(first_TE, feature_TE)
    k_TGD, v_TGD = attention.keys_values(entry, rope(pos_T))
    entry, residual, feature = entry[-n_chains:], residual[-n_chains:], feature_TE[-n_chains:]
    own: list[tuple[Tensor, Tensor]] = []
    logits, gathered = [], []
    for depth in range(len(later_KRE) + 1):
        turn = rope(start_R + depth)
        if depth:
            entry, residual = module.enter(later_KRE[depth - 1], feature)
            own.append(attention.keys_values(entry, turn))
        seen_RT = pos_T <= start_R[:, None]
        if back_K is not None:
            near_RT = pos_T >= start_R[:, None] - back_K[depth]
            seen_RT = seen_RT & (near_RT | (pos_T < sinks))
        mixed_RHD = _attend(attention.query(entry, turn), k_TGD, v_TGD, own, seen_RT, module.scale)
        out, feature = module.after_attention(residual, mixed_RHD)
        logits.append(module.lm_head(out))
        gathered.append(mixed_RHD)
    return Chains(torch.stack(logits), torch.stack(gathered))


def _attend(
    q_RHD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    own: list[tuple[Tensor, Tensor]],
    seen_RT: Tensor,
    scale: float,
) -> Tensor:
    """Return each chain's attention to the prompt positions it sees and to its own keys: [R, H, D]."""
    groups = q_RHD.shape[1] // k_TGD.shape[1]
    k_THD, v_THD = (part.repeat_interleave(groups, dim=1) for part in (k_TGD, v_TGD))
    scores = [(torch.einsum("rhd,thd->rht", q_RHD, k_THD) * scale).masked_fill(~seen_RT[:, None], -torch.inf)]
    values = []
    for k_RGD, v_RGD in own:
        k_RHD, v_RHD = (part.repeat_interleave(groups, dim=1) for part in (k_RGD, v_RGD))
        scores.append((q_RHD * k_RHD).sum(-1, keepdim=True) * scale)
        values.append(v_RHD)
    share = torch.cat(scores, dim=-1).softmax(-1)
    mixed = torch.einsum("rht,thd->rhd", share[..., : len(k_THD)], v_THD)
    for index, v_RHD in enumerate(values):
        mixed = mixed + share[..., len(k_THD) + index, None] * v_RHD
    return mixed

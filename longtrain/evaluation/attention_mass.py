"""How much of the target's attention a draft's window cannot see, at the layer whose K and V the draft reads.

Shapes: T context tokens, R query rows, H query heads, G KV heads, D head dim, E hidden dim, B batch (1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from longtrain.layers import apply_rope
from longtrain.targets.step import Rows, Want

if TYPE_CHECKING:
    from longtrain.targets.model import Target

ROWS = 16
SINKS = 4


@dataclass(frozen=True)
class AttentionMass:
    """Shares of the attention of the last rows of a context, averaged over rows and heads.

    Args:
        outside: share on tokens before the window.
        outside_no_sinks: the same without the first `SINKS` tokens of the context (attention sinks).
    """

    outside: float
    outside_no_sinks: float


@torch.no_grad()
def attention_mass(
    target: Target, prompt: Sequence[int], *, layer: int, window: int, rows: int = ROWS
) -> AttentionMass:
    """Measure it for the last `rows` tokens of a prompt.

    Args:
        target: the frozen model.
        prompt: token ids.
        layer: whose queries and keys; negative counts from the end.
        window: previous tokens that count as inside, besides the token itself.
        rows: queries.
    """
    layer %= target.info.n_layers
    ids_T = torch.tensor(list(prompt), device=target.device)
    pos_T = torch.arange(len(ids_T), device=target.device)
    want = Want("none", stop_at_layer=layer, kv=(layer,))
    k_TGD, _ = target.packed(ids_T, pos_T, (0, len(ids_T)), want).kv[layer]
    q_RHD, pos_R = _queries(target, ids_T, pos_T, layer=layer, rows=rows)
    k_THD = k_TGD.repeat_interleave(target.info.n_heads // target.info.n_kv_heads, dim=1)
    scores_HRT = torch.einsum("rhd,thd->hrt", q_RHD.float(), k_THD.float()) * target.info.head_dim**-0.5
    visible_RT = pos_T[None] <= pos_R[:, None]
    probs_HRT = scores_HRT.masked_fill(~visible_RT, float("-inf")).softmax(-1)
    outside_RT = pos_T[None] < pos_R[:, None] - window
    no_sinks_RT = outside_RT & (pos_T[None] >= SINKS)
    return AttentionMass(
        *(float((probs_HRT * seen_RT).sum(-1).mean().double()) for seen_RT in (outside_RT, no_sinks_RT))
    )


def _queries(target: Target, ids_T: Tensor, pos_T: Tensor, *, layer: int, rows: int) -> tuple[Tensor, Tensor]:
    """The layer's queries of the last rows, after q_norm and RoPE, and their positions."""
    if layer == 0:
        hidden_TE = target.embed(ids_T)
    else:
        cache = target.new_cache(1, len(ids_T), 1)
        want = Want(logits="none", hidden=(layer - 1,), stop_at_layer=layer)
        hidden_TE = target.forward(Rows(pos_T[None], ids_T[None]), cache, want=want).hidden[layer - 1][0]
    info, state = target.info, target.layer_state(layer)
    hidden_RE, pos_R = hidden_TE[-rows:], pos_T[-rows:]
    normed_RE = _rms(hidden_RE, state["input_layernorm.weight"], info.rms_norm_eps)
    q_RX = linear(normed_RE, state["self_attn.q_proj.weight"], state.get("self_attn.q_proj.bias"))
    q_RHD = q_RX.unflatten(-1, (info.n_heads, info.head_dim))
    if info.qk_norm:
        q_RHD = _rms(q_RHD, state["self_attn.q_norm.weight"], info.rms_norm_eps)
    cos_BTD, sin_BTD = target.rope(pos_R[None])
    return apply_rope(q_RHD, (cos_BTD[0], sin_BTD[0])), pos_R


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)

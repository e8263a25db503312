"""The small operators between a decoder layer's matrix products, one launch each instead of three to ten.

`add_rms_norm`: s = x + d, n = s / rms(s) * w.  `rotate_heads`: RMSNorm of each query and key head if the
model has it, then RoPE, in place, and new keys and values to their positions in a cache.  `swiglu`: silu(g) *
u. `write_rows`: new keys and values to their cache positions alone.  `rotary`: cos and sin of positions.
`enter_rows`: the input of a step's first layer: embeddings, their RMSNorm, cos and sin.

Triton on a GPU of compute capability 8.0 or more in fp32, bf16 and fp16, if no gradient is needed
(interpreted under TRITON_INTERPRET=1 on any device); plain torch everywhere else, in this file. Both compute
in fp32 or wider inside.

Shapes: B batch, T new tokens, N = B * T tokens, S cache positions, V vocabulary, E hidden dim, I intermediate
dim, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, silu

from longtrain.kernels.devices import kernels_serve
from longtrain.kernels.fused_layer.slots import Angles, Rotation, RowPositions, Slots

__all__ = [
    "Angles",
    "Norms",
    "Rotation",
    "RowPositions",
    "Slots",
    "add_rms_norm",
    "enter_rows",
    "move_entries",
    "rotary",
    "rotate_heads",
    "rotated",
    "swiglu",
    "write_rows",
]

Norms = tuple[Tensor, Tensor]
"""Weights [D] of the RMSNorm of query heads and of key heads."""


def enter_rows(
    ids_BT: Tensor,
    table_VE: Tensor,
    norm: tuple[Tensor, float],
    at: RowPositions,
    rotation: Rotation,
    *,
    path_BT: Tensor | None = None,
    normed_NE: Tensor | None = None,
    embed_scale: float = 1.0,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Input of the first layer for a step's tokens, in one launch: embeddings, their norm, and rotary angles.

    Args:
        ids_BT: token ids, int64, of any strides.
        table_VE: embeddings.
        norm: weight [E] and epsilon of the RMSNorm that follows.
        at: positions of the tokens.
        rotation: the rotary embedding, in the embeddings' dtype.
        path_BT: index into the ids for each token, int64; None: token t has the t-th id.
        normed_NE: output buffer, last dim contiguous; None: a new one.
        embed_scale: factor on the embeddings, a number of their dtype (`Target.embed_scale`).

    Returns:
        x_NE, its norm normed_NE, and cos and sin, each [N, D].
    """
    if isinstance(rotation, Angles) and kernels_serve(table_VE):
        from longtrain.kernels.fused_layer import kernel

        return kernel.enter_rows(ids_BT, table_VE, *norm, at, rotation, path_BT, normed_NE, embed_scale)
    ids = ids_BT if path_BT is None else ids_BT.gather(1, path_BT)
    x_NE, pos_BT = embedding(ids, table_VE).flatten(0, 1), at.sum()
    x_NE = x_NE if embed_scale == 1 else x_NE * embed_scale
    if isinstance(rotation, Angles):
        rope = rotary(pos_BT.reshape(-1), rotation.frequency_F, rotation.scaling, x_NE.dtype)
    else:
        cos_BTD, sin_BTD = rotation(pos_BT)
        rope = cos_BTD.flatten(0, 1), sin_BTD.flatten(0, 1)
    return x_NE, add_rms_norm(x_NE, None, *norm, normed_NE=normed_NE)[1], rope


def add_rms_norm(
    x_NE: Tensor, add_NE: Tensor | None, weight_E: Tensor, eps: float, *, normed_NE: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The residual stream after an addition, and its RMSNorm.

    Args:
        x_NE: residual stream.
        add_NE: output of attention or MLP to add; None: nothing, and the first result is `x_NE` itself.
        weight_E: weight of the norm.
        eps: epsilon of the norm.
        normed_NE: output buffer, last dim contiguous; None: a new one.

    Returns:
        sum_NE and normed_NE in x's dtype; the norm is of the rounded sum.
    """
    if kernels_serve(x_NE):
        from longtrain.kernels.fused_layer import kernel

        return kernel.add_rms_norm(x_NE, add_NE, weight_E, eps, normed_NE)
    sum_NE = x_NE if add_NE is None else x_NE + add_NE
    new_NE = _normed(sum_NE, weight_E, eps)
    return sum_NE, new_NE if normed_NE is None else normed_NE.copy_(new_NE)


def rotate_heads(
    qkv_NX: Tensor,
    rope: tuple[Tensor, Tensor],
    heads: tuple[int, int],
    *,
    norms: Norms | None = None,
    eps: float = 1e-6,
    into: Slots | None = None,
    neighbours: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one product: normed and rotated, in place in the kernel.

    Args:
        qkv_NX: query, key and value heads side by side, X = (H + 2 G) D; not to be used afterwards.
        rope: cos and sin, each [N, R] with both halves alike; dims of a head from R on are not rotated.
        heads: H and G.
        norms: RMSNorm weights of heads (Qwen3).
        eps: epsilon of those norms.
        into: cache positions that keys and values are written to as well; row n is token n % T of sequence n
            // T. None: none.
        neighbours: pair dims 2i and 2i + 1 (GLM-4) instead of i and i + R / 2 (Llama).

    Returns:
        q_NHD, k_NGD and v_NGD, views of one buffer.
    """
    H, G = heads
    qkv_NHD = qkv_NX.unflatten(-1, (H + 2 * G, -1))
    if kernels_serve(qkv_NX) and (into is None or into.k_BGSD.dtype == qkv_NX.dtype):
        from longtrain.kernels.fused_layer import kernel

        kernel.rotate_heads(qkv_NHD, rope, heads, norms, eps, into, neighbours)
        return qkv_NHD[:, :H], qkv_NHD[:, H : H + G], qkv_NHD[:, H + G :]
    q_NHD, k_NGD, v_NGD = qkv_NHD.split((H, G, G), dim=1)
    if norms is not None:
        q_NHD, k_NGD = _normed(q_NHD, norms[0], eps), _normed(k_NGD, norms[1], eps)
    q_NHD, k_NGD = (_rotated(part, rope, neighbours) for part in (q_NHD, k_NGD))
    if into is not None:
        k_BGTD, v_BGTD = (
            part.unflatten(0, (len(into.slot_B), -1)).transpose(1, 2) for part in (k_NGD, v_NGD)
        )
        write_rows(k_BGTD, v_BGTD, into)
    return q_NHD, k_NGD, v_NGD


def swiglu(gate_up_NX: Tensor) -> Tensor:
    """`silu(gate) * up` [N, I] from gate and up side by side, [N, 2 I]."""
    if kernels_serve(gate_up_NX):
        from longtrain.kernels.fused_layer import kernel

        return kernel.swiglu(gate_up_NX)
    gate_NI, up_NI = gate_up_NX.chunk(2, dim=-1)
    return silu(gate_NI) * up_NI


def write_rows(k_BGTD: Tensor, v_BGTD: Tensor, into: Slots) -> None:
    """Copy new keys and values to their cache positions.

    Args:
        k_BGTD: new keys, last dim contiguous.
        v_BGTD: new values, likewise.
        into: the cache positions.
    """
    if kernels_serve(k_BGTD) and k_BGTD.dtype == into.k_BGSD.dtype:
        from longtrain.kernels.fused_layer import kernel

        kernel.write_rows(k_BGTD, v_BGTD, into)
        return
    slot_BT = into.rows(k_BGTD.shape[2])
    row_B1 = torch.arange(len(slot_BT), device=slot_BT.device)[:, None]
    for buffer, new in ((into.k_BGSD, k_BGTD), (into.v_BGSD, v_BGTD)):
        if into.per_head:
            buffer[0, 0][slot_BT] = new.to(buffer.dtype)
            continue
        rows_BTGD = new.transpose(1, 2).to(buffer.dtype)
        if into.count_B is not None:  # other positions keep their present entries
            stored_BT = torch.arange(new.shape[2], device=slot_BT.device) < into.count_B[:, None]
            rows_BTGD = torch.where(stored_BT[..., None, None], rows_BTGD, buffer[row_B1, :, slot_BT])
        buffer[row_B1, :, slot_BT] = rows_BTGD


def move_entries(
    k_LBGSD: Tensor, v_LBGSD: Tensor, first_B: Tensor, path_BP: Tensor, wrap: int | None
) -> None:
    """Move accepted entries to the beginning of a step, in all layers and in place: `path_BP[b, p]` to p.

    Args:
        k_LBGSD: buffer of keys, last dim contiguous.
        v_LBGSD: buffer of values, of the same strides.
        first_B: cache position of each sequence's first entry of the step, int64, on the device. Where heads
            have different numbers of entries: of each layer, sequence and KV head, [L, B, G], in one buffer
            [S, D] of all of them, which `k_LBGSD` and `v_LBGSD` are expanded from.
        path_BP: indices of entries, increasing up to the accepted length, so that none is below p; int64.
        wrap: size of a ring buffer, as in `Slots`.
    """
    if kernels_serve(k_LBGSD):
        from longtrain.kernels.fused_layer import kernel

        kernel.move_entries(k_LBGSD, v_LBGSD, first_B, path_BP, wrap)
        return
    step_P = torch.arange(path_BP.shape[1], device=path_BP.device)
    if first_B.dim() == 3:
        source_LBGP, goal_LBGP = first_B[..., None] + path_BP[:, None], first_B[..., None] + step_P
        for buffer_SD in (k_LBGSD[0, 0, 0], v_LBGSD[0, 0, 0]):
            buffer_SD[goal_LBGP] = buffer_SD[source_LBGP]
        return
    row_B1 = torch.arange(len(path_BP), device=path_BP.device)[:, None]
    source_BP, goal_BP = first_B[:, None] + path_BP, first_B[:, None] + step_P
    if wrap is not None:
        source_BP, goal_BP = source_BP % wrap, goal_BP % wrap
    for buffer in (k_LBGSD, v_LBGSD):
        buffer[:, row_B1, :, goal_BP] = buffer[:, row_B1, :, source_BP]


def rotary(pos_N: Tensor, frequency_F: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin of positions, each [N, 2 F] in `dtype`, both halves alike; fp32 inside.

    Args:
        pos_N: positions, int64.
        frequency_F: radians per position, fp32.
        scaling: factor on cos and sin.
        dtype: dtype of the result.
    """
    if dtype != torch.float64 and kernels_serve(frequency_F):
        from longtrain.kernels.fused_layer import kernel

        return kernel.rotary(pos_N, frequency_F, scaling, dtype)
    angle_NF = pos_N[:, None].float() * frequency_F.float()
    angle_ND = torch.cat((angle_NF, angle_NF), -1)
    return (angle_ND.cos() * scaling).to(dtype), (angle_ND.sin() * scaling).to(dtype)


def rotated(x: Tensor, rope: tuple[Tensor, Tensor], *, neighbours: bool = False) -> Tensor:
    """Heads rotated by position (RoPE), in their dtype.

    Args:
        x: [..., heads, D].
        rope: cos and sin, each [..., R] with both halves alike, for each token of `x`; dims from R on stay.
        neighbours: pair dims 2i and 2i + 1 instead of i and i + R / 2.
    """
    cos, sin = (part.unsqueeze(-2).to(x.dtype) for part in rope)
    R = cos.shape[-1]
    turns, rest = x[..., :R], x[..., R:]
    if neighbours:
        cos, sin = (part[..., : R // 2].repeat_interleave(2, -1) for part in (cos, sin))
        other = torch.stack((-turns[..., 1::2], turns[..., ::2]), -1).flatten(-2)
    else:
        low, high = turns.chunk(2, dim=-1)
        other = torch.cat((-high, low), -1)
    turned = turns * cos + other * sin
    return torch.cat((turned, rest), -1) if x.shape[-1] > R else turned


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim, in fp32 or wider inside."""
    return rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def _rotated(x_NHD: Tensor, rope: tuple[Tensor, Tensor], neighbours: bool) -> Tensor:
    """RoPE in fp32 or wider."""
    wide = torch.promote_types(x_NHD.dtype, torch.float32)
    cos, sin = (part.to(wide) for part in rope)
    return rotated(x_NHD.to(wide), (cos, sin), neighbours=neighbours).to(x_NHD.dtype)

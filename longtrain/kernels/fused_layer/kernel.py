"""Triton kernels of `kernels.fused_layer`, and their launches.

If the device supports it, a kernel is launched before its predecessor ends, and allows its successor to start
at once (CHAINED): it waits before it reads or writes data of other kernels, and has read its own weights by
then. So the next matrix product can prefetch its weights while these small kernels run.

Shapes: as in `kernels.fused_layer`.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longtrain.kernels.devices import chaining, dense_rows, launched_on
from longtrain.kernels.fused_layer.slots import Angles, RowPositions, Slots

_HEADS = 4
"""Heads that one program rotates."""
_COLUMNS = 1024
"""Columns of one SwiGLU program."""


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, add_ptr, weight_ptr, sum_ptr, normed_ptr, x_n, add_n, normed_n, eps,
    E: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One token: sum (rounded to the dtype in which it is stored) and its norm."""
    if CHAINED:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    keep = at < E
    weight = tl.load(weight_ptr + at, mask=keep, other=0.0)
    if CHAINED:
        gdc_wait()
    x = tl.load(x_ptr + row * x_n + at, mask=keep, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    if ADD:
        x += tl.load(add_ptr + row * add_n + at, mask=keep, other=0.0).to(tl.float32)
        x = x.to(dtype)
        tl.store(sum_ptr + row * E + at, x, mask=keep)
        x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / E + eps)
    tl.store(normed_ptr + row * normed_n + at, (x * scale * weight.to(tl.float32)).to(dtype), mask=keep)


@triton.jit
def _slot(slot_ptr, b, head, G: tl.constexpr, t, at, PER_HEAD: tl.constexpr, WRAP: tl.constexpr,
          FIXED: tl.constexpr):  # fmt: skip
    """Buffer position of token t of sequence b; PER_HEAD: of each KV head, those outside 0..G-1 undefined."""
    if PER_HEAD:
        slot = tl.load(slot_ptr + b * G + head, mask=(head >= 0) & (head < G), other=0).to(tl.int64) + at + t
    else:
        slot = tl.load(slot_ptr + b).to(tl.int64) + at + t
    if FIXED:
        slot = tl.where(slot < FIXED, slot, FIXED + (slot - FIXED) % WRAP)
    elif WRAP:
        slot = slot % WRAP
    return slot


@triton.jit(do_not_specialize=["T", "at"])
def _rotate_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, k_out_ptr, v_out_ptr, slot_ptr, count_ptr,
    qkv_n, rope_n, eps, ko_b, ko_g, ko_s, vo_b, vo_g, vo_s, T, at,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, NEIGHBOURS: tl.constexpr,
    NORM: tl.constexpr, WRITE: tl.constexpr, PER_HEAD: tl.constexpr, WRAP: tl.constexpr,
    FIXED: tl.constexpr, COUNT: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Rotate a few heads of one token: queries and keys in place; WRITE: also store keys and values.

    Each lane holds two dims of a head, low and high: a pair that RoPE turns, or two of the last D - R dims.
    """
    if CHAINED:
        gdc_launch_dependents()
    half: tl.constexpr = D // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    if NEIGHBOURS:
        low_at, high_at = 2 * pair, 2 * pair + 1
    else:
        low_at, high_at = pair, pair + R // 2
    if R < D:
        low_at = tl.where(pair < R // 2, low_at, pair + R // 2)
        high_at = tl.where(pair < R // 2, high_at, pair + half)
    low_at, high_at = low_at[None, :], high_at[None, :]
    inside = (pair < half)[None, :]
    turns = (head < H + G)[:, None] & inside
    keep = (head < H + 2 * G)[:, None] & inside if WRITE else turns
    if NORM:
        of_q, of_k = turns & (head < H)[:, None], turns & (head >= H)[:, None]
        of_low, of_high = (low_at + tl.zeros((HEADS, 1), tl.int32), high_at + tl.zeros((HEADS, 1), tl.int32))
        low_weight = tl.load(q_weight_ptr + of_low, mask=of_q, other=0.0).to(tl.float32)
        low_weight += tl.load(k_weight_ptr + of_low, mask=of_k, other=0.0).to(tl.float32)
        high_weight = tl.load(q_weight_ptr + of_high, mask=of_q, other=0.0).to(tl.float32)
        high_weight += tl.load(k_weight_ptr + of_high, mask=of_k, other=0.0).to(tl.float32)
    if CHAINED:
        gdc_wait()
    place = qkv_ptr + row * qkv_n + head[:, None] * D
    low = tl.load(place + low_at, mask=keep, other=0.0)
    high = tl.load(place + high_at, mask=keep, other=0.0)
    angle, rotated = row * rope_n + pair[None, :], (pair < R // 2)[None, :]
    cos_low = tl.load(cos_ptr + angle, mask=rotated, other=1.0).to(tl.float32)
    cos_high = tl.load(cos_ptr + angle + R // 2, mask=rotated, other=1.0).to(tl.float32)
    sin_low = tl.load(sin_ptr + angle, mask=rotated, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_ptr + angle + R // 2, mask=rotated, other=0.0).to(tl.float32)
    a, b = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        a, b = a * scale * low_weight, b * scale * high_weight
    turned_low = (a * cos_low - b * sin_low).to(low.dtype)
    turned_high = (b * cos_high + a * sin_high).to(low.dtype)
    tl.store(place + low_at, turned_low, mask=turns)
    tl.store(place + high_at, turned_high, mask=turns)
    if WRITE:
        batch = row // T
        key = (head - H).to(tl.int64)[:, None]
        slot = _slot(slot_ptr, batch, tl.where(key < G, key, key - G), G, row % T, at, PER_HEAD, WRAP, FIXED)
        k_at = k_out_ptr + batch * ko_b + key * ko_g + slot * ko_s
        is_key, is_value = turns & (key >= 0), keep & (key >= G)
        if COUNT:
            stored = row % T + tl.zeros_like(key) < tl.load(count_ptr + batch)
            is_key, is_value = is_key & stored, is_value & stored
        tl.store(k_at + low_at, turned_low, mask=is_key)
        tl.store(k_at + high_at, turned_high, mask=is_key)
        v_at = v_out_ptr + batch * vo_b + (key - G) * vo_g + slot * vo_s
        tl.store(v_at + low_at, low, mask=is_value)
        tl.store(v_at + high_at, high, mask=is_value)


@triton.jit
def _swiglu_kernel(x_ptr, out_ptr, x_n, size: tl.constexpr, COLUMNS: tl.constexpr, CHAINED: tl.constexpr):
    """SwiGLU of some columns of one token."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    keep = at < size
    gate = tl.load(x_ptr + row * x_n + at, mask=keep, other=0.0)
    up = tl.load(x_ptr + row * x_n + size + at, mask=keep, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    tl.store(out_ptr + row * size + at, (wide / (1.0 + tl.exp(-wide)) * up).to(gate.dtype), mask=keep)


@triton.jit(do_not_specialize=["T", "at"])
def _write_kernel(
    k_ptr, v_ptr, k_out_ptr, v_out_ptr, slot_ptr, count_ptr, k_b, k_g, k_t, v_b, v_g, v_t,
    ko_b, ko_g, ko_s, vo_b, vo_g, vo_s, T, at,
    G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    PER_HEAD: tl.constexpr, WRAP: tl.constexpr, FIXED: tl.constexpr, COUNT: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Store all KV heads of one new token."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    b = (tl.program_id(0) // T).to(tl.int64)
    t = (tl.program_id(0) % T).to(tl.int64)
    head, dim = tl.arange(0, HEADS).to(tl.int64)[:, None], tl.arange(0, WIDTH)[None, :]
    slot = _slot(slot_ptr, b, head, G, t, at, PER_HEAD, WRAP, FIXED)
    keep = (head < G) & (dim < D)
    if COUNT:
        keep = keep & (t + tl.zeros_like(head) < tl.load(count_ptr + b))
    k = tl.load(k_ptr + b * k_b + head * k_g + t * k_t + dim, mask=keep)
    v = tl.load(v_ptr + b * v_b + head * v_g + t * v_t + dim, mask=keep)
    tl.store(k_out_ptr + b * ko_b + head * ko_g + slot * ko_s + dim, k, mask=keep)
    tl.store(v_out_ptr + b * vo_b + head * vo_g + slot * vo_s + dim, v, mask=keep)


@triton.jit
def _move_kernel(
    k_ptr, v_ptr, first_ptr, path_ptr, x_l, x_b, x_g, x_s, path_b, B,
    P: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PER_HEAD: tl.constexpr,
    WRAP: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Move all entries of a path in one head of one layer."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    b, layer = (tl.program_id(0) % B).to(tl.int64), (tl.program_id(0) // B).to(tl.int64)
    p, dim = tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    own = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    first = tl.load(first_ptr + (own if PER_HEAD else b))
    source, goal = first + tl.load(path_ptr + b * path_b + p, mask=p < P, other=0), first + p
    if WRAP:
        source, goal = source % WRAP, goal % WRAP
    at = layer * x_l + b * x_b + tl.program_id(1).to(tl.int64) * x_g
    keep = (p < P)[:, None] & (dim < D)
    k = tl.load(k_ptr + at + source[:, None] * x_s + dim, mask=keep)
    v = tl.load(v_ptr + at + source[:, None] * x_s + dim, mask=keep)
    tl.debug_barrier()  # an entry may be the source of one move and the goal of another
    tl.store(k_ptr + at + goal[:, None] * x_s + dim, k, mask=keep)
    tl.store(v_ptr + at + goal[:, None] * x_s + dim, v, mask=keep)


@triton.jit
def _rotary_kernel(
    pos_ptr, frequency_ptr, cos_ptr, sin_ptr, scaling, F: tl.constexpr, WIDTH: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Compute RoPE's cosines and sines of one token, times `scaling`, twice: for both halves of a head."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    keep = at < F
    angle = tl.load(pos_ptr + row).to(tl.float32) * tl.load(frequency_ptr + at, mask=keep, other=0.0)
    cos, sin = tl.cos(angle) * scaling, tl.sin(angle) * scaling
    out = row * (2 * F) + at
    tl.store(cos_ptr + out, cos, mask=keep)
    tl.store(cos_ptr + out + F, cos, mask=keep)
    tl.store(sin_ptr + out, sin, mask=keep)
    tl.store(sin_ptr + out + F, sin, mask=keep)


@triton.jit(do_not_specialize=["T", "ahead"])
def _enter_kernel(
    id_ptr, table_ptr, weight_ptr, path_ptr, pos_ptr, frequency_ptr, x_ptr, normed_ptr, cos_ptr, sin_ptr,
    id_b, id_t, table_v, path_b, pos_b, pos_t, normed_n, eps, scaling, embed_scale, T, ahead,
    E: tl.constexpr, WIDTH: tl.constexpr, F: tl.constexpr, HALF: tl.constexpr, PATH: tl.constexpr,
    STEPS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One token: its embedding, the norm of that embedding, and the angles of its position."""
    if CHAINED:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    b, t = row // T, row % T
    at, pair = tl.arange(0, WIDTH), tl.arange(0, HALF)
    keep, turns = at < E, pair < F
    weight = tl.load(weight_ptr + at, mask=keep, other=0.0)
    frequency = tl.load(frequency_ptr + pair, mask=turns, other=0.0)
    if CHAINED:
        gdc_wait()
    node = tl.load(path_ptr + b * path_b + t) if PATH else t
    token = tl.load(id_ptr + b * id_b + node * id_t).to(tl.int64)
    pos = tl.load(pos_ptr + b * pos_b + t * pos_t) + ahead
    if STEPS:
        pos += t
    x = tl.load(table_ptr + token * table_v + at, mask=keep, other=0.0)
    dtype = x.dtype
    x = (x.to(tl.float32) * embed_scale).to(dtype)
    tl.store(x_ptr + row * E + at, x, mask=keep)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / E + eps)
    tl.store(normed_ptr + row * normed_n + at, (x * scale * weight.to(tl.float32)).to(dtype), mask=keep)
    angle = pos.to(tl.float32) * frequency
    cos, sin = tl.cos(angle) * scaling, tl.sin(angle) * scaling
    out = row * (2 * F) + pair
    tl.store(cos_ptr + out, cos, mask=turns)
    tl.store(cos_ptr + out + F, cos, mask=turns)
    tl.store(sin_ptr + out, sin, mask=turns)
    tl.store(sin_ptr + out + F, sin, mask=turns)


def enter_rows(
    ids_BT: Tensor, table_VE: Tensor, weight_E: Tensor, eps: float, at: RowPositions, angles: Angles,
    path_BT: Tensor | None, normed_NE: Tensor | None, embed_scale: float,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """See `kernels.fused_layer.enter_rows`."""
    B, T = (ids_BT if path_BT is None else path_BT).shape
    E, F = table_VE.shape[1], len(angles.frequency_F)
    x_NE = table_VE.new_empty(B * T, E)
    normed_NE = torch.empty_like(x_NE) if normed_NE is None else normed_NE
    cos_ND, sin_ND = table_VE.new_empty((2, B * T, 2 * F)).unbind(0)
    path = ids_BT if path_BT is None else dense_rows(path_BT)
    chained = chaining(table_VE.device)
    with launched_on(table_VE):
        _enter_kernel[(B * T,)](
            ids_BT, table_VE, weight_E, path, at.pos_BT, angles.frequency_F, x_NE, normed_NE, cos_ND, sin_ND,
            *ids_BT.stride(), table_VE.stride(0), path.stride(0), *at.pos_BT.stride(), normed_NE.stride(0),
            eps, angles.scaling, embed_scale, T, at.ahead, E=E, WIDTH=triton.next_power_of_2(E),
            F=F, HALF=triton.next_power_of_2(F), PATH=path_BT is not None, STEPS=at.steps,
            num_warps=8, **chained,
        )  # fmt: skip
    return x_NE, normed_NE, (cos_ND, sin_ND)


def add_rms_norm(
    x_NE: Tensor, add_NE: Tensor | None, weight_E: Tensor, eps: float, normed_NE: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `kernels.fused_layer.add_rms_norm`."""
    N, E = x_NE.shape
    normed_NE = x_NE.new_empty(N, E) if normed_NE is None else normed_NE
    sum_NE = x_NE if add_NE is None else x_NE.new_empty(N, E)
    add = x_NE if add_NE is None else dense_rows(add_NE)
    chained = chaining(x_NE.device)
    with launched_on(x_NE):
        _add_rms_norm_kernel[(N,)](
            x_NE, add, weight_E, sum_NE, normed_NE, x_NE.stride(0), add.stride(0),
            normed_NE.stride(0), eps, E=E, WIDTH=triton.next_power_of_2(E), ADD=add_NE is not None,
            num_warps=8, **chained,
        )  # fmt: skip
    return sum_NE, normed_NE


def rotate_heads(
    qkv_NHD: Tensor,
    rope: tuple[Tensor, Tensor],
    heads: tuple[int, int],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    into: Slots | None,
    neighbours: bool,
) -> None:
    """Rotate queries and keys of `qkv_NHD` in place; see `kernels.fused_layer.rotate_heads`."""
    cos, sin = (dense_rows(part) for part in rope)
    N, _, D = qkv_NHD.shape
    H, G = heads
    q_weight, k_weight = norms or (cos, cos)
    batch = 1 if into is None else len(into.slot_B)
    to = into or Slots(qkv_NHD[None], qkv_NHD[None], cos)
    slot_B, count_B = _places(to)
    chained = chaining(qkv_NHD.device)
    with launched_on(qkv_NHD):
        _rotate_kernel[(N, triton.cdiv(H + (2 if into else 1) * G, _HEADS))](
            qkv_NHD, cos, sin, q_weight, k_weight, to.k_BGSD, to.v_BGSD, slot_B, count_B,
            qkv_NHD.stride(0), cos.stride(0), eps, *to.k_BGSD.stride()[:3], *to.v_BGSD.stride()[:3],
            N // batch, to.at, H=H, G=G, D=D, R=cos.shape[-1], HALF=triton.next_power_of_2(D // 2),
            HEADS=_HEADS, NEIGHBOURS=neighbours,
            NORM=norms is not None, WRITE=into is not None, PER_HEAD=to.per_head, WRAP=to.wrap or 0,
            FIXED=to.fixed, COUNT=to.count_B is not None,
            num_warps=1, **chained,
        )  # fmt: skip


def swiglu(gate_up_NX: Tensor) -> Tensor:
    """See `kernels.fused_layer.swiglu`."""
    N, size = gate_up_NX.shape[0], gate_up_NX.shape[1] // 2
    out_NI = gate_up_NX.new_empty(N, size)
    chained = chaining(gate_up_NX.device)
    with launched_on(gate_up_NX):
        _swiglu_kernel[(N, triton.cdiv(size, _COLUMNS))](
            gate_up_NX, out_NI, gate_up_NX.stride(0),
            size=size, COLUMNS=_COLUMNS, **chained,
        )  # fmt: skip
    return out_NI


def write_rows(k_BGTD: Tensor, v_BGTD: Tensor, into: Slots) -> None:
    """See `kernels.fused_layer.write_rows`."""
    B, G, T, D = k_BGTD.shape
    slot_B, count_B = _places(into)
    chained = chaining(k_BGTD.device)
    with launched_on(k_BGTD):
        _write_kernel[(B * T,)](
            k_BGTD, v_BGTD, into.k_BGSD, into.v_BGSD, slot_B, count_B, *k_BGTD.stride()[:3],
            *v_BGTD.stride()[:3], *into.k_BGSD.stride()[:3], *into.v_BGSD.stride()[:3], T, into.at,
            G=G, D=D, HEADS=triton.next_power_of_2(G), WIDTH=triton.next_power_of_2(D),
            PER_HEAD=into.per_head, WRAP=into.wrap or 0, FIXED=into.fixed, COUNT=into.count_B is not None,
            **chained,
        )  # fmt: skip


def move_entries(
    k_LBGSD: Tensor, v_LBGSD: Tensor, first_B: Tensor, path_BP: Tensor, wrap: int | None
) -> None:
    """See `kernels.fused_layer.move_entries`."""
    L, B, G, _, D = k_LBGSD.shape
    P = path_BP.shape[1]
    chained = chaining(k_LBGSD.device)
    with launched_on(k_LBGSD):
        _move_kernel[(L * B, G)](
            k_LBGSD, v_LBGSD, first_B, dense_rows(path_BP), *k_LBGSD.stride()[:4], path_BP.stride(0), B,
            P=P, D=D, ROWS=triton.next_power_of_2(P), WIDTH=triton.next_power_of_2(D),
            PER_HEAD=first_B.dim() == 3, WRAP=wrap or 0, num_warps=1, **chained,
        )  # fmt: skip


def rotary(pos_N: Tensor, frequency_F: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `kernels.fused_layer.rotary`."""
    N, F = len(pos_N), len(frequency_F)
    cos_ND = torch.empty((N, 2 * F), dtype=dtype, device=pos_N.device)
    sin_ND = torch.empty_like(cos_ND)
    chained = chaining(pos_N.device)
    with launched_on(pos_N):
        _rotary_kernel[(N,)](
            pos_N.contiguous(), frequency_F, cos_ND, sin_ND, scaling,
            F=F, WIDTH=triton.next_power_of_2(F), num_warps=2, **chained,
        )  # fmt: skip
    return cos_ND, sin_ND


def _places(into: Slots) -> tuple[Tensor, Tensor]:
    """First buffer positions and counts, contiguous as the kernels require."""
    slot_B = into.slot_B.contiguous()
    return slot_B, slot_B if into.count_B is None else into.count_B.contiguous()

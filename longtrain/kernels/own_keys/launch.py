"""Launches of the Triton kernels of `kernels.own_keys`.

Shapes: as in `kernels.own_keys`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from longtrain.kernels.devices import dense_rows, launched_on, width_of
from longtrain.kernels.own_keys import kernel

if TYPE_CHECKING:
    from longtrain.kernels.own_keys import OwnKeys

_NUMBERS = 2048
"""Numbers of a program's block of queries."""


def merge(
    q_THD: Tensor, out_THD: Tensor, lse_TH: Tensor, own: OwnKeys, *, scale: float
) -> tuple[Tensor, Tensor]:
    """See `kernels.own_keys.merge`."""
    T, H, D = q_THD.shape
    out_THD = dense_rows(out_THD)
    M, _, G, _ = own.k_MTGD.shape
    new_THD = torch.empty((T, H, D), dtype=q_THD.dtype, device=q_THD.device)
    new_TH = torch.empty((T, H), dtype=torch.float32, device=q_THD.device)
    tile, blocks = _blocks(D)
    if T:
        with launched_on(q_THD):
            kernel._merge_kernel[(triton.cdiv(T, tile), H)](
                q_THD, out_THD, lse_TH, *_dense(own), new_THD, new_TH,
                scale, *q_THD.stride()[:2], *out_THD.stride()[:2], *lse_TH.stride(), M, T, H, G,
                MASKED=own.seen_MT is not None, **blocks,
            )  # fmt: skip
    return new_THD, new_TH


def merge_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    own: OwnKeys,
    dq_THD: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.own_keys.merge_backward`."""
    T, H, D = q_THD.shape
    M, _, G, _ = own.k_MTGD.shape
    grad_THD, dq_THD = dense_rows(grad_THD), dense_rows(dq_THD)
    keys = _dense(own)
    dk_MTGD, dv_MTGD = torch.empty_like(keys[0]), torch.empty_like(keys[1])
    new_THD = torch.empty((T, H, D), dtype=q_THD.dtype, device=q_THD.device)
    tile, blocks = _blocks(D)
    blocks["MASKED"] = own.seen_MT is not None
    strides = [*grad_THD.stride()[:2], *q_THD.stride()[:2], *out_THD.stride()[:2]]
    given = (grad_THD, q_THD, out_THD, lse_TH, *keys)
    if T:
        with launched_on(q_THD):
            kernel._queries_kernel[(triton.cdiv(T, tile), H)](
                *given, dq_THD, new_THD, scale, *strides, *dq_THD.stride()[:2], M, T, H, G, **blocks
            )
            kernel._keys_kernel[(triton.cdiv(T, tile), G, M)](
                *given, dk_MTGD, dv_MTGD, scale, *strides, T, H, G, **blocks
            )
    return new_THD, dk_MTGD, dv_MTGD


def _dense(own: OwnKeys) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and mask, contiguous; the keys are passed as the mask if there is none."""
    k_MTGD, v_MTGD = own.k_MTGD.contiguous(), own.v_MTGD.contiguous()
    return k_MTGD, v_MTGD, k_MTGD if own.seen_MT is None else own.seen_MT.contiguous().view(torch.uint8)


def _blocks(head_dim: int) -> tuple[int, dict[str, Any]]:
    """Queries of a program, and the constants of its launch."""
    width = width_of(head_dim)
    tile = max(8, _NUMBERS // width)
    return tile, {"D": head_dim, "WIDTH": width, "TILE": tile, "num_warps": 4}

"""Attention of PyTorch as baselines for longtrain's kernels, on a dense cache whose length the host knows.

Exact baselines compute the same as the kernel; the others omit the mask among the new tokens, and are
therefore faster than possible.
Shapes: T new tokens, S cached keys, H query heads, G KV heads, D head dim, R = T * H/G packed rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from longtrain.kernels.attention.split import split_attention

BaselineName = Literal["flash", "packed_flash", "cudnn", "packed_flash_and_masked", "flex"]
NAMES: tuple[BaselineName, ...] = get_args(BaselineName)
ON_CPU = tuple(name for name in NAMES if name not in ("cudnn", "flex"))
"""Baselines that run on a CPU."""


@dataclass(frozen=True)
class StockInputs:
    """Inputs of an attention call over `keys` cached keys and the keys of the T new tokens.

    Args:
        q_BHTD: queries.
        k_BGSD: keys, S = keys + T.
        v_BGSD: values.
        keys: number of cached keys.
        visible_BTT: mask among the new tokens.
    """

    q_BHTD: Tensor
    k_BGSD: Tensor
    v_BGSD: Tensor
    keys: int
    visible_BTT: Tensor

    @property
    def rows(self) -> int:
        """T."""
        return self.q_BHTD.shape[2]


Attention = Callable[[Tensor, Tensor], Tensor]
"""Function of keys and values that returns the output."""


def attention_of(name: str, x: StockInputs) -> tuple[Attention, bool]:
    """Return a baseline as a function of keys and values, and True if it is exact.

    Raises:
        KeyError: no such baseline.
    """
    make = {
        "flash": lambda: _fused(SDPBackend.FLASH_ATTENTION, x.q_BHTD, x),
        "packed_flash": lambda: _fused(SDPBackend.FLASH_ATTENTION, _pack(x), x),
        "cudnn": lambda: _fused(SDPBackend.CUDNN_ATTENTION, x.q_BHTD, x),
        "packed_flash_and_masked": lambda: _split(x),
        "flex": lambda: _flex(x),
    }[name]
    return make(), x.rows == 1 or name in ("packed_flash_and_masked", "flex")


def _fused(backend: SDPBackend, q: Tensor, x: StockInputs) -> Attention:
    """Return PyTorch's attention without a mask, with one backend."""
    shared = q.shape[1] != x.k_BGSD.shape[1]  # heads of packed rows are those of keys

    def run(k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, enable_gqa=shared).view_as(x.q_BHTD)

    return run


def _split(x: StockInputs) -> Attention:
    """Return packed flash attention over the cached keys, merged with masked attention over the new ones."""
    q_BGRD = _pack(x)
    group = x.q_BHTD.shape[1] // x.k_BGSD.shape[1]
    visible_B1RC = x.visible_BTT.repeat(1, group, 1)[:, None]

    def run(k: Tensor, v: Tensor) -> Tensor:
        out, _ = split_attention(q_BGRD, k, v, x.keys, visible_B1RC, scale=q_BGRD.shape[-1] ** -0.5)
        return out.view_as(x.q_BHTD)

    return run


def _flex(x: StockInputs) -> Attention:
    """Return compiled FlexAttention, which fails to compile for many tokens."""
    from torch.nn.attention import flex_attention as flex

    visible_BTT, keys = x.visible_BTT, x.keys

    def sees(b: Any, h: Any, row: Any, slot: Any) -> Any:
        own = (slot - keys).clamp(min=0)
        return (slot < keys) | visible_BTT[b, row, own]

    B, _, S, _ = x.k_BGSD.shape
    blocks = flex.create_block_mask(sees, B, None, x.rows, S, device=str(x.q_BHTD.device))
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return lambda k, v: compiled(x.q_BHTD, k, v, block_mask=blocks, enable_gqa=True)


def _pack(x: StockInputs) -> Tensor:
    """Pack the query heads of a KV head as rows, so that K and V are read once for all of them."""
    B, _, _, D = x.q_BHTD.shape
    return x.q_BHTD.reshape(B, x.k_BGSD.shape[1], -1, D)

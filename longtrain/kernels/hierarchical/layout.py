"""Memory layout of a hierarchical KV cache: blocks of 128 tokens as 4-bit planes, and a ring buffer.

A number has an 8-bit code whose upper and lower nibbles are stored in separate planes: a draft reads the
upper plane only (INT4), the target both (INT8). With u and l the stored nibbles:

    INT4: zero + step * (u + upper_offset)        INT8: zero + step / 16 * (16 u + l - lower_offset)

Keys have a step and a zero per channel of a block, values per token. Tokens that are not quantised yet are in
a ring buffer of three blocks in the model's dtype; position p is at index p mod 384.

A byte has two codes half a head apart: dimension j in bits 0-3, j + D/2 in bits 4-7. Within each aligned
four bytes the middle two are swapped (`BYTE_ORDER`), so that a 32-bit word unpacks into two pairs of
half-precision numbers in order. Key bytes are contiguous along dimensions, value bytes along tokens.

Shapes: L layers, B batch, G KV heads, N blocks, C = 128 tokens of a block, D head dim, X = D / 2 bytes,
R = 384 ring positions. Every tensor is contiguous from B on; a leading L is dropped by `layer`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum

import torch
from torch import Tensor

from longtrain.errors import ConfigError, refusal

BLOCK = 128
"""Tokens of a quantised block: the group that shares a key channel's step and zero."""
RING = 3 * BLOCK
"""Positions of the ring: two blocks of recent tokens, and one of tokens not accepted yet."""
HEAD_DIMS = (64, 128, 256)
"""Supported head sizes; the group of a value is its head."""
BYTE_ORDER = (0, 2, 1, 3)
"""Byte b of an aligned four belongs to position `BYTE_ORDER[b]` among the four; its own inverse."""


class Split(Enum):
    """Division of an 8-bit code into two nibbles.

    FLOOR: u and l are the halves of one code in 0..255; INT4 reads the middle of the 16 codes of the same u.
    RTN: u is the nearest of 16 levels, and l is the residual in -8..7, stored as 0..15 (the paper's).
    """

    FLOOR = "floor"
    RTN = "rtn"

    @property
    def upper_offset(self) -> float:
        """Added to u if only the upper plane is read, in steps."""
        return 7.5 / 16 if self is Split.FLOOR else 0.0

    @property
    def lower_offset(self) -> int:
        """Subtracted from the stored l."""
        return 0 if self is Split.FLOOR else 8


@dataclass(frozen=True)
class Planes:
    """The quantised blocks of all layers, or of one.

    Args:
        k_upper: [L, B, G, N, C, X] uint8.
        k_lower: lower nibbles of the same shape.
        v_upper: [L, B, G, N, X, C] uint8: transposed, tokens contiguous.
        v_lower: lower nibbles of the same shape.
        k_step: [L, B, G, N, D] fp16, above 0: distance of two neighbouring values of the upper nibble.
        k_zero: [L, B, G, N, D] fp16: value of code 0.
        v_step: [L, B, G, N, C] fp16, as `k_step`, per token.
        v_zero: [L, B, G, N, C] fp16.
        split: division of codes into the two planes.
    """

    k_upper: Tensor
    k_lower: Tensor
    v_upper: Tensor
    v_lower: Tensor
    k_step: Tensor
    k_zero: Tensor
    v_step: Tensor
    v_zero: Tensor
    split: Split

    def layer(self, layer: int) -> Planes:
        """Views of one layer: the same shapes without L."""
        return replace(self, **{name: getattr(self, name)[layer] for name in _tensors(self)})

    def bytes(self) -> int:
        """Bytes of storage."""
        return sum(getattr(self, name).nbytes for name in _tensors(self))


@dataclass(frozen=True)
class Ring:
    """Recent tokens in the model's dtype; position p is at index p mod 384.

    Args:
        k: [L, B, G, R, D], after RoPE.
        v: [L, B, G, R, D].
    """

    k: Tensor
    v: Tensor

    def layer(self, layer: int) -> Ring:
        """Views of one layer: [B, G, R, D]."""
        return Ring(self.k[layer], self.v[layer])

    def bytes(self) -> int:
        """Bytes of storage."""
        return self.k.nbytes + self.v.nbytes


@dataclass(frozen=True)
class Lens:
    """Lengths of the sequences, on the device.

    Positions 0 .. 128 * blocks_B[b] - 1 are in the planes, those up to len_B[b] - 1 in the ring, and new
    token i of a step is at the ring's position len_B[b] + i. Invariants: 128 * blocks_B <= len_B and len_B +
    T <= 128 * blocks_B + 384.

    Args:
        len_B: positions before the step's new tokens, int64.
        blocks_B: quantised blocks, int64.
    """

    len_B: Tensor
    blocks_B: Tensor


def check_shape(*, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
    """Refuse unsupported heads.

    Raises:
        ConfigError: a head dim not in `HEAD_DIMS`, or query heads that are no multiple of the KV heads.
    """
    if head_dim not in HEAD_DIMS:
        raise refusal(
            ConfigError,
            f"a hierarchical KV cache for heads of size {head_dim}",
            f"{', '.join(map(str, HEAD_DIMS))}; use the plain cache for this target",
        )
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise refusal(
            ConfigError,
            f"a hierarchical KV cache for {n_heads} query heads over {n_kv_heads} KV heads",
            "a multiple of them",
        )


def new_planes(
    *,
    n_layers: int,
    batch: int,
    n_kv_heads: int,
    blocks: int,
    head_dim: int,
    split: Split,
    device: torch.device | str,
) -> Planes:
    """Allocate planes filled with zeros."""
    lead = (n_layers, batch, n_kv_heads, blocks)

    def codes(*shape: int) -> Tensor:
        return torch.zeros(*lead, *shape, dtype=torch.uint8, device=device)

    def numbers(size: int) -> Tensor:
        return torch.zeros(*lead, size, dtype=torch.float16, device=device)

    half = head_dim // 2
    return Planes(
        k_upper=codes(BLOCK, half),
        k_lower=codes(BLOCK, half),
        v_upper=codes(half, BLOCK),
        v_lower=codes(half, BLOCK),
        k_step=numbers(head_dim),
        k_zero=numbers(head_dim),
        v_step=numbers(BLOCK),
        v_zero=numbers(BLOCK),
        split=split,
    )


def new_ring(
    *,
    n_layers: int,
    batch: int,
    n_kv_heads: int,
    head_dim: int,
    device: torch.device | str,
    dtype: torch.dtype,
) -> Ring:
    """A ring of zeros (not empty: masked entries have weight 0, and 0 times garbage may be NaN)."""
    shape = (n_layers, batch, n_kv_heads, RING, head_dim)
    return Ring(
        torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype)
    )


def _tensors(planes: Planes) -> list[str]:
    """Names of the fields that are tensors."""
    return [field.name for field in fields(planes) if field.name != "split"]

"""Scores of KV entries: for each set, the maximum over its query heads of the log attention weight.

The softmax runs over a sequence's visible entries; heads can be compared only after it. Keys are read once.
An entry's score depends neither on the batch nor on the number of cache positions, bit for bit. Triton on
CUDA, `reference` in plain torch everywhere else.

Shapes: B batch, X sets of a sequence, H query heads of a set, S cache positions, C key heads, D head dim.
"""

from __future__ import annotations

from torch import Tensor

from longtrain.errors import DataError, refusal
from longtrain.kernels.devices import products_serve
from longtrain.kernels.entry_scores import reference

__all__ = ["entry_scores"]
_MAX_QUERIES, _MAX_DIM = 128, 256


def entry_scores(q_BXHD: Tensor, k_BSCD: Tensor, n_B: Tensor, *, groups: int, scale: float) -> Tensor:
    """Score all cache positions.

    Args:
        q_BXHD: queries. Set x belongs to KV head x % groups; successive runs of `groups` sets (one for each
            group of layers) share the key heads evenly.
        k_BSCD: keys; C is `groups`, or a multiple of it that divides X.
        n_B: visible entries, at positions 0..n_B-1, int64.
        groups: KV heads.
        scale: softmax scale.

    Returns:
        scores_BXS in fp32 (fp64 for fp64); -inf where not visible.

    Raises:
        DataError: shapes do not match.
    """
    (B, X, H, D), (batch, _, C, width) = q_BXHD.shape, k_BSCD.shape
    if batch != B or width != D or C % groups or X % C or n_B.shape != (B,):
        raise refusal(
            DataError,
            f"queries {tuple(q_BXHD.shape)}, keys {tuple(k_BSCD.shape)}, {groups} KV heads",
            "one batch, one head dim, key heads a multiple of the KV heads, sets a multiple of both",
        )
    if products_serve(q_BXHD, k_BSCD) and X // C * H <= _MAX_QUERIES and D <= _MAX_DIM:
        from longtrain.kernels.entry_scores import kernel

        return kernel.entry_scores(q_BXHD, k_BSCD, n_B, groups, scale)
    return reference.entry_scores(q_BXHD, k_BSCD, n_B, groups, scale)

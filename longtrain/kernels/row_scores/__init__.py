"""Scores cached rows by queries: of each set the highest log-weight among its query heads.

Weights are those of a softmax over a sequence's visible rows; heads can be compared only after it. Keys are
read once. A row's score depends neither on the batch nor on the number of slots. Triton where
`kernels.devices` says so, `reference` in plain torch everywhere else.

Shapes: B batch, X sets of a sequence, H query heads of a set, S slots, C key heads, D head dim.
"""

from __future__ import annotations

from torch import Tensor

from longtrain.errors import DataError, refusal
from longtrain.kernels.devices import products_serve
from longtrain.kernels.row_scores import reference

__all__ = ["row_scores"]
_MAX_QUERIES, _MAX_DIM = 128, 256


def row_scores(q_BXHD: Tensor, k_BSCD: Tensor, n_B: Tensor, *, groups: int, scale: float) -> Tensor:
    """Scores of all slots.

    Args:
        q_BXHD: queries; set x is one of a group of `groups` successive sets, one a KV head. Groups of sets
            share the key heads evenly, successive groups the same ones.
        k_BSCD: keys; C is `groups`, or a multiple of it that divides X.
        n_B: visible rows, those in slots 0..n_B-1, int64.
        groups: KV heads.
        scale: softmax scale.

    Returns:
        scores_BXS in fp32 (fp64 for fp64); -inf where not visible.

    Raises:
        DataError: sizes that do not go together.
    """
    (B, X, H, D), (batch, _, C, width) = q_BXHD.shape, k_BSCD.shape
    if batch != B or width != D or C % groups or X % C or n_B.shape != (B,):
        raise refusal(
            DataError,
            f"queries {tuple(q_BXHD.shape)}, keys {tuple(k_BSCD.shape)}, {groups} KV heads",
            "one batch, one head dim, key heads a multiple of the KV heads, sets a multiple of both",
        )
    if products_serve(q_BXHD, k_BSCD) and X // C * H <= _MAX_QUERIES and D <= _MAX_DIM:
        from longtrain.kernels.row_scores import launch

        return launch.row_scores(q_BXHD, k_BSCD, n_B, groups, scale)
    return reference.row_scores(q_BXHD, k_BSCD, n_B, groups, scale)

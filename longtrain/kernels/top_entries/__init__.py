"""Exact top-k of KV entries by score, with the first and last entries of a sequence always included.

Ties go to the later entry, so the result depends neither on the number of cache positions nor on how the work
is divided. Three Triton kernels on CUDA, which read nothing back to the host; `reference` in plain torch
everywhere else. Both give the same indices.

Shapes: B batch, X sets of a sequence (one per KV head or group of layers), S cache positions, K entries of a
set.
"""

from __future__ import annotations

from torch import Tensor

from longtrain.errors import DataError, refusal
from longtrain.kernels.devices import runs_on
from longtrain.kernels.top_entries import reference

__all__ = ["choose_entries"]


def choose_entries(
    scores_BXS: Tensor,
    len_B: Tensor,
    out_BXK: Tensor,
    *,
    sinks: int,
    window: int,
    due_B: Tensor | None = None,
) -> None:
    """Write the indices of each set's best entries into `out_BXK`.

    Args:
        scores_BXS: scores in any floating dtype, compared in fp32. NaN counts as the lowest number, and
            infinities as the largest and the lowest. Positions from `len_B` on are ignored.
        len_B: entries of each sequence, at most S, int64.
        out_BXK: output, int64, contiguous in the last dimension: `min(K, len_B)` positions, ascending, and
            zeros after them.
        sinks: number of first entries that are always included.
        window: number of last entries that are always included; `sinks + window` is below K.
        due_B: bool mask of the sequences whose sets are written; None: all.

    Raises:
        DataError: shapes do not match, or `sinks + window` leaves nothing to choose.
    """
    B, X, _ = scores_BXS.shape
    if out_BXK.shape[:2] != (B, X) or len_B.shape != (B,):
        raise refusal(
            DataError,
            f"scores {tuple(scores_BXS.shape)}, lengths {tuple(len_B.shape)}, sets {tuple(out_BXK.shape)}",
            "one batch and one number of sets",
        )
    if sinks + window >= out_BXK.shape[2]:
        raise refusal(
            DataError,
            f"{sinks} first and {window} last entries of {out_BXK.shape[2]}",
            "fewer than a set has",
        )
    if not runs_on(scores_BXS.device):
        reference.choose_entries(scores_BXS, len_B, out_BXK, sinks, window, due_B)
        return
    from longtrain.kernels.top_entries import kernel

    kernel.choose_entries(scores_BXS, len_B, out_BXK, sinks, window, due_B)

"""Chooses the rows with the highest scores, beside the first and the last ones, which are chosen in any case.

A choice is exact: of equal scores the later row is taken, so it depends neither on the number of slots nor on
how the work is divided. On CUDA Triton kernels do it in a handful of launches, which ask the host nothing;
everywhere else `reference` does the same in torch. The results are the same numbers either way.

Shapes: B batch, X sets of a sequence, S slots, K rows of a set.
"""

from __future__ import annotations

from torch import Tensor

from longtrain.errors import DataError, refusal
from longtrain.kernels.devices import runs_on
from longtrain.kernels.row_choice import reference

__all__ = ["choose_rows"]


def choose_rows(
    scores_BXS: Tensor,
    len_B: Tensor,
    out_BXK: Tensor,
    *,
    sinks: int,
    window: int,
    due_B: Tensor | None = None,
) -> None:
    """Write the sets of the sequences that are due.

    Args:
        scores_BXS: of the rows in slots 0..S-1, in any floating dtype, compared in fp32; NaN is lowest, and
            infinities are the largest and the lowest number. Of slots from `len_B` on of no meaning.
        len_B: rows of each sequence, at most S, int64.
        out_BXK: written, int64: `min(K, len_B)` rows, ascending; what follows is 0. Its last dimension
            is contiguous.
        sinks: first rows that are chosen in any case.
        window: last rows that are chosen in any case; with the sinks fewer than K.
        due_B: sequences whose sets are written, bool; None: all.

    Raises:
        DataError: sizes that do not go together, or nothing to choose.
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
            DataError, f"{sinks} first and {window} last rows of {out_BXK.shape[2]}", "fewer than a set has"
        )
    if not runs_on(scores_BXS.device):
        reference.choose_rows(scores_BXS, len_B, out_BXK, sinks, window, due_B)
        return
    from longtrain.kernels.row_choice import launch

    launch.choose_rows(scores_BXS, len_B, out_BXK, sinks, window, due_B)

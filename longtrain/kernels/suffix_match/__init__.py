"""The longest earlier match of a text's last tokens: what a suffix automaton finds, in one pass over it.

A suffix automaton of the text (SAM decoding, arXiv 2411.10666, §3) keeps the longest suffix that occurred
before, of any length. Comparing the end of the text with every earlier place finds the same match, here up to
W tokens, and needs no state but the tokens: so a batch and a CUDA graph are served alike. Among equally long
matches it is the latest.

Triton kernels if `kernels.devices` supports it, which stop where no place of a block agrees any more, else
plain torch (in this file); both give the same numbers.

Shapes: B batch, C places of a ring buffer, W tokens compared, K tokens that follow, T new tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.errors import DataError, refusal
from longtrain.kernels.devices import runs_on

NONE = -1
"""Value of a place without a token."""


def longest_match(tokens_BC: Tensor, last_B: Tensor, most: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the earlier place before which the most tokens agree with the text's end, and what follows it.

    Args:
        tokens_BC: the text as a ring buffer of C places, a power of two: position p is at place p mod C.
            int32, contiguous; `NONE` where there is no token.
        last_B: position of the last token, int64.
        most: W, most tokens that are compared; more of a match do not count.
        count: K, tokens that follow; behind the last token of the text these repeat from the first.

    Returns:
        length_B, the tokens that agree, 0 to `most`; back_B, the distance from the last token to the token
        that it is matched with: the latest such place, 1 if nothing matches; and copy_BK. int64. A match does
        not extend beyond the oldest token of the buffer.

    Raises:
        DataError: C is no power of two, smaller than W or 2, or too large for 32-bit scores.
    """
    slots, least = tokens_BC.shape[1], max(2, most)
    if slots & (slots - 1) or slots < least or slots * (most + 1) >= 2**31:
        raise refusal(
            DataError,
            f"a buffer of {slots} places for matches of {most}",
            f"a power of two from {least} on, below 2^31 / {most + 1}",
        )
    if runs_on(tokens_BC.device):
        from longtrain.kernels.suffix_match import kernel

        return kernel.longest_match(tokens_BC, last_B, most, count)
    best_B = _scores(tokens_BC, last_B, most).amax(1).long()
    length_B, back_B = torch.div(best_B, slots, rounding_mode="floor") + 1, -best_B % slots
    back_B1, step_K = back_B[:, None], torch.arange(count, device=last_B.device)
    place_BK = (last_B[:, None] - back_B1 + 1 + step_K % back_B1) % slots
    return length_B, back_B, tokens_BC.gather(1, place_BK).long()


def write(tokens_BC: Tensor, new_BT: Tensor, first_B: Tensor, n_B: Tensor | None = None) -> None:
    """Write tokens to a ring buffer, and `NONE` in place of those that are not valid.

    Args:
        tokens_BC: the buffer, as of `longest_match`; C >= T.
        new_BT: the tokens, int64.
        first_B: position of the first, int64.
        n_B: the valid ones, the first of each row, int64; None: all.
    """
    if runs_on(tokens_BC.device):
        from longtrain.kernels.suffix_match import kernel

        kernel.write(tokens_BC, new_BT, first_B, n_B)
        return
    step_T = torch.arange(new_BT.shape[1], device=first_B.device)
    if n_B is not None:
        new_BT = new_BT.where(step_T < n_B[:, None], NONE)
    place_BT = (first_B[:, None] + step_T) % tokens_BC.shape[1]
    tokens_BC.scatter_(1, place_BT, new_BT.to(tokens_BC.dtype))


def _scores(tokens_BC: Tensor, last_B: Tensor, most: int) -> Tensor:
    """Score of each place, int32 [B, C]: C times the tokens that agree, minus the distance back."""
    slots, device = tokens_BC.shape[1], tokens_BC.device
    step_W = torch.arange(most, device=device)
    end_BW = tokens_BC.gather(1, (last_B[:, None] - step_W) % slots)
    end_BW = end_BW.where(end_BW != NONE, NONE - 1)  # so that missing tokens match nothing
    place_C = torch.arange(slots, dtype=torch.int32, device=device)
    back_BC = (last_B[:, None].int() - place_C) % slots
    # [B, C, W]: for each place the tokens up to it, newest first, as a view of the buffer's copy
    wrapped_BX = torch.cat((tokens_BC[:, slots - most + 1 :], tokens_BC), 1)
    agrees_BCW = wrapped_BX.unfold(1, most, 1) == end_BW.flip(1)[:, None]
    differs_BCW = ~agrees_BCW.flip(2)
    first_BC = differs_BCW.to(torch.uint8).argmax(2).int()
    first_BC = first_BC.where(differs_BCW.any(2), most)
    length_BC = first_BC.minimum(slots - back_BC)  # older tokens are overwritten by the newest
    score_BC = length_BC * slots - back_BC
    return score_BC.where(back_BC != 0, -slots)  # not the end itself

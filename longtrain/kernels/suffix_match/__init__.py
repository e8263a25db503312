"""The longest earlier match of a text's last tokens: what a suffix automaton finds, in one pass over it.

A suffix automaton of the text (SAM decoding, arXiv 2411.10666, §3) keeps the longest suffix that occurred
before, of any length. Comparing the end of the text with every earlier place finds the same match, here up to
W tokens, and needs no state but the tokens: so a batch and a CUDA graph are served alike. Among equally long
matches it is the latest.

One Triton kernel if `kernels.devices` supports it, which stops where no place of a block agrees any more,
else plain torch (in this file); both give the same numbers.

Shapes: B batch, C places of a ring buffer, W tokens compared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.errors import DataError, refusal
from longtrain.kernels.devices import runs_on

NONE = -1
"""Value of a place without a token."""


def longest_match(tokens_BC: Tensor, last_B: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Find the earlier place before which the most tokens agree with the end of the text.

    Args:
        tokens_BC: the text as a ring buffer of C places, a power of two: position p is at place p mod C.
            int32, contiguous; `NONE` where there is no token.
        last_B: position of the last token, int64.
        most: W, most tokens that are compared; more of a match do not count.

    Returns:
        length_B, the tokens that agree, 0 to `most`, and back_B, the distance from the last token to the
        token that it is matched with: the latest such place. 1 if nothing matches. int64. A match does not
        extend beyond the oldest token of the buffer.

    Raises:
        DataError: C is no power of two, or too large for 32-bit scores.
    """
    slots = tokens_BC.shape[1]
    if slots & (slots - 1) or slots * (most + 1) >= 2**31:
        raise refusal(
            DataError, f"a buffer of {slots} places for matches of {most}", "a power of two below 2^31 / most"
        )
    if runs_on(tokens_BC.device):
        from longtrain.kernels.suffix_match import kernel

        best_B = kernel.best_scores(tokens_BC, last_B, most).amax(1)
    else:
        best_B = _scores(tokens_BC, last_B, most).amax(1)
    best_B = best_B.long()
    return torch.div(best_B, slots, rounding_mode="floor") + 1, -best_B % slots


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

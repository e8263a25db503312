"""The text so far on the device, in which look-up finds earlier occurrences of its end.

Shapes: B batch, S prompt tokens, C places of the ring buffer, T new tokens, K copied tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.kernels.suffix_match import NONE, longest_match

_SPARE = 4096
"""Least room for new tokens; beyond it the oldest are overwritten."""


class History:
    """The sequences so far, from which continuations are copied; everything is updated in place.

    A sequence is a ring buffer of C places, a power of two: position p is at place p mod C.

    Args:
        batch: number of sequences.
        longest: tokens of the longest prompt.
        device: device of the tokens.
    """

    def __init__(self, batch: int, longest: int, device: torch.device) -> None:
        self.slots = _slots(longest)
        self.tokens_BC = torch.full((batch, self.slots), NONE, dtype=torch.int32, device=device)

    def serves(self, batch: int, longest: int, device: torch.device) -> bool:
        """Return True if the buffer fits these prompts."""
        tokens = self.tokens_BC
        return (len(tokens), self.slots, tokens.device) == (batch, _slots(longest), device)

    def fill(self, tokens_BS: Tensor, n_B: Tensor) -> None:
        """Start with prompts of `n_B` tokens, right-padded."""
        S = tokens_BS.shape[1]
        real_BS = torch.arange(S, device=n_B.device) < n_B[:, None]
        self.tokens_BC.fill_(NONE)
        self.tokens_BC[:, :S] = tokens_BS.where(real_BS, NONE)

    def put(self, tokens_BT: Tensor, first_B: Tensor, n_B: Tensor) -> None:
        """Write the first `n_B` of some tokens from position `first_B` on, and `NONE` behind them."""
        step_T = torch.arange(tokens_BT.shape[1], device=first_B.device)
        at_BT = (first_B[:, None] + step_T) % self.slots
        tokens_BT = tokens_BT.where(step_T < n_B[:, None], NONE).to(self.tokens_BC.dtype)
        self.tokens_BC.scatter_(1, at_BT, tokens_BT)

    def extend(self, root_B: Tensor, last_B: Tensor, count: int, most: int) -> tuple[Tensor, Tensor]:
        """Append a token to each sequence, and copy what followed the longest earlier match of its end.

        A copy that reaches the end of the text repeats from its start, so a loop is continued as a loop; if
        not even the last token occurred before, that token is repeated.

        Args:
            root_B: the appended token, int64.
            last_B: its position, int64.
            count: K, number of tokens to copy.
            most: most tokens that are compared.

        Returns:
            copy_BK, int64, and length_B, the tokens that agreed: 0 to `most`.
        """
        last_B1 = last_B[:, None]
        self.tokens_BC.scatter_(1, last_B1 % self.slots, root_B[:, None].to(self.tokens_BC.dtype))
        length_B, back_B = longest_match(self.tokens_BC, last_B, most)
        back_B1 = back_B[:, None]
        pos_BK = last_B1 - back_B1 + 1 + torch.arange(count, device=last_B.device) % back_B1
        return self.tokens_BC.gather(1, pos_BK % self.slots).long(), length_B


def _slots(longest: int) -> int:
    """Return a power of two with room for the prompt and at least as much again."""
    return 1 << (max(2 * longest, longest + _SPARE) - 1).bit_length()

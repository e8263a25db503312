"""The text so far on the device, in which look-up finds earlier occurrences of its end.

Shapes: B batch, S prompt tokens, C places of the ring buffer, T new tokens, K copied tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.kernels.suffix_match import NONE, longest_match, write

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
        write(self.tokens_BC, tokens_BT, first_B, n_B)

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
        write(self.tokens_BC, root_B[:, None], last_B)
        length_B, _, copy_BK = longest_match(self.tokens_BC, last_B, most, count)
        return copy_BK, length_B


def _slots(longest: int) -> int:
    """Return a power of two with room for the prompt and at least as much again."""
    return 1 << (max(2 * longest, longest + _SPARE) - 1).bit_length()

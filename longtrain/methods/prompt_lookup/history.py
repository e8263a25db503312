"""The tokens of a batch of texts, on the device, and where their last ones occurred before.

Shapes: B batch, S prompt tokens, C slots, W tokens that are compared, X = W - 1 + C, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SPARE = 4096
"""Least room for new tokens; beyond it the oldest are forgotten."""
_NONE = -1
"""What a slot without a token holds."""


class History:
    """Tokens in a ring: position p lies in slot p mod C. Everything is updated in place.

    W - 1 empty slots come first, so that the tokens up to each one are a view. A match does not reach over
    the ring's seam; where its newest token meets its oldest, one may be taken for longer than it is.

    Args:
        batch: texts.
        longest: tokens of the longest prompt.
        ngram: W, most tokens of the end that are compared.
        device: the device that the tokens are on.
    """

    def __init__(self, batch: int, longest: int, ngram: int, device: torch.device) -> None:
        self.slots, self.ngram = _slots(longest), ngram
        self.tokens_BX = torch.full((batch, ngram - 1 + self.slots), _NONE, dtype=torch.int32, device=device)
        self._from_C = self.slots - torch.arange(self.slots, dtype=torch.int32, device=device)
        self._to_W = torch.arange(ngram, device=device)

    def serves(self, batch: int, longest: int, device: torch.device) -> bool:
        """Whether it is one for prompts like these."""
        tokens = self.tokens_BX
        return (len(tokens), self.slots, tokens.device) == (batch, _slots(longest), device)

    def fill(self, tokens_BS: Tensor, n_B: Tensor) -> None:
        """Begin with prompts of `n_B` tokens, right-padded."""
        S, first = tokens_BS.shape[1], self.ngram - 1
        real_BS = torch.arange(S, device=n_B.device) < n_B[:, None]
        self.tokens_BX.fill_(_NONE)
        self.tokens_BX[:, first : first + S] = tokens_BS.where(real_BS, _NONE)

    def put(self, tokens_BT: Tensor, pos_BT: Tensor) -> None:
        """Write tokens at their positions; -1 where there is none."""
        at_BT = pos_BT % self.slots + (self.ngram - 1)
        self.tokens_BX.scatter_(1, at_BT, tokens_BT.to(self.tokens_BX.dtype))

    def at(self, pos_BT: Tensor) -> Tensor:
        """Tokens at positions, int64."""
        return self.tokens_BX.gather(1, pos_BT % self.slots + (self.ngram - 1)).long()

    def find(self, last_B: Tensor) -> Tensor:
        """How far back a text's end stands once more: the most of its last tokens, and the latest of these.

        Args:
            last_B: position of each text's last token.

        Returns: distance_B, 1 or more, int64; 0 where not even the last token occurred before.
        """
        slot_B1 = last_B[:, None] % self.slots
        end_BW = self.tokens_BX.gather(1, slot_B1 + self._to_W)
        end_BW = end_BW.where(end_BW != _NONE, _NONE - 1)  # what is not there is nowhere else either
        equal_BCW = self.tokens_BX.unfold(1, self.ngram, 1) == end_BW[:, None]
        run_BC = equal_BCW[..., -1]
        matched_BC = run_BC.int()
        for k in range(self.ngram - 2, -1, -1):
            run_BC = run_BC & equal_BCW[..., k]
            matched_BC += run_BC
        matched_BC.scatter_(1, slot_B1, 0)  # the end itself
        distance_BC = (slot_B1.int() + self._from_C) & (self.slots - 1)
        best_B = (matched_BC * self.slots - distance_BC).amax(1).clamp(min=0)
        return (-best_B & (self.slots - 1)).long()

    def bytes(self) -> int:
        """Bytes of the tokens and of their slots' numbers."""
        return self.tokens_BX.nbytes + self._from_C.nbytes + self._to_W.nbytes


def _slots(longest: int) -> int:
    """A power of two with room for the prompt and as much again."""
    return 1 << (max(2 * longest, longest + _SPARE) - 1).bit_length()

"""The tokens of a batch of texts, on the device, and where their last ones occurred before.

Shapes: B batch, S prompt tokens, C slots, T tokens, P path.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SPARE = 4096
"""Least room for new tokens; beyond it the oldest are forgotten."""


class History:
    """Tokens in a ring: position p lies in slot p mod C. Everything is updated in place.

    Args:
        batch: texts.
        longest: tokens of the longest prompt.
        device: of the tokens.
    """

    def __init__(self, batch: int, longest: int, device: torch.device) -> None:
        self.slots = _slots(longest)
        self.tokens_BC = torch.zeros(batch, self.slots, dtype=torch.int32, device=device)
        self._slot_C = torch.arange(self.slots, dtype=torch.int32, device=device)

    def serves(self, batch: int, longest: int, device: torch.device) -> bool:
        """Whether it is one for prompts like these."""
        tokens = self.tokens_BC
        return (len(tokens), self.slots, tokens.device) == (batch, _slots(longest), device)

    def fill(self, tokens_BS: Tensor) -> None:
        """Begin with prompts, right-padded."""
        self.tokens_BC[:, : tokens_BS.shape[1]] = tokens_BS

    def put(self, tokens_BT: Tensor, pos_BT: Tensor, valid_BT: Tensor) -> None:
        """Write tokens at their positions, those that are valid."""
        slot_BT = pos_BT % self.slots
        old_BT = self.tokens_BC.gather(1, slot_BT)
        self.tokens_BC.scatter_(1, slot_BT, tokens_BT.to(old_BT.dtype).where(valid_BT, old_BT))

    def at(self, pos_BT: Tensor) -> Tensor:
        """Tokens at positions, int64."""
        return self.tokens_BC.gather(1, pos_BT % self.slots).long()

    def find(self, last_B: Tensor, ngram: int) -> Tensor:
        """How far back a text's end stands once more: the most of its last tokens, and the latest of these.

        Args:
            last_B: position of each text's last token.
            ngram: most tokens of the end that are compared.

        Returns: distance_B, 1 or more, int64; 0 where not even the last token occurred before.
        """
        mask = self.slots - 1
        back_B1 = last_B[:, None].to(torch.int32)
        distance_BC = (back_B1 - self._slot_C) & mask
        run_BC, matched_BC = distance_BC > 0, torch.zeros_like(distance_BC)
        for k in range(ngram):
            # A match of k + 1 tokens ends in a slot if the k before it match too and are still in the ring.
            inside_BC = distance_BC <= (back_B1 - k).clamp(max=mask - k)
            end_B1 = self.tokens_BC.gather(1, ((last_B - k) % self.slots)[:, None])
            run_BC = run_BC & inside_BC & (self.tokens_BC.roll(k, 1) == end_B1)
            matched_BC += run_BC
        score_BC = torch.where(matched_BC > 0, matched_BC * self.slots - distance_BC, 0)
        best_B = score_BC.amax(1).long()
        return -best_B % self.slots

    def bytes(self) -> int:
        """Bytes of the tokens and of their slots' numbers."""
        return self.tokens_BC.nbytes + self._slot_C.nbytes


def _slots(longest: int) -> int:
    """A power of two with room for the prompt and as much again."""
    return 1 << (max(2 * longest, longest + _SPARE) - 1).bit_length()

"""The prompt look-up draft: no model, one search through the text per cycle.

Shapes: B batch, S prompt tokens, C positions of the ring buffer, W tokens that are compared, X = W - 1 + C, T
new tokens, N nodes, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.decoding.expansion import check_chain
from longtrain.decoding.roles import ChildChoice, TokenTree, TreeShape, Verdict
from longtrain.decoding.sampling import Rng, Sampling
from longtrain.decoding.tree import chain
from longtrain.errors import ConflictError
from longtrain.targets.step import OutputRequest, TargetStep

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.targets.model import Target


_SPARE = 4096
"""Least room for new tokens; beyond it the oldest are overwritten."""


NONE = -1
"""Value of a place without a token."""


class History:
    """The sequences so far, from which continuations are copied; everything is updated in place.

    A sequence is a ring buffer of C places, a power of two: position p is at index W - 1 + p mod C of
    the tensor, so that the W tokens up to each place are a slice; -1 where there is no token.

    Args:
        batch: number of sequences.
        longest: tokens of the longest prompt.
        ngram: W, most tokens at the end of the sequence that are compared.
        device: device of the tokens.
    """

    def __init__(self, batch: int, longest: int, ngram: int, device: torch.device) -> None:
        self.slots, self.ngram = _slots(longest), ngram
        self.tokens_BX = torch.full((batch, ngram - 1 + self.slots), NONE, dtype=torch.int32, device=device)

    def serves(self, batch: int, longest: int, device: torch.device) -> bool:
        """Return True if the buffer fits these prompts."""
        tokens = self.tokens_BX
        return (len(tokens), self.slots, tokens.device) == (batch, _slots(longest), device)

    def fill(self, tokens_BS: Tensor, n_B: Tensor) -> None:
        """Start with prompts of `n_B` tokens, right-padded."""
        S, first = tokens_BS.shape[1], self.ngram - 1
        real_BS = torch.arange(S, device=n_B.device) < n_B[:, None]
        self.tokens_BX.fill_(NONE)
        self.tokens_BX[:, first : first + S] = tokens_BS.where(real_BS, NONE)

    def put(self, tokens_BT: Tensor, first_B: Tensor, n_B: Tensor) -> None:
        """Write the first `n_B` of some tokens from position `first_B` on, and -1 behind them."""
        step_T = torch.arange(tokens_BT.shape[1], device=first_B.device)
        at_BT = (first_B[:, None] + step_T) % self.slots + (self.ngram - 1)
        tokens_BT = tokens_BT.where(step_T < n_B[:, None], NONE).to(self.tokens_BX.dtype)
        self.tokens_BX.scatter_(1, at_BT, tokens_BT)

    def extend(self, root_B: Tensor, last_B: Tensor, count: int) -> Tensor:
        """Append a token to each sequence, and copy what followed the latest, longest match of its end.

        Among all earlier places, the one that agrees with the most of the last W tokens is taken, the latest
        if there are several. A copy that reaches the end repeats from its start; if not even the last token
        occurred before, that token is repeated. A match does not continue across the buffer's end; where its
        newest token meets its oldest, a match may be overestimated.

        Args:
            root_B: the appended token, int64.
            last_B: its position, int64.
            count: number of tokens to copy.

        Returns:
            tokens_BN, the appended token and the copy, int64.
        """
        slots, device, last_B1 = self.slots, last_B.device, last_B[:, None]
        self.put(root_B[:, None], last_B, torch.ones_like(last_B))
        slot_B1 = last_B1 % slots
        end_BW = self.tokens_BX.gather(1, slot_B1 + torch.arange(self.ngram, device=device))
        end_BW = end_BW.where(end_BW != NONE, NONE - 1)  # so that missing tokens match nothing
        # matched_BC: how many tokens before each place agree, from the newest back to the first difference
        matched_BC = torch.zeros(len(last_B), slots, dtype=torch.int64, device=device)
        agrees_BC: Tensor | None = None
        for w in reversed(range(self.ngram)):
            same_BC = self.tokens_BX[:, w : w + slots] == end_BW[:, w : w + 1]
            agrees_BC = same_BC if agrees_BC is None else agrees_BC & same_BC
            matched_BC += agrees_BC
        matched_BC.scatter_(1, slot_B1, 0)  # not the end itself
        back_BC = (slot_B1 - torch.arange(slots, device=device)) % slots
        # one maximum over (longest match, then the smallest distance back)
        best_B = (matched_BC * slots - back_BC).amax(1).clamp(min=0)
        back_B1 = (-best_B % slots).clamp(min=1)[:, None]
        pos_BT = last_B1 - back_B1 + 1 + torch.arange(count, device=device) % back_B1
        copy_BT = self.tokens_BX.gather(1, pos_BT % slots + (self.ngram - 1)).long()
        return torch.cat((root_B[:, None], copy_BT), 1)


def _slots(longest: int) -> int:
    """Return a power of two with room for the prompt and at least as much again."""
    return 1 << (max(2 * longest, longest + _SPARE) - 1).bit_length()


class PromptLookupRuntime:
    """Proposes chains (`decoding.roles.Draft`): the tokens that followed an earlier match of the last tokens.

    The longest match of up to `ngram` tokens counts, and the latest of those. A copy that reaches the end of
    the text repeats from its start, so a loop is drafted as a loop. Without a match the last token is
    repeated, since a tree has a fixed shape.

    Args:
        target: the target, for the size of its vocabulary.
        ngram: most tokens that are compared.

    Source: LLMA (arXiv 2304.04487) §3; prompt look-up decoding (Saxena 2023) for n-grams from long to short.
    Note: both take the first of several matches; the latest is as cheap here and predicts the text more
        often.
    """

    outputs = OutputRequest()
    offers = tuple((1,) * n for n in (1, 2, 4, 8, 12, 16))
    """Chain lengths offered for tuning; a longer copy costs the draft nothing."""
    begins_anew = True

    def __init__(self, target: Target, ngram: int) -> None:
        self.target, self.ngram = target, ngram
        self.history: History | None = None
        self.cache: KVCache | None = None

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Store the prompts; earlier sequences are discarded."""
        self.cache = cache
        B, S = tokens_BS.shape
        if self.history is None or not self.history.serves(B, S, tokens_BS.device):
            self.history = History(B, S, self.ngram, tokens_BS.device)
        self.history.fill(tokens_BS, n_B)

    def check_shape(self, shape: TreeShape) -> None:
        """Refuse a shape that is no chain (`decoding.roles.Draft`)."""
        check_chain(shape, "prompt look-up")

    def propose(self, root_B: Tensor, shape: TreeShape, sampling: Sampling, rng: Rng) -> TokenTree:
        """Draft a chain below the root; as a sampled draft, each token has probability 1.

        Raises:
            ConfigError: a shape that is no chain.
            ConflictError: called before `start`.
        """
        history, cache = self._state()
        self.check_shape(shape)
        tokens_BN = history.extend(root_B, cache.len_B, shape.depth)
        if shape.children is ChildChoice.POINT:
            return chain(tokens_BN)
        q_BNV = torch.zeros(*tokens_BN.shape, self.target.info.vocab_size, device=root_B.device)
        q_BNV[:, :-1].scatter_(2, tokens_BN[:, 1:, None], 1.0)
        return chain(tokens_BN, children=shape.children, q_BNV=q_BNV)

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """Append the accepted tokens to the sequences."""
        history, cache = self._state()
        history.put(tree.tokens_BN, verdict.root_pos(cache.len_B), verdict.n_B)

    def bytes(self) -> int:
        """Return the bytes of the tokens."""
        return 0 if self.history is None else self.history.tokens_BX.nbytes

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensor of the tokens."""
        return () if self.history is None else (self.history.tokens_BX,)

    def _state(self) -> tuple[History, KVCache]:
        if self.history is None or self.cache is None:
            raise ConflictError(
                "a prompt look-up draft was asked before start(); run it through Engine.generate"
            )
        return self.history, self.cache

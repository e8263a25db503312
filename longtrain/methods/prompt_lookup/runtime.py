"""The draft at work: no model, one search through the text a cycle.

Shapes: B batch, S prompt tokens, C slots, W tokens that are compared, X = W - 1 + C, T drafted tokens,
N nodes, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.decoding.growth import check_chain
from longtrain.decoding.roles import Law, TokenTree, TreeShape, Verdict
from longtrain.decoding.sampling import Coins, Sampling
from longtrain.decoding.tree import chain
from longtrain.errors import ConflictError
from longtrain.targets.step import TargetStep, Want

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.targets.model import Target


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


class PromptLookupRuntime:
    """Proposes chains (`decoding.roles.Draft`): what followed the text's last tokens where they stood before.

    The longest match of up to `ngram` tokens counts, and the latest of those. A copy that reaches the end of
    the text goes on with what was copied, so a loop is drafted as a loop. Where nothing matches the last
    token is repeated, for a tree has one shape.

    Args:
        target: the target, for the size of its vocabulary.
        ngram: most tokens that are looked up.

    Source: LLMA (arXiv 2304.04487) §3; prompt look-up decoding (Saxena 2023) for n-grams from long to short.
    Note: both take the first of several matches; the latest is as cheap here and follows the text more often.
    """

    want = Want()
    offers = tuple((1,) * n for n in (1, 2, 4, 8, 12, 16))
    """A longer copy costs the draft nothing."""
    begins_anew = True

    def __init__(self, target: Target, ngram: int) -> None:
        self.target, self.ngram = target, ngram
        self.history: History | None = None
        self.cache: KVCache | None = None

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Take the prompts; older texts are forgotten."""
        self.cache = cache
        B, S = tokens_BS.shape
        if self.history is None or not self.history.serves(B, S, tokens_BS.device):
            self.history = History(B, S, self.ngram, tokens_BS.device)
        self.history.fill(tokens_BS, n_B)

    def check_shape(self, shape: TreeShape) -> None:
        """Refuse a shape that is no chain (`decoding.roles.Draft`)."""
        check_chain(shape, "prompt look-up")

    def propose(self, root_B: Tensor, shape: TreeShape, sampling: Sampling, coins: Coins) -> TokenTree:
        """Draft a chain below the root; of the sampled laws it has the one of a certain token.

        Raises:
            ConfigError: a shape that is no chain.
            ConflictError: called before `start`.
        """
        history, cache = self._state()
        self.check_shape(shape)
        last_B1 = cache.len_B[:, None]
        history.put(root_B[:, None], last_B1)
        back_B1 = history.find(cache.len_B).clamp(min=1)[:, None]
        ahead_T = torch.arange(shape.depth, device=root_B.device)
        copy_BT = history.at(last_B1 - back_B1 + 1 + ahead_T % back_B1)
        tokens_BN = torch.cat((root_B[:, None], copy_BT), 1)
        if shape.law is Law.POINT:
            return chain(tokens_BN)
        q_BNV = torch.zeros(*tokens_BN.shape, self.target.info.vocab_size, device=root_B.device)
        q_BNV[:, :-1].scatter_(2, copy_BT[..., None], 1.0)
        return chain(tokens_BN, law=shape.law, q_BNV=q_BNV)

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """The accepted tokens are text now."""
        history, cache = self._state()
        n_B, step_P = verdict.n_B, torch.arange(tree.tokens_BN.shape[1], device=verdict.n_B.device)
        tokens_BP = tree.tokens_BN.where(step_P < n_B[:, None], -1)
        history.put(tokens_BP, (cache.len_B - n_B)[:, None] + step_P)

    def bytes(self) -> int:
        """Bytes of the tokens."""
        return 0 if self.history is None else self.history.bytes()

    def tensors(self) -> tuple[Tensor, ...]:
        """The tokens."""
        return () if self.history is None else (self.history.tokens_BX,)

    def _state(self) -> tuple[History, KVCache]:
        if self.history is None or self.cache is None:
            raise ConflictError(
                "a prompt look-up draft was asked before start(); run it through Engine.generate"
            )
        return self.history, self.cache

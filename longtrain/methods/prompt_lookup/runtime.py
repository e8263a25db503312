"""The draft at work: no model, one search through the text a cycle.

Shapes: B batch, S prompt tokens, C slots, W tokens that are compared, X = W - 1 + C, T new tokens, N nodes,
V vocabulary.
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
from longtrain.kernels.lookup import NONE, extend, put
from longtrain.targets.step import TargetStep, Want

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.targets.model import Target


_SPARE = 4096
"""Least room for new tokens; beyond it the oldest are forgotten."""


class History:
    """Texts in rings as `kernels.lookup` has them; everything is updated in place.

    Args:
        batch: texts.
        longest: tokens of the longest prompt.
        ngram: W, most tokens of the end that are compared.
        device: the device that the tokens are on.
    """

    def __init__(self, batch: int, longest: int, ngram: int, device: torch.device) -> None:
        self.slots, self.ngram = _slots(longest), ngram
        self.tokens_BX = torch.full((batch, ngram - 1 + self.slots), NONE, dtype=torch.int32, device=device)

    def serves(self, batch: int, longest: int, device: torch.device) -> bool:
        """Whether it is one for prompts like these."""
        tokens = self.tokens_BX
        return (len(tokens), self.slots, tokens.device) == (batch, _slots(longest), device)

    def fill(self, tokens_BS: Tensor, n_B: Tensor) -> None:
        """Begin with prompts of `n_B` tokens, right-padded."""
        S, first = tokens_BS.shape[1], self.ngram - 1
        real_BS = torch.arange(S, device=n_B.device) < n_B[:, None]
        self.tokens_BX.fill_(NONE)
        self.tokens_BX[:, first : first + S] = tokens_BS.where(real_BS, NONE)

    def put(self, tokens_BT: Tensor, first_B: Tensor, n_B: Tensor) -> None:
        """Write the first `n_B` of a step's tokens from position `first_B` on."""
        put(self.tokens_BX, self.ngram, tokens_BT, first_B, n_B)

    def extend(self, root_B: Tensor, last_B: Tensor, count: int) -> Tensor:
        """Append tokens at positions `last_B`, and copy `count` tokens behind each: tokens_BN."""
        return extend(self.tokens_BX, self.ngram, root_B, last_B, count)


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
        tokens_BN = history.extend(root_B, cache.len_B, shape.depth)
        if shape.law is Law.POINT:
            return chain(tokens_BN)
        q_BNV = torch.zeros(*tokens_BN.shape, self.target.info.vocab_size, device=root_B.device)
        q_BNV[:, :-1].scatter_(2, tokens_BN[:, 1:, None], 1.0)
        return chain(tokens_BN, law=shape.law, q_BNV=q_BNV)

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """The accepted tokens are text now."""
        history, cache = self._state()
        history.put(tree.tokens_BN, verdict.root_pos(cache.len_B), verdict.n_B)

    def bytes(self) -> int:
        """Bytes of the tokens."""
        return 0 if self.history is None else self.history.tokens_BX.nbytes

    def tensors(self) -> tuple[Tensor, ...]:
        """The tokens."""
        return () if self.history is None else (self.history.tokens_BX,)

    def _state(self) -> tuple[History, KVCache]:
        if self.history is None or self.cache is None:
            raise ConflictError(
                "a prompt look-up draft was asked before start(); run it through Engine.generate"
            )
        return self.history, self.cache

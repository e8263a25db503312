"""The draft at work: no model, one search through the text a cycle.

Shapes: B batch, S prompt tokens, T drafted tokens, N nodes, V vocabulary.
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
from longtrain.methods.prompt_lookup.history import History
from longtrain.targets.step import TargetStep, Want

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.targets.model import Target


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

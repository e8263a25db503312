"""The prompt look-up draft: no model, one search through the text per cycle.

Shapes: B batch, S prompt tokens, N nodes, P path, K copied tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.decoding.expansion import check_chain
from longtrain.decoding.roles import TokenTree, TreeShape, Verdict
from longtrain.decoding.sampling import Rng, Sampling
from longtrain.decoding.tree import chain
from longtrain.methods.prompt_lookup.history import History
from longtrain.targets.step import OutputRequest, TargetStep

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache


class PromptLookupRuntime:
    """Proposes chains (`decoding.roles.Draft`): the tokens that followed the longest match of the text's end.

    The longest match of up to `ngram` tokens counts, and the latest of those: what a suffix automaton over
    prompt and output finds (`kernels.suffix_match`). A copy that reaches the end of the text repeats from its
    start. Without a match the last token is repeated, since a tree has a fixed shape.

    Args:
        ngram: most tokens that are compared.

    Source: SAM decoding (arXiv 2411.10666) §3, its dynamic automaton over the text itself; LLMA (arXiv
        2304.04487) §3 and prompt look-up decoding (Saxena 2023) for matches of a few tokens.
    Note: these continue from the first of several equally long matches; the latest is as cheap here and
        predicts the text more often.
    """

    outputs = OutputRequest()
    offers = tuple((1,) * n for n in (1, 2, 4, 8, 12, 16))
    """Chain lengths offered for tuning; a longer copy costs the draft nothing."""
    begins_anew = True

    def __init__(self, ngram: int) -> None:
        self.ngram = ngram
        self.history: History | None = None
        self.cache: KVCache | None = None

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Store the prompts; earlier sequences are discarded."""
        self.cache = cache
        B, S = tokens_BS.shape
        if self.history is None or not self.history.serves(B, S, tokens_BS.device):
            self.history = History(B, S, tokens_BS.device)
        self.history.fill(tokens_BS, n_B)

    def check_shape(self, shape: TreeShape) -> None:
        """Refuse a shape that is no chain (`decoding.roles.Draft`)."""
        check_chain(shape, "prompt look-up")

    def look(self, root_B: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Copy what followed the longest match of the text and its new last token.

        Returns:
            copy_BK, `count` tokens, and the number of tokens that agreed, int64_B.
        """
        history, cache = self._state()
        return history.extend(root_B, cache.len_B, count, self.ngram)

    def propose(self, root_B: Tensor, shape: TreeShape, sampling: Sampling, rng: Rng) -> TokenTree:
        """Draft a chain below the root; as a sampled draft, each token has probability 1.

        Raises:
            ConfigError: a shape that is no chain.
        """
        self.check_shape(shape)
        copy_BK, _ = self.look(root_B, shape.depth)
        tokens_BN = torch.cat((root_B[:, None], copy_BK), 1)
        return chain(tokens_BN, children=shape.children, copied=shape.depth)

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """Append the accepted tokens to the sequences."""
        history, cache = self._state()
        tokens_BP = tree.tokens_BN.gather(1, verdict.path_BP)
        history.put(tokens_BP, verdict.root_pos(cache.len_B), verdict.n_B)

    def bytes(self) -> int:
        """Return the bytes of the tokens."""
        return 0 if self.history is None else self.history.tokens_BC.nbytes

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensor of the tokens."""
        return () if self.history is None else (self.history.tokens_BC,)

    def _state(self) -> tuple[History, KVCache]:
        assert self.history is not None and self.cache is not None
        return self.history, self.cache

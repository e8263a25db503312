"""What gives a slot's logits from the token before it, Markov head or DFlash2's selector; the confidence.

Shapes: E hidden dim, F rank, V vocabulary, K tokens that the draft can propose, C candidates of a slot. `...`
stands for any leading dims, which are broadcast.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear


class PathHead(nn.Module):
    """Corrects a slot's logits by `matrix context(state, token before)`.

    Training, decoding, trees and the record of exported folders use this alone.

    Args:
        vocab_size: V, tokens that can come before a slot.
        top: only so many tokens of a slot can be drafted, those of its largest uncorrected logits; 0: all.
    """

    def __init__(self, vocab_size: int, top: int = 0) -> None:
        super().__init__()
        self.vocab_size, self.top = vocab_size, top

    @property
    def matrix(self) -> Tensor:
        """One row for each token that can be drafted, [K, F]."""
        raise NotImplementedError

    def context(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return what the matrix is multiplied by, [..., F].

        Args:
            hidden: states of slots, [..., E].
            ids: the token before each one's, [...], in the target's vocabulary.
        """
        raise NotImplementedError

    def start(self) -> None:
        """Correct nothing: training begins as DFlash's.

        The embeddings of the token before are large, because a row of them changes only in steps with its
        token, and the matrix learns as fast as they are.
        """
        raise NotImplementedError

    def added(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return the correction of all tokens, [..., K]; see `context`."""
        return linear(self.context(hidden, ids), self.matrix)

    def forward(self, base: Tensor, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return the logits of slots [..., K], -inf for tokens that cannot be drafted.

        Args:
            base: the LM head's logits, [..., K].
            hidden: as in `context`.
            ids: as in `context`.
        """
        return base + self.added(hidden, ids)

    def smooth(self, base: Tensor, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return logits as `forward` does, but as a continuous function of its arguments."""
        return self(base, hidden, ids)


class MarkovHead(PathHead):
    """DSpark's correction, which depends on the token before alone: `markov_w2 markov_w1[token]`."""

    def __init__(self, vocab_size: int, rank: int, drafted: int) -> None:
        super().__init__(vocab_size)
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)

    @property
    def matrix(self) -> Tensor:
        """See `PathHead.matrix`."""
        return self.markov_w2.weight

    def context(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """See `PathHead.context`."""
        return self.markov_w1(ids)

    def start(self) -> None:
        """See `PathHead.start`."""
        nn.init.normal_(self.markov_w1.weight)
        nn.init.zeros_(self.markov_w2.weight)


class CandidateSelector(PathHead):
    """DFlash2's choice among a slot's candidates: `score(v) = u[v] + <P[token] * W h, S[v]>`.

    The candidates are the tokens of the `top` largest logits u; h is the slot's state.

    Source: DFlash2's authors' code; the names are those of their folders.
    """

    def __init__(self, vocab_size: int, hidden: int, rank: int, top: int) -> None:
        super().__init__(vocab_size, top)
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    @property
    def matrix(self) -> Tensor:
        """See `PathHead.matrix`."""
        return self.successor_codebook

    def context(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """See `PathHead.context`."""
        return embedding(ids, self.predecessor_codebook) * self.hidden_projection(hidden)

    def start(self) -> None:
        """See `PathHead.start`."""
        nn.init.normal_(self.predecessor_codebook)
        nn.init.zeros_(self.successor_codebook)

    def forward(self, base: Tensor, hidden: Tensor, ids: Tensor) -> Tensor:
        """See `PathHead.forward`; only rows of candidates are multiplied."""
        unary, at = base.topk(self.top, dim=-1)
        context = self.context(hidden, ids)
        score = unary + (self.matrix[at] @ context[..., None])[..., 0]
        none = base.new_full((*score.shape[:-1], base.shape[-1]), float("-inf"))
        return none.scatter(-1, at.expand_as(score), score)

    def smooth(self, base: Tensor, hidden: Tensor, ids: Tensor) -> Tensor:
        """See `PathHead.smooth`; other tokens lose as much as their logits are below the last candidate's."""
        last = base.topk(self.top, dim=-1).values[..., -1:]
        return base + self.added(hidden, ids) + (base - last).clamp(max=0)


class ConfidenceHead(nn.Module):
    """Predicts the logit of a slot's token being accepted, where all before it were."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Return logits [...] of slots [..., E] after tokens with Markov embeddings [..., F]."""
        return self.proj(torch.cat((hidden, before), -1)).squeeze(-1)

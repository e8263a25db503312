"""The retrieval head at inference: stores a key of every committed token, and scores before each forward.

With n tokens committed and the root after them, keys 0..n-1 are stored; token n, the root, gives the query,
and its key is computed along with it. All its inputs are known before the target reads the root: its
embedding, and the target's hidden states of token n - 1.

Shapes: B batch, S cache positions or prompt tokens, P tokens, X sets, H query heads, G KV heads, D head dim,
E hidden dim, W embeddings mixed, L target layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.decoding.retrieval.own_keys import KeyedSelector
from longtrain.kernels.entry_scores import entry_scores
from longtrain.methods.rope import ModuleRope
from longtrain.methods.specontext.config import Config, key_offset
from longtrain.methods.specontext.modules import RetrievalHead
from longtrain.targets.step import OutputRequest, TargetStep

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.cache.entry_sets import ReadBudget
    from longtrain.decoding.roles import TokenTree, Verdict
    from longtrain.targets.model import Target

CHUNK = 4096
"""Prompt tokens that are computed at once."""


class RetrievalSelector(KeyedSelector):
    """Scores KV entries with a retrieval head (`decoding.retrieval.selector.Selector`).

    Its state is its own keys, and for each sequence the inputs of the next token: the target's hidden states
    of the last token, or the embeddings of the last tokens. All are updated in place.

    Args:
        head: the module, in the target's dtype and on its device.
        target: provides embeddings, hidden states, and rotary if the head has none of its own.
        config: hyperparameters.
        budget: see `Selector`.

    Source: SpeContext §4.3.
    """

    name, title = "specontext", "a retrieval head"

    def __init__(self, head: RetrievalHead, target: Target, config: Config, budget: ReadBudget) -> None:
        super().__init__(head.k_proj.weight, budget)
        self.head, self.target, self.config = head, target, config
        self.outputs = OutputRequest(hidden=head.hidden)
        self.table_LG = head.table_LG.cpu()
        self._rope = ModuleRope(config, target)
        self._before: list[Tensor] = []

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Compute keys of the prompts and the inputs of the next token."""
        super().start(tokens_BS, n_B, step, cache)
        (B, S), head, device = tokens_BS.shape, self.head, tokens_BS.device
        assert self.cache is not None
        slots, groups = S + self.cache.room_left(), head.key_sets * head.heads[1]
        (k_BSGD,) = self.reserve(1, B, slots, groups, head.dim)
        row_B1, size = torch.arange(B, device=device)[:, None], max(1, CHUNK // B)
        for first in range(0, S, size):
            at_P = torch.arange(first, min(first + size, S), device=device)
            if head.mix is None:
                embed = self.target.embed(tokens_BS[:, at_P])
                states = [step.hidden[layer][:, (at_P - 1).clamp(min=0)] for layer in head.hidden]
                states = [state * (at_P > 0)[:, None] for state in states]
            else:
                back_W = torch.arange(len(head.mix) - 1, -1, -1, device=device)
                place_PW = at_P[:, None] - back_W
                inside_PW1 = (place_PW >= 0)[..., None]
                embed, states = self.target.embed(tokens_BS[:, place_PW.clamp(min=0)]) * inside_PW1, []
            k_BSGD[:, at_P] = self._keys(head.entry(embed, states), at_P.expand(B, -1))
        last_B1 = (n_B - 1)[:, None]
        if head.mix is None:
            found = [step.hidden[layer][row_B1, last_B1][:, 0] for layer in head.hidden]
        else:
            place_BW = last_B1 - torch.arange(len(head.mix) - 2, -1, -1, device=device)
            embed_BWE = self.target.embed(tokens_BS.gather(1, place_BW.clamp(min=0)))
            found = [embed_BWE * (place_BW >= 0)[..., None]]
        if [one.shape for one in self._before] != [one.shape for one in found]:
            self._before = [torch.empty_like(one) for one in found]
        for own, one in zip(self._before, found, strict=True):
            own.copy_(one)

    def ahead(self, root_B: Tensor) -> Tensor:
        """Return scores_BXS of the cache's `used` positions; -inf in sequences that are not due."""
        (k_BSGD,), cache = self.begun()
        head, offset, len_B = self.head, key_offset(self.config), cache.len_B
        entry, rope = self._entries(root_B[:, None]), self._rope(len_B[:, None])
        k_BSGD[torch.arange(len(len_B), device=len_B.device), len_B] = head.key(entry, rope)[:, 0]
        q_BXHD = head.query(entry, rope).view(len(root_B), head.n_sets, -1, head.dim)
        seen_B = len_B - offset if offset else len_B
        if self.budget.every > 1 and cache.entry_sets is not None:
            seen_B = seen_B * cache.entry_sets.due(len_B)  # 0: no keys of the others are read
        k_BSGD = k_BSGD[:, offset : cache.used + offset]
        return entry_scores(q_BXHD, k_BSGD, seen_B, groups=head.heads[1], scale=head.dim**-0.5)

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """Store the keys of the accepted nodes, without the root's (see `ahead`), and the next inputs."""
        (k_BSGD,), cache = self.begun()
        path_BP, n_B, head = verdict.path_BP, verdict.n_B, self.head
        B, P = path_BP.shape
        goes_B1 = n_B[:, None] > 0
        if P == 1 and head.mix is None:
            for own, layer in zip(self._before, head.hidden, strict=True):
                torch.where(goes_B1, step.hidden[layer][:, 0], own, out=own)
            return
        row_B1 = torch.arange(B, device=n_B.device)[:, None]
        embed = self.target.embed(tree.tokens_BN.gather(1, path_BP))
        if head.mix is None:
            states = [step.hidden[layer][row_B1, path_BP] for layer in head.hidden]
            parts = embed[:, 1:], [x[:, :-1] for x in states]
            last_B1 = (n_B - 1).clamp(min=0)[:, None]
            for own, x in zip(self._before, states, strict=True):
                torch.where(goes_B1, x[row_B1, last_B1][:, 0], own, out=own)
        else:
            (before_BWE,), W = self._before, len(head.mix)
            # [B, W - 1 + P, E], of which each token's window of W is a slice
            embed = torch.cat((before_BWE, embed), 1)
            parts = embed.unfold(1, W, 1).transpose(2, 3)[:, 1:], []
            before_BWE.copy_(embed[row_B1, n_B[:, None] + torch.arange(W - 1, device=n_B.device)])
        if P > 1:
            pos_BP = (cache.len_B - n_B)[:, None] + torch.arange(1, P, device=n_B.device)
            # keys of rejected nodes all go to the last place
            slot_BP = pos_BP.where(pos_BP < cache.len_B[:, None], k_BSGD.shape[1] - 1)
            k_BSGD[row_B1, slot_BP] = self._keys(head.entry(*parts), pos_BP)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return its keys and the inputs of the next tokens."""
        return (*super().tensors(), *self._before)

    def _entries(self, root_B1: Tensor) -> Tensor:
        """Return the input of the root's query and key projections, [B, 1, ...]."""
        embed = self.target.embed(root_B1)
        if self.head.mix is None:
            return self.head.entry(embed, [state[:, None] for state in self._before])
        return self.head.entry(torch.cat((self._before[0], embed), 1)[:, None], ())

    def _keys(self, entry: Tensor, pos_BP: Tensor) -> Tensor:
        """Return rotated keys [B, P, ...] of tokens at these positions."""
        return self.head.key(entry, self._rope(pos_BP))

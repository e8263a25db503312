"""One cycle of decoding: propose, run the target, accept, commit.

Plain decoding is the same cycle with a tree of one node. What a cycle leaves to the next stands in tensors
that are updated in place, and nothing is read back to the host: so where cache and draft keep to that too, a
CUDA graph of one cycle is every cycle (`decoding.captured`).

Shapes: B batch, N tree nodes, P path, X = 2 + P.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from longtrain.cache.base import Causal, KVCache, Mask, Tree
from longtrain.decoding.growth import is_chain
from longtrain.decoding.limits import check_tree
from longtrain.decoding.retrieval.selector import Selector, choose
from longtrain.decoding.roles import Draft, Parts, TokenTree, TreeShape, Verdict, onlooker
from longtrain.decoding.sampling import HashCoins, MinNewTokens, Sampling
from longtrain.decoding.tree import chain, positions, visible
from longtrain.decoding.verify import verify
from longtrain.kernels.greedy import settle
from longtrain.targets.step import Rows, TargetStep, Want

if TYPE_CHECKING:
    from longtrain.targets.model import Target

Judge: TypeAlias = Callable[[TokenTree, Verdict, Tensor | None], Verdict]
"""Replaces a verdict: called with the tree, what `verify` found, and the most nodes of each path, if any."""


class CycleState:
    """What a cycle leaves to the next, whatever the shape of either, beside what cache and draft hold.

    Args:
        len_B: lengths of the cache; an empty tensor of its kind will do.
    """

    def __init__(self, len_B: Tensor) -> None:
        self.root_B = torch.zeros_like(len_B)
        self.left_B = torch.zeros_like(len_B)
        self.most = torch.zeros_like(len_B[0])
        self.coins = HashCoins(0, torch.zeros_like(len_B))

    def begin(self, root_B: Tensor, coins: HashCoins, max_new_tokens: int) -> None:
        """Texts begin with `root_B`, which prefill gave; the first of `max_new_tokens` of each."""
        self.root_B.copy_(root_B)
        self.left_B.fill_(max_new_tokens - 1)
        self.most.fill_(max_new_tokens)
        self.coins.assign(coins)

    def close(self, rows: Sequence[int]) -> None:
        """These texts are over: nothing more is committed in them."""
        if rows:
            self.left_B[list(rows)] = 0


class Phases:
    """The cycle of one batch; call it for the next one.

    Args:
        target: the frozen model.
        cache: holds the prompts.
        draft: proposes; None decodes plainly.
        shape: what is drafted.
        sampling: processors; the seed is in the coins.
        min_new: ids that may not come yet.
        judge: has the last word on what is accepted, after all work of finding out is done. The text is then
            no longer the target's: for benchmarks of random weights, whose drafts are never right.
        selector: says what each step reads; None: everything.
        texts: shared with cycles of other shapes over the same cache and draft; None: its own.
    """

    def __init__(
        self,
        target: Target,
        cache: KVCache,
        draft: Draft | None,
        shape: TreeShape,
        sampling: Sampling,
        min_new: MinNewTokens,
        *,
        judge: Judge | None = None,
        selector: Selector | None = None,
        texts: CycleState | None = None,
    ) -> None:
        self.target, self.cache, self.draft = target, cache, draft
        self.shape, self.sampling, self.min_new, self.judge = shape, sampling, min_new, judge
        self.selector = selector
        self.want = Want(logits="all", hidden=Parts(draft=draft, selector=selector).hidden())
        looking = onlooker(draft)
        self.watch = looking.watch_nodes if looking else None
        self.texts = texts or CycleState(cache.len_B)
        self.root_B, self.left_B = self.texts.root_B, self.texts.left_B
        self.most, self.coins = self.texts.most, self.texts.coins
        self.news_BX = self.root_B.new_zeros(len(self.root_B), 3 + shape.depth)
        """What the last cycle emitted, as `kernels.greedy.settle` writes it."""

    def begin(self, root_B: Tensor, coins: HashCoins, max_new_tokens: int) -> None:
        """Texts begin with `root_B`, which prefill gave; the first of `max_new_tokens` of each."""
        self.texts.begin(root_B, coins, max_new_tokens)

    def close(self, rows: Sequence[int]) -> None:
        """These texts are over: nothing more is committed in them."""
        self.texts.close(rows)

    def __call__(self) -> None:
        """The next cycle."""
        self.select()
        tree = self.propose()
        step = self.forward(tree)
        verdict = self.accept(tree, step)
        self.commit(tree, step, verdict)

    def select(self) -> None:
        """What the target is to read: known with the root, so it can be fetched while a draft works."""
        if self.selector is not None:
            choose(self.selector, self.root_B)

    def propose(self) -> TokenTree:
        """A tree below the last token of each text."""
        if self.draft is None or not self.shape.widths:
            told = self.draft is not None or self.selector is not None  # after the next root has come
            return chain((self.root_B.clone() if told else self.root_B)[:, None])
        tree = self.draft.propose(self.root_B, self.shape, self.sampling, self.coins)
        check_tree(tree, self.shape, len(self.root_B))
        return tree

    def forward(self, tree: TokenTree) -> TargetStep:
        """The target over all nodes at once."""
        rows = Rows(positions(tree, self.cache.len_B), tree.tokens_BN, mask=self.mask(tree))
        return self.target.forward(rows, self.cache, want=self.want, watch=self.watch)

    def mask(self, tree: TokenTree) -> Mask:
        """Who sees whom among the nodes."""
        return Causal() if self._is_chain else Tree(visible(tree.parents_BN))

    def accept(self, tree: TokenTree, step: TargetStep) -> Verdict:
        """The path that the target accepts, as much of it as the cache takes, and the token after it."""
        assert step.logits_BTV is not None
        logits_BNV = self.min_new.in_tree(step.logits_BTV, tree.depth_N, self.most, self.left_B)
        most_B = self.cache.commit_limit()
        verdict = verify(
            tree,
            logits_BNV,
            self.sampling,
            self.coins,
            self.cache.len_B,
            depth=self.shape.depth,
            most_B=most_B,
        )
        return verdict if self.judge is None else self.judge(tree, verdict, most_B)

    def commit(self, tree: TokenTree, step: TargetStep, whole: Verdict) -> None:
        """Keep the accepted rows, tell the draft, and hand out the tokens."""
        found = whole.path_BP, whole.n_B, whole.next_B
        texts = self.root_B, self.left_B, self.cache.len_B
        n_B, root_pos_B = settle(tree.tokens_BN, found, texts, self.news_BX)  # 0 in a row that is over
        verdict = replace(whole, n_B=n_B, root_pos_B=root_pos_B)
        self.cache.commit(None if self._is_chain else verdict.path_BP, verdict.n_B)
        if self.draft is not None:
            self.draft.observe(tree, verdict, step)
        if self.selector is not None:
            self.selector.observe(tree, verdict, step)

    @property
    def _is_chain(self) -> bool:
        """Whether every node has one child."""
        return is_chain(self.shape)

"""One cycle of decoding: propose, run the target, accept, commit.

Plain decoding is the same cycle with a tree of one node. The state between cycles is in tensors that are
updated in place, and nothing is read back to the host. If cache and draft do the same, the CUDA graph of one
cycle can be replayed for every other (`decoding.captured`).

Shapes: B batch, N tree nodes, P path, X = 2 + P.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from longtrain.cache.base import Causal, KVCache, Mask, Tree
from longtrain.decoding.limits import check_drafted
from longtrain.decoding.retrieval.selector import Selector, choose
from longtrain.decoding.roles import Draft, Parts, TokenTree, TreeShape, Verdict, attention_observer
from longtrain.decoding.sampling import HashRng, MinNewTokens, Sampling
from longtrain.decoding.tree import chain, positions, visible
from longtrain.decoding.verify import verify
from longtrain.kernels.greedy import settle
from longtrain.targets.step import OutputRequest, TargetStep, TokenBatch

if TYPE_CHECKING:
    from longtrain.targets.model import Target

Judge: TypeAlias = Callable[[TokenTree, Verdict, Tensor | None], Verdict]
"""Overrides the accepted length after verification (benchmarks with random weights). Called with the tree,
the verdict of `verify`, and the most nodes of each path, if limited."""


COPIED = 1 << 16
"""Unit in which `news_BX` counts the accepted copied nodes, in the number of all accepted nodes."""


class CycleState:
    """State between cycles of any shape, beside that of cache and draft.

    Args:
        len_B: lengths of the cache; gives batch size, device and dtype.
    """

    def __init__(self, len_B: Tensor) -> None:
        self.root_B = torch.zeros_like(len_B)
        self.left_B = torch.zeros_like(len_B)
        self.most = torch.zeros_like(len_B[0])
        self.rng = HashRng(0, torch.zeros_like(len_B))

    def begin(self, root_B: Tensor, rng: HashRng, max_new_tokens: int) -> None:
        """Start sequences with `root_B`, the token that prefill gave: the first of `max_new_tokens`."""
        self.root_B.copy_(root_B)
        self.left_B.fill_(max_new_tokens - 1)
        self.most.fill_(max_new_tokens)
        self.rng.assign(rng)

    def close(self, sequences: Sequence[int]) -> None:
        """Mark sequences as finished: nothing more is committed to them."""
        if sequences:
            self.left_B[list(sequences)] = 0


class DecodeStep:
    """One decoding cycle over a batch; each call runs the next one.

    Args:
        target: the frozen model.
        cache: the committed prompts.
        draft: proposes trees; None decodes plainly.
        shape: shape of the trees.
        sampling: logits processors; the seed is in the random number generator of `texts`.
        min_new: token ids that are not allowed yet.
        judge: overrides the accepted length after verification. The text is then no longer the target's: for
            benchmarks with random weights, whose drafts are never right.
        selector: chooses the KV entries that each step reads; None: all.
        texts: state shared with cycles of other shapes over the same cache and draft; None: its own.
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
        self.cuts = bool(shape.depth) and bool(getattr(draft, "cuts", False))
        self.outputs = OutputRequest(logits="all", hidden=Parts(draft=draft, selector=selector).hidden())
        looking = attention_observer(draft)
        self.hook = looking.on_nodes if looking else None
        self.texts = texts or CycleState(cache.len_B)
        self.root_B, self.left_B = self.texts.root_B, self.texts.left_B
        self.most, self.rng = self.texts.most, self.texts.rng
        self.news_BX = self.root_B.new_zeros(len(self.root_B), 3 + shape.depth)
        """Tokens of the last cycle, in the layout of `kernels.greedy.settle`; of the accepted nodes, those
        that were copied from the text (`TokenTree.copied`) are counted a second time, in units of `COPIED`.
        """

    def __call__(self) -> None:
        """Run the next cycle: select, propose, forward, accept, commit."""
        tree, left = self.draft_trees()
        self.finish(tree if left is None else tree.first(int(left)))

    def draft_trees(self) -> tuple[TokenTree, Tensor | None]:
        """Run the part of a cycle before the target's forward.

        Returns:
            the trees, and for a draft that cuts them the number of first nodes that any sequence still has.
        """
        self.select()
        tree = self.propose()
        if not self.cuts:
            return tree, None
        node_N = torch.arange(1, tree.tokens_BN.shape[1] + 1, device=self.root_B.device)
        left_BN = node_N * ((tree.parents_BN >= 0) & (self.left_B > 0)[:, None])
        return tree, left_BN.amax().clamp(min=1)

    def finish(self, tree: TokenTree) -> None:
        """Run the rest of a cycle."""
        step = self.forward(tree)
        verdict = self.accept(tree, step)
        self.commit(tree, step, verdict)

    def select(self) -> None:
        """Choose the KV entries that the target reads; they can be fetched while the draft works."""
        if self.selector is not None:
            choose(self.selector, self.root_B)

    def propose(self) -> TokenTree:
        """Draft a tree below the last token of each sequence."""
        if self.draft is None or not self.shape.depth:
            # `commit` overwrites root_B before draft and selector observe this tree
            observed = self.draft is not None or self.selector is not None
            return chain((self.root_B.clone() if observed else self.root_B)[:, None])  # [B, 1]
        tree = self.draft.propose(self.root_B, self.shape, self.sampling, self.rng)
        check_drafted(tree, self.shape, len(self.root_B))
        return tree

    def forward(self, tree: TokenTree) -> TargetStep:
        """Run the target over all nodes at once."""
        batch = TokenBatch(positions(tree, self.cache.len_B), tree.tokens_BN, mask=self.mask(tree))
        return self.target.forward(batch, self.cache, outputs=self.outputs, hook=self.hook)

    def mask(self, tree: TokenTree) -> Mask:
        """Attention mask among the nodes."""
        return Causal() if self.shape.is_chain else Tree(visible(tree.parents_BN))

    def accept(self, tree: TokenTree, step: TargetStep) -> Verdict:
        """Accept a path of the tree, as far as the cache can commit it, and choose the token after it."""
        assert step.logits_BTV is not None
        logits_BNV = self.min_new.in_tree(step.logits_BTV, tree.depth_N, self.most, self.left_B)
        most_B = self.cache.commit_limit()
        verdict = verify(
            tree,
            logits_BNV,
            self.sampling,
            self.rng,
            self.cache.len_B,
            depth=self.shape.depth,
            most_B=most_B,
        )
        return verdict if self.judge is None else self.judge(tree, verdict, most_B)

    def commit(self, tree: TokenTree, step: TargetStep, whole: Verdict) -> None:
        """Commit the accepted nodes, update draft and selector, and write the new tokens to `news_BX`."""
        found = whole.path_BP, whole.n_B, whole.next_B
        texts = self.root_B, self.left_B, self.cache.len_B
        n_B, root_pos_B = settle(tree.tokens_BN, found, texts, self.news_BX)  # n_B: 0 if finished
        if tree.copied:
            first: int | Tensor = tree.first_copied
            if tree.copied_B1 is not None:
                first = tree.tokens_BN.shape[1] - tree.copied_B1
            self.news_BX[:, 1] += COPIED * (whole.path_BP >= first).sum(1)
        verdict = replace(whole, n_B=n_B, root_pos_B=root_pos_B)
        self.cache.commit(None if self.shape.is_chain else verdict.path_BP, verdict.n_B)
        if self.draft is not None:
            self.draft.observe(tree, verdict, step)
        if self.selector is not None:
            self.selector.observe(tree, verdict, step)

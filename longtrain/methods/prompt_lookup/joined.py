"""Look-up joined to another draft: what followed the text's end before is a branch of the draft's tree.

Shapes: B batch, N nodes, D levels of the draft's own nodes, K copied nodes, S prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.decoding.control import CHAINS
from longtrain.decoding.roles import (
    AttentionObserver,
    ChildChoice,
    Draft,
    Parts,
    TokenTree,
    TreeShape,
    Verdict,
)
from longtrain.decoding.sampling import Rng, Sampling
from longtrain.decoding.tree import visible
from longtrain.errors import ConfigError
from longtrain.kernels.node_choice import Candidates, deepest, runs_through
from longtrain.kernels.tree_attention import MAX_NODES
from longtrain.methods.prompt_lookup.config import Config
from longtrain.methods.prompt_lookup.runtime import PromptLookupRuntime
from longtrain.methods.prompt_lookup.split import NodeSplit
from longtrain.targets.attention import AttentionHook
from longtrain.targets.step import TargetStep

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache

NODES = 16
"""Nodes of a joined tree, the root included, if the draft's own leave room for `LEAST` copied ones. In bf16
on compute capability 9.0 the logits of so many tokens equal plain decoding's to the last bit
(docs/decoding.md)."""
LEAST, BESIDE = 4, 8
"""Fewest copied nodes beside a draft's own; nodes that are added to a tree that leaves no room for these."""
ALONE = (LEAST, NODES - 1)
"""Lengths of the chains that `decode=auto` may copy without asking the draft."""


class JoinedDraft:
    """Proposes the tree of another draft and below it the tokens that followed the text's end before.

    The copy begins below the root. As far as the draft proposes the same tokens the nodes are shared, and the
    copied nodes continue below the last shared one: so all `TreeShape.copied` of them are new, and where
    draft and copy agree the tree is deeper. The number of nodes is fixed. Of a beam's tree and a copy as deep
    as the shape allows, the most probable nodes are verified (`NodeSplit`): with a long match hardly more
    than the copy, without one the draft's. Chains and sampled trees are verified whole, since a choice by
    drawn tokens would change the distribution of the text.

    A shape without widths is look-up alone: a chain, for which the draft only observes the tokens.

    A draft learns accepted tokens from the tree's path and the target's step alone, whoever proposed them.

    Args:
        draft: proposes the other nodes.
        copies: look-up.
    """

    def __init__(self, draft: Draft, copies: PromptLookupRuntime) -> None:
        self.draft, self.copies = draft, copies
        self.outputs = draft.outputs
        self.offers: Sequence[tuple[int, ...]] = getattr(draft, "offers", CHAINS)
        self.begins_anew = bool(getattr(draft, "begins_anew", False))
        self.alone = copies
        """What remains where the draft's start with the prompts would take too long."""
        self._split: NodeSplit | None = None
        self._candidates: Candidates | None = None
        self._fits: dict[TreeShape, int] = {}

    @property
    def copies_alone(self) -> tuple[int, ...]:
        """Return the lengths of look-up's own chains that `decode=auto` may choose."""
        fit = self._longest(TreeShape(()), NODES - 1)
        return tuple(sorted({min(length, fit) for length in ALONE} - {0}))

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Start both (`decoding.roles.Draft`)."""
        self.draft.start(tokens_BS, n_B, step, cache)
        self.copies.start(tokens_BS, n_B, step, cache)
        if self._split is not None and self._split.serves(len(n_B), n_B.device):
            self._split.begin()
        else:
            self._split = NodeSplit(len(n_B), n_B.device)

    def reserve(self, nodes: int) -> None:
        """Make room for the draft's own trees of so many nodes (`decoding.roles.Draft`)."""
        if reserve := getattr(self.draft, "reserve", None):
            reserve(nodes)

    def completed(self, shape: TreeShape) -> TreeShape:
        """Return a shape of the draft with the copied nodes: `NODES` in all, or `BESIDE` more.

        Fewer are copied where the draft cannot observe so many accepted tokens at once, or where the tree
        would have more than `MAX_NODES`; none where nothing is left.
        """
        if not shape.depth or shape.copied:
            return shape
        most = self._fits.get(shape)
        if most is None:
            left = NODES - shape.n_nodes
            wanted = left if left >= LEAST else min(BESIDE, MAX_NODES - shape.n_nodes)
            most = self._fits[shape] = self._longest(shape, wanted)
        return replace(shape, copied=most)

    def cannot_gain(self, batch: int, tokens: int) -> str:
        """Say why the draft beside look-up cannot gain (`decoding.roles.Draft`)."""
        reason = getattr(self.draft, "cannot_gain", None)
        return reason(batch, tokens) if reason else ""

    def slower(self, batch: int, tokens: int) -> str:
        """Say that the draft beside look-up is expected to be slower (`decoding.roles.Draft`)."""
        reason = getattr(self.draft, "slower", None)
        return reason(batch, tokens) if reason else ""

    def check_shape(self, shape: TreeShape) -> None:
        """Refuse a shape that the draft does not support (`decoding.roles.Draft`)."""
        if check := getattr(self.draft, "check_shape", None):
            check(shape)

    def propose(self, root_B: Tensor, shape: TreeShape, sampling: Sampling, rng: Rng) -> TokenTree:
        """Draft below the root, and add the copy (`decoding.roles.Draft`)."""
        self._candidates = None
        if not shape.widths:
            return self.copies.propose(root_B, shape, sampling, rng)
        if not shape.copied:
            return self.draft.propose(root_B, shape, sampling, rng)
        copy_BK, matched_B = self.copies.look(root_B, shape.depth)
        own = self.draft.propose(root_B, shape.drafted, sampling, rng)
        if own.score_BN is None or own.children is not ChildChoice.POINT:
            return with_copy(own, copy_BK, shape)
        assert self._split is not None
        tree, self._candidates = self._split.choose(own, copy_BK, matched_B, shape.n_nodes - 1)
        return tree

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """Pass the accepted tokens to both (`decoding.roles.Draft`)."""
        self.draft.observe(tree, verdict, step)
        self.copies.observe(tree, verdict, step)
        if self._candidates is not None and self._split is not None and tree.copied_B1 is not None:
            self._split.learn(self._candidates, tree, verdict)

    def bytes(self) -> int:
        """Return the bytes of both."""
        return self.draft.bytes() + self.copies.bytes()

    def tensors(self) -> tuple[Tensor, ...] | None:
        """Return the tensors of both; None if the draft's are not updated in place."""
        own = self.draft.tensors()
        tables = self._split.tensors() if self._split else ()
        return None if own is None else (*own, *self.copies.tensors(), *tables)

    def _longest(self, shape: TreeShape, wanted: int) -> int:
        """Return the number of nodes that can be copied beside the draft's own, up to `wanted`."""
        while wanted > 0:
            try:
                self.check_shape(replace(shape, copied=wanted))
                return wanted
            except ConfigError:
                wanted -= 1
        return 0


class JoinedObserver(JoinedDraft):
    """A joined draft that observes the target's forwards (`decoding.roles.AttentionObserver`)."""

    draft: AttentionObserver  # type: ignore[assignment]

    def prompt_hook(self, lengths: Sequence[int]) -> AttentionHook:
        """Return the draft's hook for the prompts."""
        return self.draft.prompt_hook(lengths)

    def on_nodes(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Pass on one layer of the target's step."""
        self.draft.on_nodes(layer, q_BHTD, k_BGTD, v_BGTD)


def with_lookup(parts: Parts, mode: str) -> Parts:
    """Return the parts with look-up as `decode.lookup` says; its settings are the method's defaults.

    Args:
        parts: of a system. If they bring no draft, one that cuts its trees, or look-up itself, `auto` changes
            nothing.
        mode: `auto`: joined to the draft; `only`: in its place, or alone if there is none; `off`: not at all.
    """
    draft = parts.draft
    if mode == "off" or isinstance(draft, PromptLookupRuntime):
        return parts
    copies = PromptLookupRuntime(Config().ngram)
    if mode == "only":
        return replace(parts, draft=copies)
    if draft is None or getattr(draft, "cuts", False):
        return parts
    kind = JoinedObserver if isinstance(draft, AttentionObserver) else JoinedDraft
    return replace(parts, draft=kind(draft, copies))


def with_copy(own: TokenTree, copy_BK: Tensor, shape: TreeShape) -> TokenTree:
    """Add copied nodes to a draft's tree, below the deepest of its nodes that the copy runs through.

    Args:
        own: the draft's tree.
        copy_BK: tokens that follow the root in the copy, as many as `shape.depth`.
        shape: shape of the whole tree.
    """
    B, N = own.tokens_BN.shape
    count, device = shape.copied, copy_BK.device
    step_K = torch.arange(count, device=device)
    depth_BN = own.depth_N.expand_as(own.tokens_BN)
    if shape.drafted.is_chain:
        same_BD = own.tokens_BN[:, 1:] == copy_BK[:, : N - 1]
        shared_B1 = same_BD.long().cumprod(1).sum(1, keepdim=True)  # also the index of the last shared node
        at_B1 = shared_B1
    else:
        sees_BNN = visible(own.parents_BN)
        through_BN = runs_through(own.tokens_BN, depth_BN, copy_BK, sees_BNN)
        shared_B1, at_B1 = deepest(depth_BN, through_BN)
    below_BK = (N + step_K - 1).expand(B, -1)
    return TokenTree(
        torch.cat((own.tokens_BN, copy_BK.gather(1, shared_B1 + step_K)), 1),
        torch.cat((own.parents_BN, at_B1, below_BK[:, 1:]), 1),
        torch.cat((depth_BN, shared_B1 + 1 + step_K), 1),
        own.children,
        own.q_BNV,
        count,
    )

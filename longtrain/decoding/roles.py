"""Protocols of an engine's components (draft, evictor, selector), and the types that they exchange.

Shapes: B batch, S prompt tokens, T new tokens, N tree nodes, P path, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from longtrain.cache.base import KVCache
from longtrain.decoding.evict import Evictor
from longtrain.decoding.retrieval.selector import Selector
from longtrain.decoding.sampling import Rng, Sampling
from longtrain.errors import ConflictError
from longtrain.targets.attention import AttentionHook
from longtrain.targets.step import OutputRequest, TargetStep


class ChildChoice(Enum):
    """The way a draft chose the children of a node, which determines the acceptance rule (`verify`).

    POINT: deterministic (argmax, top-k, beam). IID: sampled independently from q, with duplicates.
    NO_REPLACE: sampled from q without replacement.
    """

    POINT = "point"
    IID = "iid"
    NO_REPLACE = "no_replace"


@dataclass(frozen=True)
class TreeShape:
    """Shape of the drafted trees: `widths[d]` nodes at depth d+1. A chain of 4 is (1, 1, 1, 1).

    Args:
        widths: nodes of each level; with `keep`, the nodes that are expanded.
        children: deterministic or sampled children; a draft that does not support it raises ConfigError.
        keep: number of nodes below the root that are verified: the most probable of all candidates, whatever
            their depth (EAGLE-2, arXiv 2406.16858, §4.2). None: all nodes of all levels.
        copied: number of nodes that continue an earlier occurrence of the text's end and are verified beside
            the draft's own (`Draft.completed`); without `widths` they are a chain, and nothing is drafted.
    """

    widths: tuple[int, ...]
    children: ChildChoice = ChildChoice.POINT
    keep: int | None = None
    copied: int = 0

    @property
    def depth(self) -> int:
        """Levels below the root: copied nodes may follow the deepest of the draft's."""
        return len(self.widths) + self.copied

    @property
    def is_chain(self) -> bool:
        """True if every level has one node, and all are verified."""
        alone = not (self.copied and self.widths)
        return alone and self.keep is None and all(width == 1 for width in self.widths)

    @property
    def drafted(self) -> TreeShape:
        """The part that the draft itself proposes."""
        return replace(self, copied=0) if self.copied else self

    @property
    def n_nodes(self) -> int:
        """Nodes that are verified, root included."""
        return self.copied + (self.n_expanded if self.keep is None else 1 + self.keep)

    @property
    def n_expanded(self) -> int:
        """Nodes that the draft itself expands, root included, verified or not."""
        return 1 + sum(self.widths)


def usual_children(widths: Sequence[int], *, sampled: bool) -> ChildChoice:
    """The default way to choose children.

    A chain's are sampled if decoding samples (the target accepts more of them than of argmax drafts); all
    others are deterministic.
    """
    return ChildChoice.IID if sampled and set(widths) == {1} else ChildChoice.POINT


@dataclass(frozen=True)
class TokenTree:
    """A batch of drafted trees of one shape. Node 0 is the root: the last chosen token, not yet in the cache.

    The draft's nodes are in level order, siblings in the order they were drawn. Siblings of a POINT tree
    should have different tokens (a repeated one is never reached). If q has fewer tokens than the level has
    children, a sampled tree pads with any token of q = 0. Copied nodes come last: at most one below each
    node, which is tried after the draft's children.

    Args:
        tokens_BN: token of each node, int64.
        parents_BN: parent node, int64, smaller than the child's own index; -1 for the root.
        depth_N: depth of each node (root 0), int64; [B, N] if they differ between sequences.
        children: the way children were chosen.
        q_BNV: for sampled trees, the distribution that each node's *children* were drawn from: `probs` of the
            draft's logits with the engine's `Sampling`, over the target's vocabulary; siblings not removed.
            Copied nodes need none.
        copied: number of last nodes that are copied from the text. Each was proposed with probability 1,
            whatever `children` says of the others.
        copied_B1: the same, [B, 1], where it differs between the trees of a POINT batch.
        score_BN: cumulative log-probability of each node by the draft, if it knows that; the root has 0.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    depth_N: Tensor
    children: ChildChoice = ChildChoice.POINT
    q_BNV: Tensor | None = None
    copied: int = 0
    copied_B1: Tensor | None = None
    score_BN: Tensor | None = None

    def cut(self, keep_BN: Tensor) -> TokenTree:
        """The tree without some nodes and what is below them: they keep their places and are never accepted.

        Args:
            keep_BN: True for nodes that stay. For sampled children it must not depend on a node's own token,
                nor on any that was drawn after it.
        """
        return replace(self, parents_BN=self.parents_BN.where(keep_BN, -1))

    def first(self, nodes: int) -> TokenTree:
        """The tree of its first nodes, of which none is copied."""
        q_BNV, score_BN = (None if x is None else x[:, :nodes] for x in (self.q_BNV, self.score_BN))
        return TokenTree(
            self.tokens_BN[:, :nodes],
            self.parents_BN[:, :nodes],
            self.depth_N[..., :nodes],
            self.children,
            q_BNV,
            score_BN=score_BN,
        )

    @property
    def first_copied(self) -> int:
        """Index of the first copied node; the number of nodes if there is none."""
        return self.tokens_BN.shape[1] - self.copied


@dataclass(frozen=True)
class Verdict:
    """The accepted path of each tree.

    Args:
        path_BP: accepted nodes in order, root first, padded with 0; P = depth + 1.
        n_B: number of committed nodes of the path, root included, 1..P: all of them, unless the cache's limit
            (`KVCache.commit_limit`) defers some. Drafts get 0 for a finished sequence.
        next_B: the target's token after them, which is the next root (undefined for a finished sequence).
        root_pos_B: position of the root, if known.
    """

    path_BP: Tensor
    n_B: Tensor
    next_B: Tensor
    root_pos_B: Tensor | None = None

    def root_pos(self, len_B: Tensor) -> Tensor:
        """Position of the root, by the cache's lengths after the commit."""
        return len_B - self.n_B if self.root_pos_B is None else self.root_pos_B


class Draft(Protocol):
    """Proposes trees: LongSpec, EAGLE-3, QuantSpec.

    Optional members: `offers`, the widths that `decode.shape=auto` chooses among (default: chains of 1 to 8).
    `check_shape(shape)` raises ConfigError for an unsupported shape, before anything is computed; one that
    was only offered is left out. The draft proposes its `widths`; `observe` may get a path as long as its
    `depth`, which includes copied nodes.
    `begins_anew = True`: `start` needs nothing but the tokens, so the draft can be paused and restarted.
    `reserve(nodes)` allocates buffers for trees of so many nodes.
    `completed(shape)` returns a shape with the nodes that a draft adds to each tree by itself: those copied
    from the text (`TreeShape.copied`). Only a draft that has it is given such shapes. `copies_alone` are
    numbers of nodes that it can copy without drafting, which `decode.shape=auto` may choose; `alone` is a
    draft that does nothing else, whose start takes next to no time. It takes the draft's place where that is
    left out of a call and cannot be restarted.
    `cannot_gain(batch, tokens)` says why drafts for so many texts of at most so many tokens cannot be faster
    than plain decoding on the same cache, as one line; empty: they can. `decode.shape=auto` then leaves the
    draft out. `slower(batch, tokens)` says that the method, its cache included, is expected to be slower than
    plain decoding without it, and what to do; empty: it is not.
    `cuts = True`: some nodes of its trees may be left out (`TokenTree.cut`). Nodes after the last one that
    any sequence has are not verified; the host reads their number in every cycle. Look-up is not joined to
    such a draft.
    `smooth()` returns the draft with laws that rounding changes little, for golden outputs. It is needed
    where a node has some tokens of the vocabulary only: rounding decides which one is the last of them.
    """

    outputs: OutputRequest
    """Outputs that the draft needs from every target forward beside logits (hidden states, say)."""

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """Called after prefill: `tokens_BS[b, :n_B[b]]` are committed in the cache."""

    def propose(self, root_B: Tensor, shape: TreeShape, sampling: Sampling, rng: Rng) -> TokenTree:
        """Draft a tree below the root, whose position is `cache.len_B`.

        Raises:
            ConfigError: a shape or a distribution that the draft does not support.
        """

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """Called after the target's step and the cache's commit with the `verdict.n_B` accepted nodes."""

    def bytes(self) -> int:
        """Bytes of state beside the target's cache."""

    def tensors(self) -> tuple[Tensor, ...] | None:
        """State tensors if `propose` and `observe` update them in place and without host reads, else None.

        A CUDA graph of a cycle is valid as long as the addresses of these tensors do not change, so `start`
        should reuse them. Before `start` it may be an empty tuple.
        """


def completed(shape: TreeShape, draft: Draft | None) -> TreeShape:
    """The shape with the nodes that a draft adds to each tree by itself (see `Draft`)."""
    own = getattr(draft, "completed", None)
    return shape if own is None else own(shape)


@runtime_checkable
class AttentionObserver(Protocol):
    """A draft that observes queries, keys and values of the target's own forwards, layer by layer."""

    def prompt_hook(self, lengths: Sequence[int]) -> AttentionHook:
        """A hook for the prompts (right-padded to the longest) and for tokens appended to them.

        Called before every prefill; `start` follows.
        """

    def on_nodes(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Hook for the nodes of a tree while the target verifies it (an `AttentionHook`); `observe`
        follows.
        """


def attention_observer(draft: Draft | None) -> AttentionObserver | None:
    """The draft if it observes the target's forwards, else None."""
    return draft if isinstance(draft, AttentionObserver) else None


@dataclass(frozen=True)
class Parts:
    """Components that a method adds to an engine, one for each role.

    Args:
        draft: proposes trees.
        evictor: chooses the KV entries that remain after prefill.
        cache: makes the cache; same arguments as `Target.new_cache`: (batch, max_tokens, max_nodes).
        selector: chooses the KV entries that each step reads.
        name: name in messages.
    """

    draft: Draft | None = None
    evictor: Evictor | None = None
    cache: Callable[..., KVCache] | None = None
    selector: Selector | None = None
    name: str = ""

    def hidden(self, *, drafts: bool = True) -> tuple[int, ...]:
        """Layers whose outputs the parts need from every forward; without the draft's unless `drafts`."""
        wants = [part.outputs.hidden for part in (self.draft if drafts else None, self.selector) if part]
        return tuple(sorted({layer for layers in wants for layer in layers}))

    def merge(self, *others: Parts) -> Parts:
        """Combine these parts with others.

        Raises:
            ConflictError: two of them have the same role.
        """
        found: dict[str, Any] = {}
        named: dict[str, str] = {}
        for parts in (self, *others):
            for role in ("draft", "evictor", "cache", "selector"):
                part = getattr(parts, role)
                if part is None:
                    continue
                if role in found:
                    raise ConflictError(
                        f"'{named[role]}' and '{parts.name}' both bring the engine's {role}; leave one out"
                    )
                found[role], named[role] = part, parts.name
        return Parts(**found, name="+".join(parts.name for parts in (self, *others) if parts.name))

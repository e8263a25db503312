"""The roles a part can play in an engine, as protocols; one part a role.

Shapes: B batch, S prompt tokens, T new rows, N tree nodes, P path, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from longtrain.cache.base import KVCache
from longtrain.decoding.evict import Evictor
from longtrain.decoding.retrieval.selector import Selector
from longtrain.decoding.sampling import Coins, Sampling
from longtrain.errors import ConflictError
from longtrain.targets.attention import Watch
from longtrain.targets.step import TargetStep, Want


class Law(Enum):
    """How a draft chose the children of a node; it decides the accept rule (`verify`).

    POINT: deterministic (argmax, top-k, beam). IID: sampled independently from q, duplicates kept.
    NO_REPLACE: sampled from q without replacement.
    """

    POINT = "point"
    IID = "iid"
    NO_REPLACE = "no_replace"


@dataclass(frozen=True)
class TreeShape:
    """How much to draft: `widths[d]` nodes at depth d+1. A chain of 4 is (1, 1, 1, 1).

    Args:
        widths: nodes of each level; with `keep`, those that are looked below.
        law: asks for deterministic or sampled children; a draft that cannot do so raises ConfigError.
        keep: nodes below the root that are verified: the most probable of all continuations that were seen,
            whatever their depth (EAGLE-2, arXiv 2406.16858, §4.2). None: all nodes of all levels.
    """

    widths: tuple[int, ...]
    law: Law = Law.POINT
    keep: int | None = None

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return len(self.widths)

    @property
    def n_nodes(self) -> int:
        """Nodes that are verified, root included."""
        return self.n_grown if self.keep is None else 1 + self.keep

    @property
    def n_grown(self) -> int:
        """Nodes of all levels, root included: what a draft computes itself, verified or not."""
        return 1 + sum(self.widths)


def usual_law(widths: Sequence[int], *, sampled: bool) -> Law:
    """How children are chosen where nobody says.

    A chain's are sampled where decoding samples (the target accepts more of them than of argmax drafts), all
    others are deterministic.
    """
    return Law.IID if sampled and set(widths) == {1} else Law.POINT


@dataclass(frozen=True)
class TokenTree:
    """A batch of drafted trees of one shape. Node 0 is the root: the last token chosen, not yet in the cache.

    Nodes stand in level order, siblings in the order they were drawn. Siblings of a POINT tree should carry
    different tokens (a repeated one is never reached). Where q has fewer tokens than children are wanted, a
    sampled tree pads with any token of q = 0.

    Args:
        tokens_BN: token of each node, int64.
        parents_BN: parent node, int64, smaller than the child's own index; -1 for the root.
        depth_N: depth of each node (root 0), int64; [B, N] where rows have other depths than each other.
        law: how children were chosen.
        q_BNV: for sampled laws, the law each node's *children* were drawn from: `probs` of the draft's logits
            with the engine's `Sampling`, over the target's vocabulary; siblings not yet removed.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    depth_N: Tensor
    law: Law = Law.POINT
    q_BNV: Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """What the target accepted of a tree.

    Args:
        path_BP: accepted nodes in order, root first, padded with 0; P = depth + 1.
        n_B: nodes of it that are committed, the root included, 1..P: all of them, unless a cache's limit
            (`KVCache.commit_limit`) puts some off. The engine hands drafts 0 for a finished row, where
            nothing was committed.
        next_B: the token the target adds after them (the next root; of no meaning in a finished row).
        root_pos_B: position of the root, where whoever made this has noted it.
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

    One for which other shapes may pay than chains of 1 to 8 says so in `offers`: the widths of those among
    which `decode.shape=auto` chooses. One that does not take every shape has `check_shape(shape)`, which is
    called before anything is computed and raises ConfigError. One whose `start` needs nothing of a text but
    its tokens says `begins_anew = True`: it can then be left out of plain cycles for a while. One that makes
    room for trees has `reserve(nodes)`.
    """

    want: Want
    """What the draft needs of every target forward beyond logits (hidden states, say)."""

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        """After prefill: `tokens_BS[b, :n_B[b]]` are committed in the cache."""

    def propose(self, root_B: Tensor, shape: TreeShape, sampling: Sampling, coins: Coins) -> TokenTree:
        """Draft below the root, whose position is `cache.len_B`."""

    def observe(self, tree: TokenTree, verdict: Verdict, step: TargetStep) -> None:
        """After the target's step and the cache's commit: take in the `verdict.n_B` accepted nodes."""

    def bytes(self) -> int:
        """Bytes of state held beside the target's cache."""

    def tensors(self) -> tuple[Tensor, ...] | None:
        """Its state, where `propose` and `observe` update it in place and ask the host nothing; else None.

        A CUDA graph of a cycle is good as long as these tensors lie where they lay: `start` should reuse
        them. Before it, an empty tuple will do.
        """


@runtime_checkable
class Onlooker(Protocol):
    """A draft that sees queries, keys and values of the target's own forwards, layer by layer."""

    def watch_prompts(self, lengths: Sequence[int]) -> Watch:
        """What sees the prompts (right-padded to the longest), and then what is read after them, if anything.

        Asked before every prefill; `start` follows.
        """

    def watch_nodes(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """See the rows of a tree while the target verifies it (a `Watch`); `observe` follows."""


def onlooker(draft: Draft | None) -> Onlooker | None:
    """The draft, if it is an onlooker."""
    return draft if isinstance(draft, Onlooker) else None


@dataclass(frozen=True)
class Parts:
    """What a method brings to an engine. Two parts that claim one role raise ConflictError.

    Args:
        draft: proposes trees.
        evictor: chooses what of the cache stays after prefill.
        cache: makes the cache, called as `Target.new_cache` is: (batch, max_tokens, max_nodes).
        selector: says what of the cache each step reads.
        name: for messages.
    """

    draft: Draft | None = None
    evictor: Evictor | None = None
    cache: Callable[..., KVCache] | None = None
    selector: Selector | None = None
    name: str = ""

    def hidden(self, *, drafts: bool = True) -> tuple[int, ...]:
        """Layers whose outputs the parts want of every forward; those of the draft only if it drafts."""
        wants = [part.want.hidden for part in (self.draft if drafts else None, self.selector) if part]
        return tuple(sorted({layer for layers in wants for layer in layers}))

    def merge(self, *others: Parts) -> Parts:
        """These parts and others as one.

        Raises:
            ConflictError: two of them play one role.
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

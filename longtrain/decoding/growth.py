"""Token trees grown level by level: a draft gives the logits of a level's nodes, and their children follow.

A draft that can give logits of the nodes of one level drafts chains and trees of every shape with this alone.
Everything here is a fixed number of tensor operations for a given shape: no value is read back to the host.

Shapes: B batch, M nodes of one level, K nodes of the next level, N nodes of the tree, J levels that have
children, V vocabulary, X tokens of the draft's own vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from longtrain.decoding.roles import Law, TokenTree, TreeShape
from longtrain.decoding.sampling import Coins, Sampling, probs
from longtrain.decoding.tree import BestNodes, depths
from longtrain.errors import ConfigError
from longtrain.kernels.beam import GrowingTree, best_continuations
from longtrain.kernels.greedy import argmax_rows


@dataclass(frozen=True)
class Level:
    """The nodes of one level of a growing tree.

    Args:
        depth: their distance from the root.
        first: index of the first of them among the nodes of the tree.
        tokens_BM: the token of each node.
        sees_BMN: bool; which of the tree's nodes up to this level each node sees: its ancestors and itself.
        above_BM: place of each node's parent within the level above; None where that has one node, or none.
    """

    depth: int
    first: int
    tokens_BM: Tensor
    sees_BMN: Tensor
    above_BM: Tensor | None = None

    def of_parents(self, states_BKE: Tensor) -> Tensor:
        """The rows [B, M, E] of the nodes' parents, of rows that belong to the level above."""
        if self.above_BM is None:
            return states_BKE.expand(-1, self.tokens_BM.shape[1], -1)
        return states_BKE.gather(1, self.above_BM[..., None].expand(-1, -1, states_BKE.shape[-1]))


LevelLogits: TypeAlias = Callable[[Level], Tensor]
"""Gives the draft's logits_BMX of a level's nodes. It is called once a level, root first; a draft with a
state of its own adds the nodes to it here."""


@dataclass(frozen=True)
class DraftVocabulary:
    """A draft's vocabulary, where it is a part of the target's.

    Args:
        ids_X: token of the target's vocabulary that each token of the draft's stands for, int64.
        size: tokens of the target's vocabulary.
    """

    ids_X: Tensor
    size: int

    def law(self, q_BMX: Tensor) -> Tensor:
        """A law over the target's vocabulary, q_BMV; zero where the draft has no such token."""
        return q_BMX.new_zeros(*q_BMX.shape[:-1], self.size).index_copy_(-1, self.ids_X, q_BMX)


@dataclass(frozen=True)
class _Plan:
    """The part of a tree that does not depend on what is drafted.

    Args:
        depth_N: depth of each node.
        depth_J: 0, 1, ... for each level but the last.
        parents_1N: the parents of a chain's nodes; None for other trees.
        sees_1NN: which nodes a chain's nodes see; None for other trees.
        score_11: log-probability of the root.
        best: picks what is kept of a tree; None: all of it.
    """

    depth_N: Tensor
    depth_J: Tensor
    parents_1N: Tensor | None
    sees_1NN: Tensor | None
    score_11: Tensor
    best: BestNodes | None


class TreeGrowth:
    """Grows trees by dynamic beam (POINT) or by independent draws (IID), and chains by either.

    With `TreeShape.keep` a level's continuations are more than its width: the best so many are looked below,
    and of all that were seen the most probable are kept in the end.

    It keeps what depends on a shape alone, so a draft holds one for as long as it lives.

    Args:
        vocabulary: of the draft; None: the target's.

    Source: LongSpec §3.3 and the authors' code (tree by dynamic beam); EAGLE-2 §4 for `keep`.
    Note: EAGLE's code sees the best children of each node apart; here they are the best of a whole level,
        which none of those that are kept can be missing from.
    """

    def __init__(self, vocabulary: DraftVocabulary | None = None) -> None:
        self.vocabulary = vocabulary
        self._plans: dict[TreeShape, _Plan] = {}

    def depths(self, shape: TreeShape, device: torch.device) -> Tensor:
        """The depth of each level that has children, root first: 0, 1, ...; int64_J."""
        return self._plan(shape, device).depth_J

    def grow(
        self,
        logits_of: LevelLogits,
        root_B: Tensor,
        pos_B: Tensor,
        shape: TreeShape,
        sampling: Sampling,
        coins: Coins,
    ) -> TokenTree:
        """Draft level by level below the root.

        POINT: the best `width` children by cumulative log-probability over all nodes of the level above,
        whoever their parents are. IID: children are dealt to the parents evenly, before they are drawn.

        Args:
            logits_of: the draft's logits of one level's nodes.
            root_B: the last token of each text.
            pos_B: the root's position.
            shape: widths of the levels, and how children are chosen (`check_shape`).
            sampling: processors of the law that tokens are drawn from.
            coins: source of randomness, keyed by the position of the token that is drawn.
        """
        plan = self._plan(shape, root_B.device)
        if plan.parents_1N is not None:
            return self._chain(logits_of, root_B, pos_B, shape, plan, sampling, coins)
        B, N = len(root_B), len(plan.depth_N)
        best, seen = plan.best, list[tuple[Tensor, Tensor, Tensor]]()
        tree = GrowingTree.of(root_B, N)
        score_BM = plan.score_11.expand(B, -1)
        laws, ids_X = list[Tensor](), self._ids()
        above_BM: Tensor | None = None
        first, last = 0, 1
        for depth, width in enumerate(shape.widths):
            level = slice(first, last)
            nodes = Level(depth, first, tree.tokens_BN[:, level], tree.sees_BNN[:, level, :last], above_BM)
            logits_BMX = logits_of(nodes)
            if shape.law is Law.POINT:
                temperature = sampling.temperature or 1.0  # continuations rank as the target's law ranks them
                most = width if best is None else best.of_level(depth)
                tokens, parents, score_BM = best_continuations(
                    logits_BMX, score_BM, most, temperature, ids_V=ids_X, tree=tree, above=first, nodes=width
                )
                if best is not None:
                    seen.append((tokens, parents + first, score_BM))
                    parents, score_BM = parents[:, :width], score_BM[:, :width]
            else:
                laws.append(self._law(logits_BMX, sampling))
                tokens, parents = _draws(laws[-1], width, pos_B + depth + 1, coins)
                tree.add(tokens, parents + first, last)
            above_BM = parents if last - first > 1 else None
            first, last = last, last + width
        if best is not None:
            return best.tree(root_B, seen)
        law_BNV = _law_of_nodes(laws, N)
        return TokenTree(tree.tokens_BN, tree.parents_BN, plan.depth_N, shape.law, law_BNV)

    def _chain(
        self,
        logits_of: LevelLogits,
        root_B: Tensor,
        pos_B: Tensor,
        shape: TreeShape,
        plan: _Plan,
        sampling: Sampling,
        coins: Coins,
    ) -> TokenTree:
        """One child a node: who sees whom is known beforehand, and the best child is the argmax."""
        assert plan.sees_1NN is not None and plan.parents_1N is not None
        B, N = len(root_B), shape.n_nodes
        sees_BNN = plan.sees_1NN.expand(B, -1, -1)
        tokens, laws, ids_X = [root_B], [], self._ids()
        for depth in range(shape.depth):
            seen_B1N = sees_BNN[:, depth : depth + 1, : depth + 1]
            logits_B1X = logits_of(Level(depth, depth, tokens[-1][:, None], seen_B1N))
            if shape.law is Law.POINT:
                best_B = argmax_rows(logits_B1X)[:, 0]
                tokens.append(best_B if ids_X is None else ids_X[best_B])
                continue
            laws.append(self._law(logits_B1X, sampling))
            tokens.append(_draws(laws[-1], 1, pos_B + depth + 1, coins)[0][:, 0])
        parents_BN = plan.parents_1N.expand(B, -1)
        law_BNV = _law_of_nodes(laws, N)
        return TokenTree(torch.stack(tokens, 1), parents_BN, plan.depth_N, shape.law, law_BNV)

    def _ids(self) -> Tensor | None:
        """The target's ids of the draft's tokens; None where they are the same."""
        return None if self.vocabulary is None else self.vocabulary.ids_X

    def _law(self, logits_BMX: Tensor, sampling: Sampling) -> Tensor:
        """The law that children are drawn from, over the target's vocabulary."""
        q_BMX = probs(logits_BMX, sampling)
        return q_BMX if self.vocabulary is None else self.vocabulary.law(q_BMX)

    def _plan(self, shape: TreeShape, device: torch.device) -> _Plan:
        """Made once a shape."""
        plan = self._plans.get(shape)
        if plan is None or plan.depth_N.device != device:
            N = shape.n_grown
            node_N = torch.arange(N, device=device)
            plan = self._plans[shape] = _Plan(
                depths(shape, device),
                node_N[: shape.depth],
                node_N[None] - 1 if is_chain(shape) else None,
                (node_N <= node_N[:, None])[None] if is_chain(shape) else None,
                torch.zeros(1, 1, device=device),
                None if shape.keep is None else BestNodes(shape, device),
            )
        return plan


def is_chain(shape: TreeShape) -> bool:
    """Whether every level of a shape is one node, and all are verified."""
    return shape.keep is None and all(width == 1 for width in shape.widths)


def check_chain(shape: TreeShape, who: str) -> None:
    """Refuse a shape that is no chain.

    Raises:
        ConfigError: a level of the shape has several nodes.
    """
    if not is_chain(shape):
        raise ConfigError(
            f"{who} drafts chains, and shape {list(shape.widths)} is none; pass widths of 1, e.g. "
            "[1, 1, 1, 1]"
        )


def check_tree(shape: TreeShape, vocab_size: int, who: str) -> None:
    """Refuse a shape that `TreeGrowth` cannot grow.

    Raises:
        ConfigError: children drawn without replacement, or a level wider than all continuations together.
    """
    if shape.law is Law.NO_REPLACE:
        raise ConfigError(f"{who} drafts by law 'point' (beam) or 'iid' (sampled), not 'no_replace'")
    if shape.keep is not None and (shape.law is not Law.POINT or not 1 <= shape.keep <= vocab_size):
        raise ConfigError(
            f"{shape.keep} nodes kept of a tree of law '{shape.law.value}'; allowed: 1 to {vocab_size}, and "
            "law 'point'"
        )
    above = 1
    for width in shape.widths if shape.law is Law.POINT else ():
        if above * vocab_size < width:
            raise ConfigError(
                f"a tree level of {width} nodes; a vocabulary of {vocab_size} allows "
                f"{above * vocab_size} here"
            )
        above = width


def _draws(q_BMV: Tensor, width: int, pos_B: Tensor, coins: Coins) -> tuple[Tensor, Tensor]:
    """Tokens and parents of `width` independent draws, dealt evenly to the parents; each has its own coin."""
    above = q_BMV.shape[1]
    parents = [child * above // width for child in range(width)]
    drawn = [coins.draw(q_BMV[:, m], pos_B, f"draft{i}" if i else "draft") for i, m in enumerate(parents)]
    tokens_BK = torch.stack(drawn, dim=1)
    return tokens_BK, (torch.arange(width, device=pos_B.device) * above // width).expand_as(tokens_BK)


def _law_of_nodes(laws: list[Tensor], nodes: int) -> Tensor | None:
    """The levels' laws one after another, zero for the last level's nodes; None where there are none."""
    if not laws:
        return None
    known_BMV = torch.cat(laws, dim=1)
    return pad(known_BMV, (0, 0, 0, nodes - known_BMV.shape[1]))

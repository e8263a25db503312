"""Token trees expanded level by level from the logits that a draft gives for the nodes of a level.

A draft that gives logits for the nodes of one level drafts chains and trees of every shape with this alone.
Everything here is a fixed number of tensor operations for a given shape: no value is read back to the host.

Shapes: B batch, M nodes of one level, K nodes of the next level, N nodes of the tree, J levels with children,
V vocabulary, X tokens of the draft's own vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from longtrain.decoding.roles import ChildChoice, TokenTree, TreeShape
from longtrain.decoding.sampling import Rng, Sampling, probs
from longtrain.decoding.tree import BestNodes, depths
from longtrain.errors import ConfigError
from longtrain.kernels.beam import ExpandingTree, best_continuations
from longtrain.kernels.greedy import argmax_rows


@dataclass(frozen=True)
class Level:
    """The nodes of one level of a tree that is being expanded.

    Args:
        depth: distance from the root.
        first: index of the level's first node in the tree.
        tokens_BM: token of each node.
        sees_BMN: bool mask over the tree's nodes up to this level: ancestors and the node itself.
        above_BM: index of each node's parent within the level above; None if that has one node, or none.
    """

    depth: int
    first: int
    tokens_BM: Tensor
    sees_BMN: Tensor
    above_BM: Tensor | None = None

    def of_parents(self, states_BKE: Tensor) -> Tensor:
        """Gather the states of the nodes' parents: [B, K, E] of the level above to [B, M, E]."""
        if self.above_BM is None:
            return states_BKE.expand(-1, self.tokens_BM.shape[1], -1)
        return states_BKE.gather(1, self.above_BM[..., None].expand(-1, -1, states_BKE.shape[-1]))


LevelLogits: TypeAlias = Callable[[Level], Tensor]
"""Returns the draft's logits_BMX for a level's nodes. Called once for each level, root first; a draft with a
state of its own adds the nodes to it in this call."""


@dataclass(frozen=True)
class DraftVocabulary:
    """A draft's vocabulary, where it is a part of the target's.

    Args:
        ids_X: the target's id of each token of the draft's vocabulary, int64.
        size: tokens of the target's vocabulary.
    """

    ids_X: Tensor
    size: int

    def children(self, q_BMX: Tensor) -> Tensor:
        """A distribution over the draft's tokens as one over the target's: [B, M, X] to [B, M, V]."""
        return q_BMX.new_zeros(*q_BMX.shape[:-1], self.size).index_copy_(-1, self.ids_X, q_BMX)


@dataclass(frozen=True)
class _Plan:
    """The part of a tree that is the same for all drafts of a shape.

    Args:
        depth_N: depth of each node.
        depth_J: 0, 1, ... for each level but the last.
        parents_1N: parents of a chain's nodes; None for other trees.
        sees_1NN: causal mask of a chain's nodes; None for other trees.
        score_11: log-probability of the root, 0.
        best: selects the nodes to verify; None: all of them.
    """

    depth_N: Tensor
    depth_J: Tensor
    parents_1N: Tensor | None
    sees_1NN: Tensor | None
    score_11: Tensor
    best: BestNodes | None


class TreeExpansion:
    """Expands trees by beam search (POINT) or by independent draws (IID), and chains by either.

    With `TreeShape.keep` a level has more candidates than its width: the best `width` are expanded, and in
    the end the most probable candidates of all levels are selected.

    Tensors that depend on a shape alone are cached, so a draft has one instance for its lifetime.

    Args:
        vocabulary: the draft's vocabulary; None: the target's.

    Source: LongSpec §3.3 and the authors' code (tree by dynamic beam); EAGLE-2 §4 for `keep`.
    Note: EAGLE's code takes the best children of each node; here they are the best of a whole level, which
        contain every node that can be selected.
    """

    def __init__(self, vocabulary: DraftVocabulary | None = None) -> None:
        self.vocabulary = vocabulary
        self._plans: dict[TreeShape, _Plan] = {}

    def depths(self, shape: TreeShape, device: torch.device) -> Tensor:
        """Depth of each level with children, root first: 0, 1, ...; int64_J."""
        return self._plan(shape, device).depth_J

    def grow(
        self,
        logits_of: LevelLogits,
        root_B: Tensor,
        pos_B: Tensor,
        shape: TreeShape,
        sampling: Sampling,
        rng: Rng,
    ) -> TokenTree:
        """Draft level by level below the root.

        POINT: the best `width` children by cumulative log-probability over all nodes of the level above. IID:
        children are divided evenly among the parents before they are drawn.

        Args:
            logits_of: returns the draft's logits for one level's nodes.
            root_B: last token of each sequence.
            pos_B: position of the root.
            shape: widths of the levels, and how children are chosen (`check_tree`).
            sampling: logits processors of the distribution that tokens are drawn from.
            rng: source of randomness, keyed by the position of the drawn token.
        """
        plan = self._plan(shape, root_B.device)
        if plan.parents_1N is not None:
            return self._chain(logits_of, root_B, pos_B, shape, plan, sampling, rng)
        B, N = len(root_B), len(plan.depth_N)
        best, seen = plan.best, list[tuple[Tensor, Tensor, Tensor]]()
        scores = list[Tensor]()
        tree = ExpandingTree.of(root_B, N)
        score_BM = plan.score_11.expand(B, -1)
        distributions, ids_X = list[Tensor](), self._ids()
        above_BM: Tensor | None = None
        first, last = 0, 1
        for depth, width in enumerate(shape.widths):
            level = slice(first, last)
            nodes = Level(depth, first, tree.tokens_BN[:, level], tree.sees_BNN[:, level, :last], above_BM)
            logits_BMX = logits_of(nodes)  # M = nodes of this level
            if shape.children is ChildChoice.POINT:
                temperature = sampling.temperature or 1.0  # rank continuations by the sampled distribution
                most = width if best is None else best.of_level(depth)
                # [B, M, X] -> [B, most]: the best of all continuations, added to `tree`
                tokens, parents, score_BM = best_continuations(
                    logits_BMX, score_BM, most, temperature, ids_V=ids_X, tree=tree, above=first, nodes=width
                )
                if best is not None:  # all candidates are kept for reranking, `width` of them are expanded
                    seen.append((tokens, parents + first, score_BM))
                    parents, score_BM = parents[:, :width], score_BM[:, :width]
                scores.append(score_BM)
            else:
                distributions.append(self._distribution(logits_BMX, sampling))
                tokens, parents = _draws(distributions[-1], width, pos_B + depth + 1, rng)
                tree.add(tokens, parents + first, last)
            # parents within the level above, by which a draft gathers its states (`Level.of_parents`)
            above_BM = parents if last - first > 1 else None
            first, last = last, last + width
        if best is not None:
            return best.tree(root_B, seen)
        probs_BNV = _node_distributions(distributions, N)
        score_BN = torch.cat((plan.score_11.expand(B, -1), *scores), 1) if scores else None
        return TokenTree(
            tree.tokens_BN, tree.parents_BN, plan.depth_N, shape.children, probs_BNV, score_BN=score_BN
        )

    def _chain(
        self,
        logits_of: LevelLogits,
        root_B: Tensor,
        pos_B: Tensor,
        shape: TreeShape,
        plan: _Plan,
        sampling: Sampling,
        rng: Rng,
    ) -> TokenTree:
        """Draft a chain: the mask is known beforehand, and the best child is the argmax."""
        assert plan.sees_1NN is not None and plan.parents_1N is not None
        B, N = len(root_B), shape.n_nodes
        sees_BNN = plan.sees_1NN.expand(B, -1, -1)
        tokens, distributions, ids_X = [root_B], [], self._ids()
        for depth in range(shape.depth):
            seen_B1N = sees_BNN[:, depth : depth + 1, : depth + 1]
            logits_B1X = logits_of(Level(depth, depth, tokens[-1][:, None], seen_B1N))
            if shape.children is ChildChoice.POINT:
                best_B = argmax_rows(logits_B1X)[:, 0]
                tokens.append(best_B if ids_X is None else ids_X[best_B])
                continue
            distributions.append(self._distribution(logits_B1X, sampling))
            tokens.append(_draws(distributions[-1], 1, pos_B + depth + 1, rng)[0][:, 0])
        parents_BN = plan.parents_1N.expand(B, -1)
        probs_BNV = _node_distributions(distributions, N)
        return TokenTree(torch.stack(tokens, 1), parents_BN, plan.depth_N, shape.children, probs_BNV)

    def _ids(self) -> Tensor | None:
        """The target's ids of the draft's tokens; None where they are the same."""
        return None if self.vocabulary is None else self.vocabulary.ids_X

    def _distribution(self, logits_BMX: Tensor, sampling: Sampling) -> Tensor:
        """The distribution that children are drawn from, over the target's vocabulary, [B, M, V]."""
        q_BMX = probs(logits_BMX, sampling)
        return q_BMX if self.vocabulary is None else self.vocabulary.children(q_BMX)

    def _plan(self, shape: TreeShape, device: torch.device) -> _Plan:
        """The cached plan of a shape."""
        plan = self._plans.get(shape)
        if plan is None or plan.depth_N.device != device:
            N = shape.n_expanded
            node_N = torch.arange(N, device=device)
            plan = self._plans[shape] = _Plan(
                depths(shape, device),
                node_N[: shape.depth],
                node_N[None] - 1 if shape.is_chain else None,
                (node_N <= node_N[:, None])[None] if shape.is_chain else None,
                torch.zeros(1, 1, device=device),
                None if shape.keep is None else BestNodes(shape, device),
            )
        return plan


def check_chain(shape: TreeShape, who: str) -> None:
    """Refuse a shape whose drafted part is no chain.

    Raises:
        ConfigError: a level of the shape has several nodes.
    """
    if not shape.drafted.is_chain:
        raise ConfigError(
            f"{who} drafts chains, and shape {list(shape.widths)} is none; pass widths of 1, e.g. "
            "[1, 1, 1, 1]"
        )


def check_tree(shape: TreeShape, vocab_size: int, who: str, window: int = 0) -> None:
    """Refuse a shape that `TreeExpansion` cannot expand.

    Args:
        shape: shape of the tree, copied nodes included.
        vocab_size: number of tokens that the draft can propose.
        who: name of the draft, for messages.
        window: tokens that the draft stores, more than the tree's depth; 0: no limit.

    Raises:
        ConfigError: children drawn without replacement, a level wider than all continuations together, or
            a tree too deep for the window.
    """
    if shape.children is ChildChoice.NO_REPLACE:
        raise ConfigError(f"{who} drafts by decode.children=point (beam) or iid (sampled), not no_replace")
    if shape.keep is not None and (
        shape.children is not ChildChoice.POINT or not 1 <= shape.keep <= vocab_size
    ):
        raise ConfigError(
            f"{shape.keep} nodes kept of a tree whose children are '{shape.children.value}'; allowed: 1 to "
            f"{vocab_size}, and decode.children=point"
        )
    above = 1
    for width in shape.widths if shape.children is ChildChoice.POINT else ():
        if above * vocab_size < width:
            raise ConfigError(
                f"a level of {width} nodes in shape {list(shape.widths)}; a vocabulary of {vocab_size} "
                f"tokens allows {above * vocab_size} there; narrow decode.shape, or in decode.menu that shape"
            )
        above = width
    if window and shape.depth >= window:
        raise ConfigError(
            f"a tree of depth {shape.depth} does not fit a window of {window}; "
            f"allowed: up to {window - 1} levels"
        )


def _draws(q_BMV: Tensor, width: int, pos_B: Tensor, rng: Rng) -> tuple[Tensor, Tensor]:
    """Tokens and parents [B, width] of independent draws, divided evenly among the parents."""
    above = q_BMV.shape[1]
    parents = [child * above // width for child in range(width)]
    drawn = [rng.draw(q_BMV[:, m], pos_B, f"draft{i}" if i else "draft") for i, m in enumerate(parents)]
    tokens_BK = torch.stack(drawn, dim=1)
    return tokens_BK, (torch.arange(width, device=pos_B.device) * above // width).expand_as(tokens_BK)


def _node_distributions(distributions: list[Tensor], nodes: int) -> Tensor | None:
    """The levels' distributions as one tensor [B, N, V], zero for the last level; None without any."""
    if not distributions:
        return None
    known_BMV = torch.cat(distributions, dim=1)
    return pad(known_BMV, (0, 0, 0, nodes - known_BMV.shape[1]))

"""Greedy decoding of a few tokens: argmax of logits, the accepted path of a tree, and its tokens.

Triton if `kernels.devices` supports it, else plain torch (in this file); both give the same numbers.

Shapes: M positions with V logits each, B batch, N tree nodes, P = 1 + levels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.kernels.devices import kernels_serve, runs_on


def argmax_rows(logits: Tensor) -> Tensor:
    """Argmax over the last dimension of logits [..., V], int64 [...]; ties go to the lowest index.

    NaN counts as the largest number, as in torch; the kernel treats it as infinity.
    """
    if not kernels_serve(logits) or logits.shape[-1] >= 2**31:
        return logits.argmax(-1)
    from longtrain.kernels.greedy import kernel

    return kernel.argmax_rows(logits.reshape(-1, logits.shape[-1])).view(logits.shape[:-1])


def follow(
    best_BN: Tensor, tokens_BN: Tensor, parents_BN: Tensor, levels: int, most_B: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk from the root to the first child with the token chosen at each node, until no child has it.

    Args:
        best_BN: token chosen at each node, int64.
        tokens_BN: token of each node, int64.
        parents_BN: parent of each node, below the node's own index; -1 for the root.
        levels: levels of the tree below its root.
        most_B: most nodes of each path, root included, 1 or more: the next node's token then follows them.
            None: no limit.

    Returns:
        path_BP of nodes, 0 after the last (but not cut at `most_B`); n_B, its number of valid nodes; next_B,
        the token that follows them.
    """
    if runs_on(best_BN.device):
        from longtrain.kernels.greedy import kernel

        return kernel.follow(best_BN, tokens_BN, parents_BN, levels, most_B)
    node_B = torch.zeros_like(best_BN[:, 0])
    n_B = torch.ones_like(node_B)
    walking_B = n_B > 0
    path, next_B = [node_B], best_BN[:, 0]
    for _ in range(levels):
        match_BN = (parents_BN == node_B[:, None]) & (tokens_BN == next_B[:, None])
        walking_B = walking_B & match_BN.any(1)
        node_B = torch.where(walking_B, match_BN.int().argmax(1), node_B)
        n_B = n_B + walking_B
        path.append(node_B * walking_B)
        next_B = torch.where(walking_B, best_BN.gather(1, node_B[:, None])[:, 0], next_B)
    path_BP = torch.stack(path, 1)
    if most_B is None:
        return path_BP, n_B, next_B
    after_B1 = path_BP.gather(1, most_B.clamp(max=levels)[:, None])
    cut_B = torch.where(n_B > most_B, tokens_BN.gather(1, after_B1)[:, 0], next_B)
    return path_BP, n_B.minimum(most_B), cut_B


def settle(
    tokens_BN: Tensor,
    found: tuple[Tensor, Tensor, Tensor],
    texts: tuple[Tensor, Tensor, Tensor],
    out_BX: Tensor,
) -> tuple[Tensor, Tensor]:
    """Finalise a cycle: the new tokens of each sequence, their number, and the tokens that may still follow.

    Args:
        tokens_BN: token of each node, int64.
        found: path_BP, accepted nodes, root first, 0 after the last; n_B, its number of valid nodes, 1 or
            more, fewer than were accepted if a limit cut the path; next_B, the token after them.
        texts: root_B, which is set to next_B; left_B, tokens that may follow the root, which is reduced;
            len_B, position of the root. Contiguous int64.
        out_BX: output: n_B; the number of accepted nodes below the root, including those that a limit cut
            off; P tokens, of which those beyond n_B repeat the last. Contiguous int64.

    Returns:
        n_B, but at most left_B, and a copy of len_B.
    """
    path_BP, n_B, next_B = found
    root_B, left_B, len_B = texts
    if runs_on(tokens_BN.device):
        from longtrain.kernels.greedy import kernel

        return kernel.settle(tokens_BN, path_BP, n_B, next_B, root_B, left_B, len_B, out_BX)
    drafted_BP = tokens_BN.gather(1, path_BP).roll(-1, dims=1)
    slot_P = torch.arange(drafted_BP.shape[1], device=drafted_BP.device)
    out_BX[:, 0], out_BX[:, 1] = n_B, (path_BP > 0).sum(1)
    out_BX[:, 2:] = torch.where(slot_P < n_B[:, None] - 1, drafted_BP, next_B[:, None])
    committed_B = n_B.minimum(left_B)
    root_B.copy_(next_B)
    left_B.sub_(committed_B)
    return committed_B, len_B.clone()


def ancestors(parents_BN: Tensor) -> Tensor:
    """Mask of the nodes that each node sees: its ancestors and itself.

    Args:
        parents_BN: parent node, smaller than the child's own index; -1 for the root. int64.

    Returns:
        bool_BNN; entry (b, i, j) is True where j is i or an ancestor of i.
    """
    if runs_on(parents_BN.device):
        from longtrain.kernels.greedy import kernel

        return kernel.ancestors(parents_BN)
    n = parents_BN.shape[1]
    node_N = torch.arange(n, device=parents_BN.device)
    reach_BNN = ((parents_BN[..., None] == node_N) | (node_N[:, None] == node_N)).float()
    for _ in range(max(n - 1, 1).bit_length()):  # each product doubles how far up a node sees
        reach_BNN = (reach_BNN @ reach_BNN).clamp_(max=1)
    return reach_BNN > 0

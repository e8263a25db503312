"""Random trees and copies for the tests of the choice of nodes, and the choice on lists.

Shapes: as in `longtrain.kernels.node_choice`.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from longtrain.kernels.node_choice import Candidates, Rates, choose, learn, reference

ENDS, CLASSES, STEP = (0, 1, 2, 3, 4, 6, 9, 14, 22), 16, 0.5
VOCAB = 5
SIZES = [(1, 1, 1), (2, 3, 2), (11, 8, 13), (17, 8, 24), (33, 5, 12), (40, 24, 1)]
"""Nodes, copied tokens and chosen nodes: a root alone, powers of 2 and more, all candidates, and one."""


def candidates(batch: int, nodes: int, copies: int, seed: int) -> Candidates:
    """Trees from bushes to chains, the latter deeper than the copy; copies along a node of every other tree.

    Some nodes are as probable as their parents, some impossible, and some more probable, as rounding makes
    them.
    """
    gen = torch.Generator().manual_seed(seed)

    def below(most: int) -> int:
        return int(torch.randint(most, (), generator=gen))

    tokens = torch.randint(VOCAB, (batch, nodes), generator=gen)
    copy = torch.randint(VOCAB, (batch, copies), generator=gen)
    parents, depth, score = torch.full_like(tokens, -1), torch.zeros_like(tokens), torch.zeros(batch, nodes)
    for row in range(batch):
        reach = (1, 3, nodes)[row % 3]  # of how many nodes before it a node is a child
        for node in range(1, nodes):
            parent = parents[row, node] = node - 1 - below(min(reach, node))
            depth[row, node] = depth[row, parent] + 1
            less = (0.0, -1e-6, 0.3, 0.7, 1.1, 2.0, math.inf)[
                min(below(30), 6) if below(20) == 0 else below(6)
            ]
            score[row, node] = score[row, parent] - less
        if row % 2:
            path, node = [], below(nodes)
            while node > 0:
                path.insert(0, int(tokens[row, node]))
                node = int(parents[row, node])
            copy[row, : len(path)] = torch.tensor(path[:copies], dtype=torch.int64)
    matched = torch.randint(30, (batch,), generator=gen)
    return Candidates(tokens, parents, depth, score, copy, matched)


def chains(copies: int) -> tuple[Candidates, Rates]:
    """Two long chains, and copies that run along them and end before them or after; all tokens are equal.

    The second chain's first token is another one. Another child of the root is more probable than the later
    nodes, unless the copy were taken to go on. A draft's score may be above 0 by rounding, here by much.
    """
    depth_N = torch.tensor([*range(18), 1])
    parents_BN, depth_BN = torch.tensor([*range(-1, 17), 0]).expand(2, -1), depth_N.expand(2, -1)
    tokens_BN, copy_BK = torch.zeros(2, 19).long(), torch.zeros(2, copies).long()
    tokens_BN[1, 1], tokens_BN[:, 18] = 1, 2
    score_N = -0.3 * depth_N
    score_N[1], score_N[18] = 0.6, -1.9
    score_BN, matched_B = score_N.expand(2, -1), torch.tensor([2, 2])
    tables = rates(2, 0)
    tables.copied_2BL[0] = tables.copied_2BL[1]
    return Candidates(tokens_BN, parents_BN, depth_BN, score_BN, copy_BK, matched_B), tables


def rates(batch: int, seed: int) -> Rates:
    """Tables of a text that has shown something; a class may have accepted all."""
    gen = torch.Generator().manual_seed(seed)
    tables = []
    for classes in (len(ENDS) + 1, CLASSES):
        seen = 4 + torch.randint(40, (batch, classes), generator=gen).float()
        share = (1.3 * torch.rand(batch, classes, generator=gen)).clamp(min=0.01, max=1)
        tables.append(torch.stack((seen * share, seen)))
    return Rates(*tables, torch.tensor(ENDS), STEP)


def verdict(tokens_BX: Tensor, parents_BX: Tensor, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A path of at most `width` nodes down each tree, its length, the next token; every fourth is over."""
    gen = torch.Generator().manual_seed(seed)
    batch, nodes = tokens_BX.shape
    path_BP, n_B = torch.zeros(batch, width).long(), torch.ones(batch).long()
    for row in range(batch):
        node, path = int(torch.randint(nodes, (), generator=gen)), []
        while node > 0:
            path.insert(0, node)
            node = int(parents_BX[row, node])
        path = [0, *path][:width]
        path_BP[row, : len(path)] = torch.tensor(path)
        n_B[row] = len(path) if row % 4 != 3 else 0
    return path_BP, n_B, torch.randint(VOCAB, (batch,), generator=gen)


def moved(some: Candidates, device: str) -> Candidates:
    """The same on a device."""
    return replace(some, **{name: tensor.to(device) for name, tensor in vars(some).items()})


def tables_on(some: Rates, device: str) -> Rates:
    """A copy of the tables on a device."""
    tables = {
        name: getattr(some, name).clone().to(device) for name in ("copied_2BL", "drafted_2BQ", "ends_E")
    }
    return replace(some, **tables)


def same_choices(tables: Rates, some: Candidates, keep: int, got: tuple[Tensor, ...]) -> int:
    """Compare choices with those on lists, and return in how many sequences rounding does not decide."""
    tokens, parents, depth, copied = (x.tolist() for x in got)
    decided = 0
    for row in range(len(tokens)):
        expected, margin = chosen(some, tables, row, keep)
        if margin > 1e-5:
            assert [tokens[row], parents[row], depth[row]] == expected[:3]
            assert copied[row] == expected[3]
            decided += 1
    return decided


def same_as_torch(device: str, case: tuple[int, int, int], *, batch: int, seeds: int) -> None:
    """Some cycles, in which the tables change: the same choices, and the same tables to the last bit."""
    nodes, copies, keep = case
    tables = rates(batch, nodes)
    mine, decided = tables_on(tables, device), 0
    before = [x.clone() for x in (tables.copied_2BL, tables.drafted_2BQ)]
    for seed in range(seeds):
        some = candidates(batch, nodes, copies, seed)
        there = moved(some, device)
        got = tuple(x.cpu() for x in choose(there, mine, keep))
        decided += same_choices(tables, some, keep, got)
        path_BP, n_B, next_B = verdict(got[0], got[1], copies + 1, seed)
        reference.learn(some, tables, got[0], path_BP, n_B, next_B)
        learn(there, mine, *(x.to(device) for x in (got[0], path_BP, n_B, next_B)))
        assert torch.equal(mine.copied_2BL.cpu(), tables.copied_2BL)
        assert torch.equal(mine.drafted_2BQ.cpu(), tables.drafted_2BQ)
    assert decided > 0.7 * batch * seeds
    assert not torch.equal(before[0][:, 0], tables.copied_2BL[:, 0])
    assert torch.equal(before[0][:, 3::4], tables.copied_2BL[:, 3::4])
    assert torch.equal(before[1][:, 3::4], tables.drafted_2BQ[:, 3::4])


def through(some: Candidates, row: int, text: list[int]) -> list[bool]:
    """Which nodes a text after the root runs through, parents first."""
    found: list[bool] = []
    parents, tokens, depth = (x[row].tolist() for x in (some.parents_BN, some.tokens_BN, some.depth_BN))
    for parent, token, level in zip(parents, tokens, depth, strict=True):
        found.append(parent < 0 or (found[parent] and level <= len(text) and text[level - 1] == token))
    return found


def chosen(some: Candidates, tables: Rates, row: int, keep: int) -> tuple[list[list[int]], float]:
    """Tokens, parents and depths of a sequence's chosen nodes, in fp64 and on lists, one node at a time.

    Also returns by how many nats the closest node is more or less probable than the last that was chosen,
    without those that are exactly as probable: where that is next to nothing, rounding decides.
    """
    accepted, seen = (table[row].tolist() for table in tables.drafted_2BQ)
    rate = [
        min(math.log(a / b) for a, b in zip(accepted[: q + 1], seen, strict=False)) for q in range(CLASSES)
    ]
    accepted, seen = (table[row].tolist() for table in tables.copied_2BL)
    copy, total, along = some.copy_BK[row].tolist(), 0.0, []
    for step in range(len(copy)):
        kind = sum(end < int(some.matched_B[row]) + step for end in ENDS)
        total += math.log(accepted[kind] / seen[kind])
        along.append(total)
    depth, parents, tokens = (x[row].tolist() for x in (some.depth_BN, some.parents_BN, some.tokens_BN))
    on_copy, value = through(some, row, copy), [math.inf]
    for node, score in enumerate(some.score_BN[row].tolist()[1:], 1):
        kind = max(0, min(CLASSES - 1, int(max(-score, 0.0) / STEP if score > -math.inf else CLASSES)))
        value.append(min(rate[kind] + 1e-3 * score, value[parents[node]] if parents[node] else rate[0]))
    value = [max(x, along[d - 1]) if on and d else x for x, d, on in zip(value, depth, on_copy, strict=True)]
    last = max((node for node, on in enumerate(on_copy) if on), key=lambda node: (depth[node], -node))
    value += [x if step >= depth[last] else -math.inf for step, x in enumerate(along)]
    tokens, depth = tokens + copy, depth + list(range(1, len(copy) + 1))
    parents = [*parents, *range(len(parents) - 1, len(value) - 1)]
    if depth[last] < len(copy):
        parents[len(on_copy) + depth[last]] = last
    order = sorted(range(1, len(value)), key=lambda node: -value[node])
    kept = [0, *sorted(order[:keep])]
    place = {node: at for at, node in enumerate(kept)}
    cut = value[order[keep - 1]]
    margin = min((abs(x - cut) for x in value[1:] if x != cut), default=math.inf)
    above = [-1, *(place.get(parents[node], 0) for node in kept[1:])]
    found = [[tokens[node] for node in kept], above, [depth[node] for node in kept]]
    return [*found, [sum(node >= len(on_copy) for node in kept)]], margin

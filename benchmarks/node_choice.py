"""Milliseconds of choosing a joined tree's nodes and of updating its tables, by kernels and by plain torch.

Each is timed alone and both together, as in a cycle; on CUDA they are replayed from a CUDA graph.

Shapes: as in `longtrain.kernels.node_choice`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Annotated

import torch
from torch import Tensor

from benchmarks import replay
from longtrain.bench import clock
from longtrain.bench.suites import Bench, Context, Row
from longtrain.kernels import node_choice
from longtrain.kernels.node_choice import Candidates, Rates, reference
from longtrain.methods.prompt_lookup.split import NodeSplit
from longtrain.settings import NOT_EMPTY, Count

COLUMNS = {
    "batch": "batch",
    "nodes": "nodes",
    "copied": "copied",
    "chosen": "chosen",
    "choose ms": "choose_ms.median",
    "learn ms": "learn_ms.median",
    **clock.spread_columns("both ms", "both_ms"),
    "torch ms": "torch_ms.median",
    "torch / kernels": "speed",
}
VOCAB = 4
"""Tokens of the random texts: few, so that copies run through some of the nodes."""
CALLS = 8
"""Cycles of one replay."""


@dataclass(frozen=True)
class NodeChoiceSettings:
    """The keys of the benchmark.

    Args:
        cells: sequences, nodes of the draft's tree and copied tokens of each measurement. All of the draft's
            nodes but the root, and half as many as are copied, are chosen.
        repeats: counted replays.
    """

    cells: Annotated[tuple[tuple[Count, Count, Count], ...], NOT_EMPTY]
    repeats: Count = 50


@dataclass(frozen=True)
class Cycle:
    """What the draft and the copy propose, and which nodes of the chosen tree are accepted."""

    found: Candidates
    rates: Rates
    keep: int
    tokens_BX: Tensor
    path_BP: Tensor
    n_B: Tensor
    next_B: Tensor

    @classmethod
    def random(cls, batch: int, nodes: int, copied: int, device: torch.device) -> Cycle:
        """Return a binary tree of random tokens, of which each child is half as probable as its parent."""
        gen = torch.Generator().manual_seed(0)
        node_N = torch.arange(nodes)
        depth_N = (node_N + 1.5).log2().long()
        tokens_BN = torch.randint(VOCAB, (batch, nodes), generator=gen)
        copy_BK = torch.randint(VOCAB, (batch, copied), generator=gen)
        parents_BN = torch.div(node_N - 1, 2, rounding_mode="floor").expand(batch, -1)
        score_BN = (-0.7 * depth_N).expand(batch, -1)
        matched_B = torch.full((batch,), 3)
        some = (tokens_BN, parents_BN, depth_N.expand(batch, -1), score_BN, copy_BK, matched_B)
        found = Candidates(*(one.to(device) for one in some))
        rates = NodeSplit(batch, device).rates
        keep = max(1, nodes - 1 + copied // 2)
        tokens_BX = node_choice.choose(found, rates, keep)[0]
        path_BP = torch.zeros(batch, copied + 1, dtype=torch.int64, device=device)
        return cls(found, rates, keep, tokens_BX, path_BP, path_BP[:, 0] + 1, tokens_BX[:, 0])

    def choose(self, module: ModuleType, _: int) -> tuple[Tensor, ...]:
        """Choose the nodes, by the kernel or by the reference."""
        return module.choose(self.found, self.rates, self.keep)

    def learn(self, module: ModuleType, _: int) -> None:
        """Update the tables, likewise."""
        module.learn(self.found, self.rates, self.tokens_BX, self.path_BP, self.n_B, self.next_B)

    def both(self, module: ModuleType, turn: int) -> None:
        """Choose and then learn, as in a cycle."""
        self.choose(module, turn)
        self.learn(module, turn)


def run(settings: NodeChoiceSettings, context: Context) -> Iterator[Row]:
    """Yield a row for each cell."""
    for batch, nodes, copied in settings.cells:
        cycle = Cycle.random(batch, nodes, copied, context.device)
        pairs = zip(cycle.choose(node_choice, 0), cycle.choose(reference, 0), strict=True)
        same = all(torch.equal(a, b) for a, b in pairs)
        spread = partial(replay.replayed, device=context.device, calls=CALLS, repeats=settings.repeats)
        both_ms, torch_ms = (spread(partial(cycle.both, one)) for one in (node_choice, reference))
        yield {
            "batch": batch,
            "nodes": nodes,
            "copied": copied,
            "chosen": cycle.keep,
            "same": same,
            "choose_ms": spread(partial(cycle.choose, node_choice)),
            "learn_ms": spread(partial(cycle.learn, node_choice)),
            "both_ms": both_ms,
            "torch_ms": torch_ms,
            "speed": torch_ms["median"] / both_ms["median"],
        }


BENCH = Bench(settings=NodeChoiceSettings, run=run, columns=COLUMNS)

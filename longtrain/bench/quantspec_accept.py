"""How many drafts a cycle accepts, given beforehand: for random weights, whose drafts are never accepted.

Every cycle still drafts, verifies and commits as it would; only the number that comes out of the verification
is replaced, on the device. The numbers follow a law: independent positions of one acceptance rate, or what a
real run accepted. A run takes the law's quantiles in random order, so that a short one has the law's mean.

Shapes: C cycles, B batch, N tree nodes, P path.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longtrain.decoding.roles import TokenTree, TreeShape, Verdict
from longtrain.errors import ConfigError, DataError

_MALFORMED = (OSError, ValueError, KeyError, TypeError)
"""What reading a file of other contents raises."""


@dataclass(frozen=True)
class Law:
    """Probability of accepting 0, 1, ... depth drafts in a cycle.

    Args:
        probs: as many as levels, and one more.
        source: where they come from, JSON values.
    """

    probs: tuple[float, ...]
    source: dict[str, Any]

    @property
    def tokens_per_cycle(self) -> float:
        """The mean, the target's own token included."""
        return 1 + sum(k * prob for k, prob in enumerate(self.probs))

    def lengths(self, cycles: int, seed: int) -> list[int]:
        """One number for each of so many cycles: the law's quantiles, in an order of the seed."""
        edges = list(accumulate(self.probs))
        edges[-1] = 1.0
        found = [next(k for k, edge in enumerate(edges) if (i + 0.5) / cycles <= edge) for i in range(cycles)]
        random.Random(seed).shuffle(found)
        return found


def independent(rate: float, depth: int) -> Law:
    """Each drafted token is accepted with the same probability, where all before it were.

    Raises:
        ConfigError: `rate` is no probability.
    """
    if not 0 <= rate <= 1:
        raise ConfigError(f"suite.acceptance={rate}; allowed: 0 to 1")
    probs = [rate**k * (1 - rate) for k in range(depth)]
    return Law((*probs, rate**depth), {"acceptance": rate})


def recorded(file: Path, shape: TreeShape, context: int) -> Law:
    """What drafts of this shape were accepted in an `eval suite=acceptance` run.

    Args:
        file: that run's `scores.json`.
        shape: of the drafts.
        context: prompt tokens; the run's nearest length not above them counts, else its shortest.

    Raises:
        DataError: no such file, none of its runs has this shape, or its numbers are damaged.
    """
    try:
        scores = json.loads(file.read_text(encoding="utf-8"))
        variants = {tuple(one["shape"]): one for one in scores["variants"]}
    except _MALFORMED as error:
        raise _not_scores(file, _told(error)) from error
    if shape.widths not in variants:
        known = ", ".join(str(list(widths)) for widths in variants)
        raise DataError(f"suite.recorded={file} has no drafts of shape {list(shape.widths)}; it has: {known}")
    where = f"drafts of shape {list(shape.widths)}:"
    try:
        one = variants[shape.widths]
        name, cells = one["name"], sorted(one["lengths"], key=lambda cell: cell["length"])
        if not cells:
            raise _not_scores(file, f"{where} no lengths; allowed: one or more")
        cell = next((cell for cell in reversed(cells) if cell["length"] <= context), cells[0])
        levels = sorted(cell["by_depth"], key=lambda level: level["depth"])
        if not levels:
            raise _not_scores(
                file, f"{where} an empty by_depth at length {cell['length']}; allowed: a level or more"
            )
        reached = [levels[0]["tried"], *(level["accepted"] for level in levels)]
        cycles = reached[0]
        counts = [a - b for a, b in zip(reached, [*reached[1:], 0], strict=True)]
        sound = cycles > 0 and all(count >= 0 for count in counts)
    except _MALFORMED as error:
        raise _not_scores(file, f"{where} {_told(error)}") from error
    if not sound:
        raise _not_scores(
            file,
            f"{where} tried {cycles} and accepted {reached[1:]} by depth at length {cell['length']}; "
            "allowed: tried above 0, and at no depth more accepted than at the one before",
        )
    source = {"file": file.name, "name": name, "prompt_tokens": cell["length"], "cycles": cycles}
    return Law(tuple(count / cycles for count in counts), source)


def shapes_recorded(file: Path) -> list[TreeShape]:
    """The shapes of a run's drafts.

    Raises:
        DataError: the file is not an acceptance run's.
    """
    try:
        scores = json.loads(file.read_text(encoding="utf-8"))
        return [TreeShape(tuple(one["shape"])) for one in scores["variants"] if one["shape"]]
    except _MALFORMED as error:
        raise _not_scores(file, _told(error)) from error


def _told(error: Exception) -> str:
    """What is wrong with a file, in words."""
    return f"no entry {error}" if isinstance(error, KeyError) else str(error)


def _not_scores(file: Path, why: str) -> DataError:
    return DataError(
        f"suite.recorded={file} is not a scores.json of eval suite=acceptance ({why}); write one with "
        "`longtrain eval suite=acceptance`, or pass suite.recorded=null"
    )


class Replay:
    """Hands out such numbers cycle by cycle (`decoding.phases.Judge`); its place is kept on the device.

    What the cache allows is not exceeded, so strict flushing costs what it costs.

    Args:
        accepted: of each cycle, for each sequence; begun anew after the last.
        shape: of the trees; an accepted path is the first node of the last level and those above it.
        device: of the work.
    """

    def __init__(
        self, accepted: Sequence[Sequence[int]], shape: TreeShape, device: torch.device | str
    ) -> None:
        self.n_CB = torch.tensor(accepted, device=device) + 1
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.leaf = shape.n_nodes - shape.widths[-1] if shape.widths else 0
        self.depth = shape.depth
        self.slot_P = torch.arange(shape.depth + 1, device=device)
        self.chain = all(width == 1 for width in shape.widths)

    def __call__(self, tree: TokenTree, verdict: Verdict, most_B: Tensor | None) -> Verdict:
        """The next cycle's verdict; the token after the path is that of the real one."""
        n_B = self.n_CB.index_select(0, self.at)[0]
        self.at.add_(1).remainder_(len(self.n_CB))
        if most_B is not None:
            n_B = n_B.minimum(most_B)
        path_BP = self._path(tree) * (self.slot_P < n_B[:, None])
        return Verdict(path_BP, n_B, verdict.next_B)

    def _path(self, tree: TokenTree) -> Tensor:
        """A whole path from the root to the last level; int64_BP."""
        if self.chain:
            return self.slot_P.expand(len(tree.tokens_BN), -1)
        node_B1 = torch.full_like(tree.parents_BN[:, :1], self.leaf)
        path = [node_B1]
        for _ in range(self.depth):
            node_B1 = tree.parents_BN.gather(1, node_B1)
            path.append(node_B1)
        return torch.cat(path[::-1], 1)

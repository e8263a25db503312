"""Simulated acceptance for benchmarks with random weights, whose drafts would never be accepted.

Every cycle still drafts, verifies and commits; only the accepted length that results from the verification is
replaced, on the device. Accepted lengths follow a distribution: independent positions with one acceptance
rate, or the lengths recorded in a real run. A run uses the distribution's quantiles in random order, so that
even a short run has its mean.

Shapes: C cycles, B batch, N tree nodes, P path.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from longtrain.decoding.roles import TokenTree, TreeShape, Verdict
from longtrain.errors import ConfigError, DataError
from longtrain.settings import NOT_EMPTY, Count, from_file, parse_tokens


@dataclass(frozen=True)
class AcceptanceModel:
    """The distribution of the number of drafted tokens accepted in a cycle.

    Args:
        probs: probability of accepting 0, 1, ..., depth tokens.
        source: origin of the distribution, as JSON values.
    """

    probs: tuple[float, ...]
    source: dict[str, Any]

    @property
    def tokens_per_cycle(self) -> float:
        """Mean tokens per cycle, including the target's own token."""
        return 1 + sum(k * prob for k, prob in enumerate(self.probs))

    def lengths(self, cycles: int, seed: int) -> list[int]:
        """Return the accepted length of each cycle: quantiles of the distribution, shuffled by the seed."""
        edges = list(accumulate(self.probs))
        edges[-1] = 1.0
        found = [next(k for k, edge in enumerate(edges) if (i + 0.5) / cycles <= edge) for i in range(cycles)]
        random.Random(seed).shuffle(found)
        return found


def independent(rate: float, depth: int) -> AcceptanceModel:
    """Return the model in which each token is accepted with probability `rate` if all before it were."""
    probs = [rate**k * (1 - rate) for k in range(depth)]
    return AcceptanceModel((*probs, rate**depth), {"acceptance": rate})


@dataclass(frozen=True)
class RecordedDepth:
    """Numbers of drafted and accepted tokens at one depth of the trees."""

    depth: int
    tried: Count
    accepted: int


@dataclass(frozen=True)
class RecordedLength:
    """Recorded acceptance after prompts of one length."""

    length: int
    by_depth: Annotated[tuple[RecordedDepth, ...], NOT_EMPTY]


@dataclass(frozen=True)
class RecordedDraft:
    """Recorded acceptance of a draft with one tree shape, for every prompt length."""

    name: str
    shape: Annotated[tuple[int, ...], NOT_EMPTY]
    lengths: Annotated[tuple[RecordedLength, ...], NOT_EMPTY]

    def children(self, file: Path, context: int) -> AcceptanceModel:
        """Return the distribution at the largest recorded length up to `context`, else at the shortest.

        Raises:
            DataError: more tokens were accepted at a depth than at the one before.
        """
        lengths = sorted(self.lengths, key=lambda one: one.length)
        nearest = next((one for one in reversed(lengths) if one.length <= context), lengths[0])
        levels = sorted(nearest.by_depth, key=lambda level: level.depth)
        cycles = levels[0].tried
        reached = [cycles, *(level.accepted for level in levels), 0]
        counts = [before - after for before, after in pairwise(reached)]
        if min(counts) < 0:
            raise _not_scores(
                file,
                f"drafts of shape {list(self.shape)} at length {nearest.length}: of {cycles} tries "
                f"{reached[1:-1]} were accepted by depth; no depth may have more than the one before",
            )
        source = {"file": file.name, "name": self.name, "prompt_tokens": nearest.length, "cycles": cycles}
        return AcceptanceModel(tuple(count / cycles for count in counts), source)


def recorded(file: Path) -> list[RecordedDraft]:
    """Read the drafts of a run of `eval suite=acceptance`.

    Args:
        file: the run's `results.json`, or `scores.json` of older versions.

    Raises:
        DataError: the file is missing, or is of another kind.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        variants = map(_variant, content["systems"]) if "systems" in content else content["variants"]
        found: list[RecordedDraft] = from_file(list[RecordedDraft], [one for one in variants if one["shape"]])
    except KeyError as error:
        raise _not_scores(file, f"no entry {error}") from error
    except (OSError, ValueError, TypeError, AttributeError, ConfigError) as error:
        raise _not_scores(file, str(error)) from error
    return found


def _variant(system: Any) -> dict[str, Any]:
    """Convert an entry of `systems` in a `results.json` to an entry of `variants` in a `scores.json`."""
    lengths = [
        {"length": parse_tokens(task["task"]), "by_depth": task["acceptance"]["by_depth"]}
        for task in system["tasks"]
        if task.get("acceptance") is not None
    ]
    return {"name": system["name"], "shape": system["facts"].get("shape"), "lengths": lengths}


def _not_scores(file: Path, why: str) -> DataError:
    return DataError(
        f"suite.recorded={file} is not a results.json of eval suite=acceptance ({why}); write one with "
        "`longtrain eval suite=acceptance`, or pass suite.recorded=null"
    )


class GivenAcceptance:
    """Replaces the accepted length of each cycle after verification.

    The cycle counter is on the device, so that cycles can be captured. The limit of the cache is respected,
    so that the cost of strict flushing is included.

    Args:
        accepted: the accepted length of each cycle, for each sequence; repeats after the last.
        shape: shape of the trees; the accepted path leads to the first node of the last level.
        device: the device that the cycles run on.
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
        """Return the next cycle's verdict; the token after the path is that of the real verdict."""
        n_B = self.n_CB.index_select(0, self.at)[0]
        self.at.add_(1).remainder_(len(self.n_CB))
        path_BP = self._path(tree) * (self.slot_P < n_B[:, None])
        return Verdict(path_BP, n_B if most_B is None else n_B.minimum(most_B), verdict.next_B)

    def _path(self, tree: TokenTree) -> Tensor:
        """Return a full path from the root to the last level; int64_BP."""
        if self.chain:
            return self.slot_P.expand(len(tree.tokens_BN), -1)
        node_B1 = torch.full_like(tree.parents_BN[:, :1], self.leaf)
        path = [node_B1]
        for _ in range(self.depth):
            node_B1 = tree.parents_BN.gather(1, node_B1)
            path.append(node_B1)
        return torch.cat(path[::-1], 1)

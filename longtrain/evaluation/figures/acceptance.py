"""How drafts were accepted, pooled over texts.

A text's share in a figure is (sum above, sum below); texts are what the bootstrap draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from longtrain.decoding.stats import Cycle, Stats
from longtrain.evaluation.figures.statistics import USUAL, Bootstrap, pooled_ratio, wilson

PARTS = 4
"""Parts that the generated text is cut into."""
LONG_OUTPUT, LONG_PARTS = 256, 8
"""Tokens from which the generated text is cut into more parts, and into how many."""
LOOPING = 0.2
"""A text is called repetitive when more than this share of it repeats its own earlier text."""
ACCEPTANCE = "acceptance length"
"""Name of the scale of suites whose figure is `tau_of`."""

Json = dict[str, Any]
Sums = tuple[list[int], list[int]]


def acceptance_of(
    rows: Sequence[Sequence[Cycle]], draw: Bootstrap = USUAL, *, edges: Sequence[int] | None = None
) -> Json:
    """How drafts were accepted.

    `tau` is tokens a cycle, the target's own included (LongSpec's acceptance length); `acceptance_rate` is
    accepted drafts over drafted levels (QuantSpec's); `node_rate` is accepted drafts over drafted nodes.

    Args:
        rows: the cycles of each text.
        draw: how the bootstrap draws.
        edges: ascending bounds in generated tokens for `by_position`; None: equal parts of the longest text.

    Source: LongSpec Section 4; QuantSpec Section 5, "acceptance rate".
    """
    edges = position_edges(_longest(rows), PARTS) if edges is None else list(edges)
    parts = [(low, high) for low, high in pairwise(edges) if low < high]
    stats = Stats(rows=[list(row) for row in rows])
    return {
        "tau": pooled_ratio(tau_of(rows), draw).to_json(),
        "acceptance_rate": pooled_ratio(_sums(rows, lambda c: (c.accepted, c.drafted)), draw).to_json(),
        "node_rate": pooled_ratio(_sums(rows, lambda c: (c.accepted, c.nodes)), draw).to_json(),
        "by_depth": [
            {"depth": depth, "accepted": hits, "tried": tried, "rate": wilson(hits, tried).to_json()}
            for depth, (hits, tried) in enumerate(stats.by_depth(), 1)
        ],
        "by_position": [
            {
                "from": low,
                "below": high,
                "tau": pooled_ratio(_tau_within(rows, low, high), draw).to_json(),
            }
            for low, high in parts
        ],
        "cycles": sum(not cycle.ended for row in rows for cycle in row),
    }


def position_edges(tokens: int, parts: int | None = None) -> list[int]:
    """Bounds that cut the tokens which cycles generate (all but the first) into equal parts.

    Args:
        tokens: of the longest text.
        parts: how many; None: more of long texts.
    """
    count = parts or (LONG_PARTS if tokens >= LONG_OUTPUT else PARTS)
    return [1 + round(i * (tokens - 1) / count) for i in range(count + 1)]


def tau_of(rows: Iterable[Sequence[Cycle]]) -> Sums:
    """For each text: tokens emitted by cycles (the target's own counts, prefill's does not), and cycles."""
    return _sums(rows, lambda cycle: (cycle.tokens, 1))


def _sums(rows: Iterable[Sequence[Cycle]], of: Callable[[Cycle], tuple[int, int]]) -> Sums:
    pairs = [[of(cycle) for cycle in row if not cycle.ended] for row in rows]
    return [sum(a for a, _ in row) for row in pairs], [sum(b for _, b in row) for row in pairs]


def _longest(rows: Iterable[Sequence[Cycle]]) -> int:
    """Tokens of the longest text; 1 where nothing was drafted."""
    return max((row[-1].position + row[-1].emitted for row in rows if row), default=1)


def _tau_within(rows: Iterable[Sequence[Cycle]], low: int, high: int) -> Sums:
    return tau_of([[cycle for cycle in row if low <= cycle.position < high] for row in rows])

"""Figures of an acceptance run, pooled over prompts, as plain JSON values that are the same on every rerun.

A prompt's share in a figure is (sum above, sum below); prompts are what the bootstrap resamples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from longtrain.decoding.stats import Cycle, Stats
from longtrain.evaluation.acceptance import Cell, Protocol, Runs, Variant
from longtrain.evaluation.statistics import RESAMPLES, paired_difference, pooled_ratio, wilson

POSITIONS = 4
"""Parts that the generated text is cut into."""

LOOPING = 0.2
"""A text is called repetitive when more than this share of it repeats its own earlier text."""

ACCEPTANCE = "acceptance length"
"""Name of the scale of suites whose figure is `tau_of`."""

Figure = tuple[list[int], list[int]]
Json = dict[str, Any]


@dataclass(frozen=True)
class Draw:
    """How the bootstrap draws."""

    seed: int = 0
    resamples: int = RESAMPLES


def scores(
    variants: Sequence[Variant],
    protocol: Protocol,
    *,
    runs: Runs,
    dropped: dict[str, int] | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Json:
    """Everything that is reported but times.

    Args:
        variants: as they ran.
        protocol: as they ran.
        runs: what came out.
        dropped: prompts that never ran, by reason.
        seed: of the bootstrap.
        resamples: bootstrap replicates.
    """
    draw = Draw(seed, resamples)
    kinds = [point.document.kind for point in protocol.points]
    table = []
    for variant in variants:
        cells = [_cell(cell, protocol, kinds, draw) for cell in runs.cells[variant.name]]
        pooled = [row for cell in runs.cells[variant.name] for row in cell.stats.rows]
        table.append(
            {
                "name": variant.name,
                "shape": list(variant.shape.widths),
                "law": variant.shape.law.value,
                "tau": _pooled(tau_of(pooled), draw),
                "retention": _retention(cells),
                "lengths": cells,
            }
        )
    return {
        "prompts": len(protocol.points),
        "dropped": dict(dropped or {}),
        "kinds": dict(sorted(Counter(kinds).items())),
        "documents": len({point.document.name for point in protocol.points}),
        "max_new_tokens": protocol.max_new_tokens,
        "ignore_eos": protocol.ignore_eos,
        "temperature": protocol.sampling.temperature,
        "top_p": protocol.sampling.top_p,
        "top_k": protocol.sampling.top_k,
        "variants": table,
        "differences": differences(variants, runs, draw),
        "plain": [
            {
                "length": c.length,
                "cache_bytes": c.stats.cache_bytes,
                "repeated_share": _plain(c.stats.repeated_share),
            }
            for c in runs.plain
        ],
    }


def acceptance_of(
    rows: Sequence[Sequence[Cycle]],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    positions: Sequence[int] | None = None,
) -> Json:
    """How drafts were accepted, pooled over texts; texts are what the bootstrap resamples.

    `tau` is tokens a cycle, the target's own included (LongSpec's acceptance length); `acceptance_rate` is
    accepted drafts over drafted levels (QuantSpec's); `node_rate` is accepted drafts over drafted nodes.

    Args:
        rows: the cycles of each text.
        seed: of the bootstrap.
        resamples: bootstrap replicates.
        positions: ascending bounds in generated tokens for `by_position`; None: equal parts of the longest
            text (`position_edges`).

    Source: LongSpec Section 4; QuantSpec Section 5, "acceptance rate".
    """
    draw = Draw(seed, resamples)
    edges = position_edges(_longest(rows)) if positions is None else list(positions)
    stats = Stats(rows=[list(row) for row in rows])
    return {
        "tau": _pooled(tau_of(rows), draw),
        "acceptance_rate": _pooled(_sums(rows, lambda c: (c.accepted, c.drafted)), draw),
        "node_rate": _pooled(_sums(rows, lambda c: (c.accepted, c.nodes)), draw),
        "by_depth": [
            {"depth": depth, "accepted": hits, "tried": tried, "rate": wilson(hits, tried).to_json()}
            for depth, (hits, tried) in enumerate(stats.by_depth(), 1)
        ],
        "by_position": [
            {"from": low, "below": high, "tau": _pooled(tau_of(_within(rows, low, high)), draw)}
            for low, high in pairwise(edges)
            if low < high
        ],
        "cycles": sum(not cycle.ended for row in rows for cycle in row),
    }


def position_edges(tokens: int, parts: int = POSITIONS) -> list[int]:
    """Bounds that cut the tokens which cycles generate (all but the first) into equal parts."""
    return [1 + round(i * (tokens - 1) / parts) for i in range(parts + 1)]


def differences(variants: Sequence[Variant], runs: Runs, draw: Draw) -> list[Json]:
    """Acceptance length of the first variant minus that of each other, over the same prompts, by length."""
    first, *others = variants
    return [
        {
            "first": first.name,
            "second": other.name,
            "length": a.length,
            "tau": paired_difference(tau_of(a.stats.rows), tau_of(b.stats.rows), **asdict(draw)).to_json(),
        }
        for other in others
        for a, b in zip(runs.cells[first.name], runs.cells[other.name], strict=True)
    ]


def tau_of(rows: Iterable[Sequence[Cycle]]) -> Figure:
    """Per prompt: tokens emitted by cycles (the target's own counts, prefill's does not), and cycles."""
    return _sums(rows, lambda cycle: (cycle.accepted + 1, 1))


def _cell(cell: Cell, protocol: Protocol, kinds: list[str], draw: Draw) -> Json:
    stats = cell.stats
    shares = [r / max(1, n) for r, n in zip(stats.repeated_tokens, stats.output_tokens, strict=True)]
    fresh = [row for row, share in zip(stats.rows, shares, strict=True) if share <= LOOPING]
    empty = sum(all(cycle.ended for cycle in row) for row in stats.rows)
    edges = position_edges(protocol.max_new_tokens)
    figures = acceptance_of(stats.rows, **asdict(draw), positions=edges)
    return {
        "length": cell.length,
        "prompts": len(stats.rows) - empty,
        "dropped": {"text ended within the first cycle": empty} if empty else {},
        **figures,
        "by_kind": {
            kind: _pooled(tau_of(_of_kind(stats.rows, kinds, kind)), draw) for kind in sorted(set(kinds))
        },
        "repeated_share": _plain(stats.repeated_share),
        "repetitive_prompts": len(stats.rows) - len(fresh),
        "tau_not_repetitive": _pooled(tau_of(fresh), draw),
        "target_forwards": stats.target_forwards,
        "cache_bytes": stats.cache_bytes,
        "draft_bytes": stats.draft_bytes,
        "exactness": cell.exactness.to_json() if cell.exactness else None,
    }


def _retention(cells: list[Json]) -> float | None:
    """(τ - 1) at the longest context over (τ - 1) at the shortest."""
    short, long = (cells[index]["tau"]["value"] for index in (0, -1))
    return (long - 1) / (short - 1) if short and long and short > 1 else None


def _pooled(figure: Figure, draw: Draw) -> Json:
    return pooled_ratio(*figure, seed=draw.seed, resamples=draw.resamples).to_json()


def _of_kind(rows: Sequence[list[Cycle]], kinds: list[str], kind: str) -> list[list[Cycle]]:
    return [row for row, its in zip(rows, kinds, strict=True) if its == kind]


def _longest(rows: Iterable[Sequence[Cycle]]) -> int:
    """Tokens of the longest text; 1 where nothing was drafted."""
    return max((row[-1].position + row[-1].emitted for row in rows if row), default=1)


def _within(rows: Iterable[Sequence[Cycle]], low: int, high: int) -> list[list[Cycle]]:
    return [[cycle for cycle in row if low <= cycle.position < high] for row in rows]


def _sums(rows: Iterable[Sequence[Cycle]], of: Any) -> Figure:
    pairs = [[of(cycle) for cycle in row if not cycle.ended] for row in rows]
    return [sum(a for a, _ in row) for row in pairs], [sum(b for _, b in row) for row in pairs]


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value

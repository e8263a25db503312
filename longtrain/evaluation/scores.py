"""Figures of an acceptance run, pooled over prompts, as plain JSON values that are the same on every rerun.

A prompt's share in a figure is (sum above, sum below); prompts are what the bootstrap resamples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from longtrain.decoding.stats import Cycle
from longtrain.evaluation.acceptance import Cell, Protocol, Runs, Variant
from longtrain.evaluation.figures.acceptance import acceptance_of, position_edges, tau_of
from longtrain.evaluation.figures.statistics import (
    RESAMPLES,
    Bootstrap,
    Ratio,
    paired_difference,
    pooled_ratio,
)

LOOPING = 0.2
"""A text is called repetitive when more than this share of it repeats its own earlier text."""

Json = dict[str, Any]


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
    draw = Bootstrap(seed, resamples)
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


def differences(variants: Sequence[Variant], runs: Runs, draw: Bootstrap) -> list[Json]:
    """Acceptance length of the first variant minus that of each other, over the same prompts, by length."""
    first, *others = variants
    return [
        {
            "first": first.name,
            "second": other.name,
            "length": a.length,
            "tau": paired_difference(tau_of(a.stats.rows), tau_of(b.stats.rows), draw).to_json(),
        }
        for other in others
        for a, b in zip(runs.cells[first.name], runs.cells[other.name], strict=True)
    ]


def _cell(cell: Cell, protocol: Protocol, kinds: list[str], draw: Bootstrap) -> Json:
    stats = cell.stats
    shares = [r / max(1, n) for r, n in zip(stats.repeated_tokens, stats.output_tokens, strict=True)]
    fresh = [row for row, share in zip(stats.rows, shares, strict=True) if share <= LOOPING]
    empty = sum(all(cycle.ended for cycle in row) for row in stats.rows)
    edges = position_edges(protocol.max_new_tokens, 4)
    figures = acceptance_of(stats.rows, draw, edges=edges)
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


def _pooled(figure: Ratio, draw: Bootstrap) -> Json:
    return pooled_ratio(figure, draw).to_json()


def _of_kind(rows: Sequence[list[Cycle]], kinds: list[str], kind: str) -> list[list[Cycle]]:
    return [row for row, its in zip(rows, kinds, strict=True) if its == kind]


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value

"""A finished evaluation in a few columns: a row a system, with intervals, and its score by context length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from longtrain.evaluation.figures.acceptance import ACCEPTANCE
from longtrain.evaluation.reporting.tables import Column, Sheet, difference, sheet
from longtrain.tables import DASH, interval, percent, tokens, without_empty

Json = dict[str, Any]


def rows_of(results: Json, timings: Mapping[str, Any] | None = None) -> list[Json]:
    """A row for each system of a run.

    Args:
        results: of `results.assemble`.
        timings: as they are written; their speeds are ratios to the first system of each timed prompt.
    """
    timed = (timings or {}).get("speed", [])
    speeds = {
        system["name"]: [
            ratio
            for row in timed
            if (ratio := row["figures"].get(system["name"], {}).get("ratio")) is not None
        ]
        for system in results["systems"]
    }
    return [
        {
            "system": system["name"],
            "kind": system["kind"],
            "budget": system["budget"],
            "facts": system["facts"],
            "score": system["average"],
            "versus_full": system["versus_full"],
            "acceptance": system["acceptance"]["tau"] if system["acceptance"] else None,
            "accepted": system["acceptance"]["acceptance_rate"] if system["acceptance"] else None,
            "lengths": {
                str(one["value"]): one["score"]
                for one in system["facets"]
                if one["facet"] == "length" and one["score"]["value"] is not None
            },
            "speed": [min(found), max(found)] if (found := speeds[system["name"]]) else None,
        }
        for system in results["systems"]
    ]


def board(scale: str, rows: Sequence[Json], more: Iterable[Column] = ()) -> Sheet:
    """Headings and a line a row, as plain text; columns that nobody fills are left out.

    Args:
        scale: what the score is.
        rows: of `rows_of`, perhaps of several runs.
        more: columns after these.
    """
    lengths = sorted({int(length) for row in rows for length in row["lengths"]})
    columns: list[Column] = [
        ("system", lambda row: row["system"]),
        (scale, lambda row: interval(row["score"])),
        ("vs full", lambda row: difference(row["versus_full"], plain=True)),
        *[
            (f"at {tokens(length)}", lambda row, at=str(length): interval(row["lengths"].get(at)))
            for length in (lengths if len(lengths) > 1 else ())
        ],
        ("τ", lambda row: DASH if scale == ACCEPTANCE else interval(row["acceptance"])),
        ("accepted", lambda row: percent(row["accepted"]["value"]) if row["accepted"] else DASH),
        ("speed", lambda row: _speed(row["speed"])),
        *more,
    ]
    return without_empty(*sheet(columns, rows))


def _speed(ends: Sequence[float] | None) -> str:
    """Ratios to the full cache, the smallest and the largest over the timed prompts."""
    if ends is None:
        return DASH
    low, high = (f"{end:.2f}" for end in ends)
    return f"{low} ×" if low == high else f"{low} to {high} ×"

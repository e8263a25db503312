"""Greedy texts of drafts beside those of plain decoding on the same cache, draft by draft and shape by shape.

Shapes: none cross a function's boundary here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.evaluation.exactness import compare

if TYPE_CHECKING:
    from longtrain.decoding.stats import Stats
    from longtrain.targets.model import Target

Json = dict[str, Any]


def measure(
    target: Target,
    parts: Parts,
    prompts: Sequence[Sequence[int]],
    shapes: Sequence[TreeShape],
    *,
    max_new_tokens: int,
    batch: int = 1,
    told: Callable[[Json], None] = lambda row: None,
) -> list[Json]:
    """Decode plainly and with the draft in each shape, and compare the texts.

    Args:
        target: the frozen model.
        parts: a draft, and the cache and evictor that plain decoding has too.
        prompts: token ids.
        shapes: what is drafted.
        max_new_tokens: tokens of a text; no token id ends one.
        batch: prompts decoded together.
        told: called with each row as it is there.

    Returns:
        A row a shape: `exactness` (`Exactness.to_json`), `tau` and `acceptance_rate`. Speed is measured
        elsewhere.
    """
    options = {"max_new_tokens": max_new_tokens, "batch": batch}
    plain, _ = _texts(Engine(target, replace(parts, draft=None)), prompts, PLAIN, **options)
    engine, rows = Engine(target, parts), []
    for shape in shapes:
        texts, stats = _texts(engine, prompts, shape, **options)
        exact = compare(target, prompts, plain, other=texts, parts=replace(parts, draft=None))
        rows.append(
            {
                "system": parts.name,
                "shape": list(shape.widths),
                "context_tokens": max(map(len, prompts)),
                "new_tokens": max_new_tokens,
                "batch": batch,
                "exactness": exact.to_json(),
                "tau": stats.tau,
                "acceptance_rate": stats.acceptance_rate,
            }
        )
        told(rows[-1])
    return rows


def _texts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    shape: TreeShape,
    *,
    max_new_tokens: int,
    batch: int,
) -> tuple[list[list[int]], Stats]:
    """Texts of all prompts and their pooled statistics."""
    texts: list[list[int]] = []
    stats: Stats | None = None
    for first in range(0, len(prompts), batch):
        found = engine.generate(
            prompts[first : first + batch], max_new_tokens=max_new_tokens, shape=shape, ignore_eos=True
        )
        texts += found.tokens
        stats = found.stats if stats is None else stats + found.stats
    assert stats is not None
    return texts, stats

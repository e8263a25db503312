"""Milliseconds of the parts of a decoding cycle: draft, attention, linear layers, acceptance, idle time.

The target, the method and the prompts are those of `longtrain bench suite=engine`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.cycles import CycleCounts, phase_columns, ready, split, whole
from longtrain.bench.engine import EngineSettings, cases
from longtrain.bench.suites import Bench, Context, Row
from longtrain.decoding.engine import PLAIN
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import ConfigError
from longtrain.settings import Count, Counts, Lengths

if TYPE_CHECKING:
    from longtrain.decoding.control import ShapeChoice

COLUMNS = {
    "prompt tokens": "prompt_tokens",
    "batch": "batch",
    "shape": "shape",
    "cycle ms": "cycle_ms",
    "idle ms": "idle_ms.median",
    **phase_columns("draft ms", "attention ms", "linear ms", "accept ms", "commit ms"),
}


@dataclass(frozen=True)
class CyclePartsSettings:
    """The keys of the benchmark.

    Args:
        lengths: prompt lengths in tokens.
        batches: batch sizes.
        shape: a published shape with random weights and ids; None: the target, on held-out text.
        cycles: number of timed cycles.
    """

    lengths: Lengths
    batches: Counts = (1,)
    shape: str | None = None
    cycles: Count = 32


def run(settings: CyclePartsSettings, context: Context) -> Iterator[Row]:
    """Measure plain cycles, on the model's and the method's cache, and drafted ones, per length and batch.

    Raises:
        ConfigError: `decode=auto` (several shapes), or a method without a part for an engine.
        DataError: the target has no tokenizer, or there is too little text.
    """
    shape: TreeShape | ShapeChoice = context.drafting()
    if not isinstance(shape, TreeShape):
        raise ConfigError("cycles have parts of one shape; pass decode.shape=[1,1,1,1] or another")
    counts = CycleCounts(settings.cycles, sampling=context.sampling)
    engine = EngineSettings(settings.lengths, settings.batches, settings.shape)
    for target, parts, prompts in cases(engine, context):
        kinds: list[tuple[Parts, TreeShape]] = [(Parts(), PLAIN)]
        if parts is not None and (parts.cache or parts.evictor or parts.selector):
            kinds.append((replace(parts, draft=None), PLAIN))
        if parts is not None and parts.draft is not None:
            kinds.append((parts, shape))
        for some, widths in kinds:
            phases = ready(target, some, prompts, widths, counts)
            about = {"prompt_tokens": len(prompts[0]), "batch": len(prompts), "shape": list(widths.widths)}
            yield {**about, **whole(phases, counts), **split(phases, counts)}


BENCH = Bench(settings=CyclePartsSettings, run=run, columns=COLUMNS)

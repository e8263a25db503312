"""Tokens a second of the engine: plain and speculative, against Hugging Face's loop and the roofline.

All systems decode the same prompts in one process, over the same weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch

from longtrain import methods
from longtrain.artifact import Artifact
from longtrain.bench import clock, steps
from longtrain.bench.cycle_cells import attach
from longtrain.bench.cycle_start import CycleCounts, ready
from longtrain.bench.suites import Bench, Context, Row
from longtrain.costs import roofline
from longtrain.costs.hardware import Gpu
from longtrain.costs.model import Sizes
from longtrain.decoding.engine import PLAIN, Engine, Generation
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import ConfigError, DataError
from longtrain.settings import Count, CountOrZero, Counts, Lengths, within
from longtrain.systems import Entry
from longtrain.systems.system import Named
from longtrain.tables import of_rows
from longtrain.targets.stock import decode_stock

if TYPE_CHECKING:
    from longtrain.decoding.control import ShapeChoice
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

COLUMNS = {
    "prompt tokens": "prompt_tokens",
    "batch": "batch",
    "plain tok/s": "plain.tokens_per_s.median",
    "least ms": "roofline_ms",
    "of roofline": "roofline_share",
    "HF tok/s": "hugging_face.tokens_per_s.median",
    "not captured tok/s": "uncaptured.tokens_per_s.median",
    "draft tok/s": "draft.tokens_per_s.median",
    "speed": "ratio",
    "same cache tok/s": "same_cache.tokens_per_s.median",
    "speed over it": "same_cache_ratio",
    "tau": "draft.tau",
    "same text": "same",
    "prefill s": "plain.prefill_s.median",
    "cache GiB": "plain.cache_gib",
    "draft GiB": "draft.draft_gib",
}
STEP_COLUMNS = {
    "prompt tokens": "prompt_tokens",
    "batch": "batch",
    "shape": "shape",
    "cycle ms": "cycle_ms",
    "idle ms": "idle_ms.median",
    "draft ms": "propose_ms.median",
    "attention ms": "attention_ms.median",
    "linear ms": "linear_ms",
    "accept ms": "accept_ms.median",
    "commit ms": "commit_ms.median",
}


@dataclass(frozen=True)
class EngineSettings:
    """The keys of `suite=engine`.

    Args:
        lengths: prompt tokens.
        batches: prompts decoded together.
        shape: a published shape with random weights and ids; None: the target, on held-out text.
        max_new_tokens: generated tokens a prompt; no token id ends a text.
        baselines: further systems that decode plainly: Hugging Face's loop (greedy), and the engine without
            CUDA graphs.
        cycles: cycles that are taken apart, plainly and with the draft; 0: none.
        warmup: runs not counted.
        repeats: runs counted.
    """

    lengths: Lengths
    batches: Counts = (1,)
    shape: str | None = None
    max_new_tokens: Annotated[int, within(2)] = 128
    baselines: tuple[Literal["hugging_face", "uncaptured"], ...] = ()
    cycles: CountOrZero = 0
    warmup: CountOrZero = 1
    repeats: Count = 5


def run(settings: EngineSettings, context: Context) -> Iterator[Row]:
    """Plain against speculative decoding, one row a length and batch.

    Raises:
        ConfigError: a method that brings nothing to an engine, or that is trained and has a real target.
        DataError: the target has no tokenizer, or there is too little text.
    """
    named = context.artifact and Artifact.load(context.artifact, home=context.home).target.name
    drafting = context.drafting()
    _check_method(settings, context)
    if settings.shape:
        target = context.random_target(settings.shape)
        prompts_of = functools.partial(_random_ids, target.info.vocab_size)
    else:
        assert context.load_target is not None and context.held_out is not None
        target = context.load_target(named or None)
        prompts_of = functools.partial(_stretches, context.held_out(target, None))
    parts = parts_of(context, target)
    for length in settings.lengths:
        for batch in settings.batches:
            prompts = prompts_of(length, batch)
            yield measure(target, parts, prompts, drafting, settings, context.sampling, context.gpu)


def _check_method(settings: EngineSettings, context: Context) -> None:
    """Refuse a method that cannot decode, before the target is loaded."""
    if context.method is None or context.artifact:
        return
    spec = methods.get(str(context.method["name"]))
    if spec.attach is None:
        raise ConfigError(f"method={spec.name} brings nothing to decode with; pass another, or none")
    if spec.objective is not None and not settings.shape:
        raise ConfigError(
            f"method={spec.name} would decode with random weights; pass artifact=NAME, or suite.shape=NAME "
            "to measure random weights"
        )


def parts_of(context: Context, target: Target) -> Parts | None:
    """What decodes beside the target: `artifact=NAME`, or `method=NAME`, with random weights if trained."""
    if context.artifact:
        return Artifact.load(context.artifact, home=context.home).attach(target)
    if context.method is None:
        return None
    options = {key: value for key, value in context.method.items() if key != "name"}
    entry = Entry(method=Named(str(context.method["name"]), options))
    return attach(target, entry=entry, seed=context.seed, load=Artifact.load)


def measure(
    target: Target,
    parts: Parts | None,
    prompts: Sequence[Sequence[int]],
    shape: TreeShape | ShapeChoice,
    settings: EngineSettings,
    sampling: Sampling,
    gpu: Gpu | None = None,
) -> Row:
    """Decode one batch of prompts plainly, by the baselines and, where `parts` brings a draft, with it.

    Parts with a cache or an evictor of their own also decode plainly with those: that, and not the whole
    cache in 16 bits, is whose text the draft must give.

    Args:
        target: the model.
        parts: what is added to it; None: plain decoding alone.
        prompts: token ids of equal length.
        shape: what is drafted, or the shapes to choose among cycle by cycle; then no cycles are taken apart.
        settings: see `EngineSettings`.
        sampling: the same for all systems; Hugging Face's loop is greedy.
        gpu: the data sheet of the device; None: there is none.
    """
    row: Row = {"prompt_tokens": len(prompts[0]), "batch": len(prompts)}

    def timed(engine: Engine, shape: TreeShape | ShapeChoice) -> tuple[Row, Generation]:
        def work() -> Generation:
            return engine.generate(
                prompts,
                max_new_tokens=settings.max_new_tokens,
                sampling=sampling,
                shape=shape,
                ignore_eos=True,
            )

        return _timed(work, settings)

    row["plain"], plain = timed(Engine(target), PLAIN)
    row |= _roofline(target, row, gpu)
    if "uncaptured" in settings.baselines:
        row["uncaptured"], _ = timed(Engine(target, capture=False), PLAIN)
    if "hugging_face" in settings.baselines:
        row["hugging_face"] = _stock(target, prompts, settings)
    taken_apart: list[tuple[Parts, TreeShape]] = [(Parts(), PLAIN)]
    if parts is not None and parts.draft is not None:
        if parts.cache is not None or parts.evictor is not None:
            undrafted = replace(parts, draft=None)
            row["same_cache"], plain = timed(Engine(target, undrafted), PLAIN)
            taken_apart.append((undrafted, PLAIN))
        engine = Engine(target, parts)
        row["draft"], drafted = timed(engine, shape)
        if isinstance(shape, TreeShape):
            taken_apart.append((parts, shape))
        else:
            row["draft"]["costs"] = engine.costs.table()
        row |= _drafted(row, plain, drafted)
    if settings.cycles:
        counts = CycleCounts(settings.cycles, sampling=sampling)
        row["steps"] = [_taken_apart(target, one, prompts, widths, counts) for one, widths in taken_apart]
    return row


def _drafted(row: Row, plain: Generation, drafted: Generation) -> Row:
    """What was drafted and accepted, and how the texts and speeds compare with plain decoding."""
    stats = drafted.stats
    cycles = [{"shape": list(widths), "cycles": count} for widths, count in stats.shapes.items()]
    draft = {**row["draft"], "cycles": cycles, "tau": stats.tau, "acceptance_rate": stats.acceptance_rate}
    same = [a == b for a, b in zip(plain.tokens, drafted.tokens, strict=True)]
    found = {
        "draft": draft,
        "same": sum(same) / len(same),
        "ratio": _speed(row, "draft") / _speed(row, "plain"),
    }
    if "same_cache" in row:
        found["same_cache_ratio"] = _speed(row, "draft") / _speed(row, "same_cache")
    return found


def _taken_apart(
    target: Target, parts: Parts, prompts: Sequence[Sequence[int]], shape: TreeShape, counts: CycleCounts
) -> Row:
    """Milliseconds of a cycle, of its phases, and of the GPU's idle time between cycles."""
    phases = ready(target, parts, prompts, shape, counts)
    about = {"prompt_tokens": len(prompts[0]), "batch": len(prompts), "shape": list(shape.widths)}
    return {**about, **steps.whole(phases, counts), **steps.split(phases, counts)}


def _timed(work: Callable[[], Generation], settings: EngineSettings) -> tuple[Row, Generation]:
    """Speeds of the counted runs, and the last run's output."""
    for _ in range(settings.warmup):
        work()
    runs = [work() for _ in range(settings.repeats)]
    stats = [run.stats for run in runs]
    figures = {
        "tokens_per_s": clock.spread([one.tokens_per_s for one in stats]),
        "prefill_s": clock.spread([one.prefill_s for one in stats]),
        "cache_gib": clock.gib(stats[-1].cache_bytes),
        "draft_gib": clock.gib(stats[-1].draft_bytes),
        "target_forwards": stats[-1].target_forwards,
    }
    return figures, runs[-1]


def _speed(row: Row, system: str) -> float:
    """Tokens a second of one system."""
    return float(row[system]["tokens_per_s"]["median"])


def _stock(target: Target, prompts: Sequence[Sequence[int]], settings: EngineSettings) -> Row:
    """Hugging Face's own loop."""
    runs = [
        decode_stock(target, prompts, max_new_tokens=settings.max_new_tokens)
        for _ in range(settings.warmup + settings.repeats)
    ][settings.warmup :]
    tokens = len(prompts) * (settings.max_new_tokens - 1)
    return {
        "tokens_per_s": clock.spread([tokens / one.decode_s for one in runs]),
        "prefill_s": clock.spread([one.prefill_s for one in runs]),
    }


def _roofline(target: Target, row: Row, gpu: Gpu | None) -> Row:
    """The least time of a plain step on this GPU and its share of the time taken; nothing elsewhere."""
    if gpu is None:
        return {}
    phase = roofline.step(Sizes.of(target.info), batch=row["batch"], context=row["prompt_tokens"])
    least_ms = roofline.figures(phase, gpu)["ms"]
    taken_ms = 1e3 * row["batch"] / _speed(row, "plain")
    return {"gpu": gpu.name, "roofline_ms": least_ms, "roofline_share": least_ms / taken_ms}


def _stretches(ids: Sequence[int], length: int, batch: int) -> list[list[int]]:
    """Stretches of a text, evenly spread.

    Raises:
        DataError: there is too little text for this length.
    """
    if len(ids) < length:
        raise DataError(f"held-out text has {len(ids)} tokens; lengths={length} asks for more")
    step = (len(ids) - length) // max(1, batch - 1) if batch > 1 else 0
    return [list(ids[i * step : i * step + length]) for i in range(batch)]


def _random_ids(vocab_size: int, length: int, batch: int) -> list[list[int]]:
    """Prompts for weights that know no text."""
    coins = torch.Generator().manual_seed(length)
    return torch.randint(vocab_size, (batch, length), generator=coins).tolist()


def report(rows: Sequence[Row], settings: EngineSettings, context: Context) -> str:
    """The table, and one of the cycles that were taken apart."""
    apart: list[Any] = [one for row in rows for one in row.get("steps", [])]
    return "\n\n".join([of_rows(rows, COLUMNS), *([of_rows(apart, STEP_COLUMNS)] if apart else [])])


BENCH = Bench(settings=EngineSettings, run=run, report=report)

"""Tokens a second of the engine: plain and speculative, against Hugging Face's loop and the roofline.

All systems decode the same prompts in one process, over the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from longtrain import methods
from longtrain.bench import clock
from longtrain.bench.cycles import CycleCounts, phase_columns, random_ids, ready, split, whole
from longtrain.bench.suites import Bench, Context, Row
from longtrain.cache.row_sets import ReadBudget
from longtrain.costs import roofline
from longtrain.costs.hardware import Gpu
from longtrain.costs.model import Sizes
from longtrain.decoding.engine import PLAIN, Engine, Generation
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import ConfigError, DataError
from longtrain.settings import Count, CountOrZero, Counts, Lengths, within
from longtrain.systems import parse
from longtrain.tables import of_rows
from longtrain.targets.stock import decode_stock

if TYPE_CHECKING:
    from longtrain.artifact import Artifact
    from longtrain.decoding.control import ShapeChoice
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

Run = TypeVar("Run")

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
    "own cache or rows tok/s": "same_cache.tokens_per_s.median",
    "of plain": "same_cache_of_plain",
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
    **phase_columns("draft ms", "attention ms", "linear ms", "accept ms", "commit ms"),
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
    artifact = context.load(context.artifact) if context.artifact else None
    drafting = context.drafting()
    _check_method(settings, context)
    text: Sequence[int] = ()
    if settings.shape:
        target = context.random_target(settings.shape)
    else:
        assert context.load_target is not None and context.held_out is not None
        target = context.load_target(artifact.target.name if artifact else None)
        text = context.held_out(target, None)
    parts = parts_of(context, target, artifact)
    for length in settings.lengths:
        for batch in settings.batches:
            if settings.shape:
                prompts = random_ids(target.info.vocab_size, batch, length, seed=length)
            else:
                prompts = _stretches(text, length, batch)
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


def parts_of(context: Context, target: Target, artifact: Artifact | None) -> Parts | None:
    """What `artifact=` or `method=` brings, with random weights if it would have to be trained.

    Args:
        context: of the suite.
        target: the model.
        artifact: what was loaded; None: what is measured is the method, or nothing.

    Raises:
        ConfigError: a budget, or a key of `select`, that nothing takes.
    """
    name = artifact.method if artifact else str(context.method["name"]) if context.method else None
    known = methods.get(name).inference_keys if name else ()
    if idle := [key for key in context.reading if key not in known]:
        group = "evict" if idle[0] == "budget_tokens" else "select"
        given = f"{group}.{idle[0]}={context.reading[idle[0]]}"
        raise ConfigError(f"{given} and nothing that takes it; leave it out")
    if artifact is not None:
        return artifact.attach(target, **context.reading)
    if context.method is None:
        return None
    keys = dict(context.reading)
    budget = Budget(keys.pop("budget_tokens", ReadBudget.rows))
    (system, *_) = context.systems(target, parse({"method": context.method, **keys}), budgets=[budget])
    return system.parts


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

    Parts with a cache, an evictor or a selector of their own also decode plainly with those: that, and not
    reading the whole cache in 16 bits, is whose text the draft must give.

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
    most = settings.max_new_tokens

    def timed(engine: Engine, shape: TreeShape | ShapeChoice) -> tuple[Row, Generation]:
        how: Any = {"max_new_tokens": most, "sampling": sampling, "shape": shape, "ignore_eos": True}
        runs = _runs(lambda: engine.generate(prompts, **how), settings)
        stats = runs[-1].stats
        figures = {
            **_speeds([(one.stats.tokens_per_s, one.stats.prefill_s) for one in runs]),
            "cache_gib": clock.gib(stats.cache_bytes),
            "draft_gib": clock.gib(stats.draft_bytes),
            "target_forwards": stats.target_forwards,
        }
        return figures, runs[-1]

    row["plain"], plain = timed(Engine(target), PLAIN)
    row |= _roofline(target, row, gpu)
    if "uncaptured" in settings.baselines:
        row["uncaptured"], _ = timed(Engine(target, capture=False), PLAIN)
    if "hugging_face" in settings.baselines:
        loops = _runs(lambda: decode_stock(target, prompts, max_new_tokens=most), settings)
        tokens = len(prompts) * (most - 1)
        row["hugging_face"] = _speeds([(tokens / one.decode_s, one.prefill_s) for one in loops])
    taken_apart: list[tuple[Parts, TreeShape]] = [(Parts(), PLAIN)]
    if parts is not None and (parts.cache or parts.evictor or parts.selector):
        undrafted = replace(parts, draft=None)
        row["same_cache"], other = timed(Engine(target, undrafted), PLAIN)
        row["same_cache_of_plain"] = _speed(row, "same_cache") / _speed(row, "plain")
        taken_apart.append((undrafted, PLAIN))
        plain = other if parts.draft is not None else plain
    if parts is not None and parts.draft is not None:
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
    return {**about, **whole(phases, counts), **split(phases, counts)}


def _runs(work: Callable[[], Run], settings: EngineSettings) -> list[Run]:
    """What came of the counted runs."""
    return [work() for _ in range(settings.warmup + settings.repeats)][settings.warmup :]


def _speeds(runs: Sequence[tuple[float, float]]) -> Row:
    """Spreads of tokens a second and of the prefill's seconds."""
    tokens_per_s, prefill_s = zip(*runs, strict=True)
    return {"tokens_per_s": clock.spread(tokens_per_s), "prefill_s": clock.spread(prefill_s)}


def _speed(row: Row, system: str) -> float:
    """Tokens a second of one system."""
    return float(row[system]["tokens_per_s"]["median"])


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


def report(rows: Sequence[Row], settings: EngineSettings, context: Context) -> str:
    """The table, and one of the cycles that were taken apart."""
    apart: list[Any] = [one for row in rows for one in row.get("steps", [])]
    return "\n\n".join([of_rows(rows, COLUMNS), *([of_rows(apart, STEP_COLUMNS)] if apart else [])])


BENCH = Bench(settings=EngineSettings, run=run, report=report)

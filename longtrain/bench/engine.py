"""Throughput of the engine, plain and speculative, compared with Hugging Face's loop and the roofline.

All systems decode the same prompts in one process, over the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from longtrain import methods
from longtrain.bench import clock
from longtrain.bench.suites import Bench, Context, Row, random_ids
from longtrain.cache.entry_sets import ReadBudget
from longtrain.costs import roofline
from longtrain.costs.hardware import Gpu
from longtrain.costs.model import Sizes
from longtrain.decoding.engine import PLAIN, Engine, Generation
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import ConfigError, DataError
from longtrain.settings import Count, CountOrZero, Counts, Lengths, within
from longtrain.systems import parse, with_lookup
from longtrain.targets.stock import decode_stock

if TYPE_CHECKING:
    from longtrain.artifact import Artifact
    from longtrain.decoding.control import ShapeChoice
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

Run = TypeVar("Run")

SETTLING = 8
"""Further runs not counted with `decode=auto`, which learns in an engine's first calls."""

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
    "experts read a step": "experts.plain",
    "experts read to verify": "experts.verify",
    "weights read to verify": "experts.weights",
    "same text": "same",
    "prefill s": "plain.prefill_s.median",
    "cache GiB": "plain.cache_gib",
    "draft GiB": "draft.draft_gib",
}


@dataclass(frozen=True)
class EngineSettings:
    """The keys of `suite=engine`.

    Args:
        lengths: prompt lengths in tokens.
        batches: batch sizes.
        shape: a published shape with random weights and ids; None: the target, on held-out text.
        max_new_tokens: tokens generated for each prompt; no token id ends generation.
        baselines: further plain decoders: Hugging Face's loop (greedy), and the engine without CUDA graphs.
        warmup: runs not counted; `decode=auto` has `SETTLING` more.
        repeats: runs counted.
    """

    lengths: Lengths
    batches: Counts = (1,)
    shape: str | None = None
    max_new_tokens: Annotated[int, within(2)] = 128
    baselines: tuple[Literal["hugging_face", "uncaptured"], ...] = ()
    warmup: CountOrZero = 1
    repeats: Count = 5


def run(settings: EngineSettings, context: Context) -> Iterator[Row]:
    """Measure plain and speculative decoding; yields a row for each length and batch size.

    Raises:
        ConfigError: the method has no part for an engine, or needs training and has a real target.
        DataError: the target has no tokenizer, or there is too little text.
    """
    drafting = context.drafting()
    for target, parts, prompts in cases(settings, context):
        yield measure(target, parts, prompts, drafting, settings, context.sampling, context.gpu)


def cases(
    settings: EngineSettings, context: Context
) -> Iterator[tuple[Target, Parts | None, list[list[int]]]]:
    """Yield the target, the method's parts and the prompts, for each length and batch size.

    Raises:
        ConfigError: the method has no part for an engine, or needs training and has a real target.
        DataError: the target has no tokenizer, or there is too little text.
    """
    artifact = context.load(context.artifact) if context.artifact else None
    _check_method(settings, context)
    text: Sequence[int] = ()
    if settings.shape:
        target = context.random_target(settings.shape)
    else:
        assert context.load_target is not None and context.held_out is not None
        target = context.load_target(artifact.target.name if artifact else None)
        text = context.held_out(target, None)
    own = parts_of(context, target, artifact)
    parts = with_lookup(own or Parts(), context.lookup) if own or context.lookup == "only" else None
    for length in settings.lengths:
        for batch in settings.batches:
            if settings.shape:
                prompts = random_ids(target.info.vocab_size, batch, length, seed=length)
            else:
                prompts = _stretches(text, length, batch)
            yield target, parts, prompts


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
    """Return the draft, evictor, cache or selector of `artifact=` or `method=` (with random weights).

    Args:
        context: the suite's context.
        target: the model.
        artifact: the loaded artifact; None: the method is measured, or nothing.

    Raises:
        ConfigError: a budget, or a key of `select`, is given that no part uses.
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
    """Decode one batch of prompts plainly, with the baselines, and with the draft of `parts`, if any.

    If `parts` have a cache, an evictor or a selector, plain decoding is measured with those too, because the
    draft must reproduce that text rather than the text of the full 16-bit cache.

    Args:
        target: the model.
        parts: the method's parts; None: plain decoding only.
        prompts: token ids of equal length.
        shape: the drafted tree, or the shapes to choose among in each cycle.
        settings: see `EngineSettings`.
        sampling: sampling settings of all systems; Hugging Face's loop is greedy.
        gpu: the device's data sheet; None: unknown.
    """
    row: Row = {"prompt_tokens": len(prompts[0]), "batch": len(prompts)}
    most = settings.max_new_tokens

    def timed(engine: Engine, shape: TreeShape | ShapeChoice) -> tuple[Row, Generation]:
        how: Any = {"max_new_tokens": most, "sampling": sampling, "shape": shape, "ignore_eos": True}
        for _ in range(0 if isinstance(shape, TreeShape) else SETTLING):
            engine.generate(prompts, **how)
        runs = _runs(lambda: engine.generate(prompts, **how), settings)
        stats = runs[-1].stats
        metrics = {
            **_speeds([(one.stats.tokens_per_s, one.stats.prefill_s) for one in runs]),
            "cache_gib": clock.gib(stats.cache_bytes),
            "draft_gib": clock.gib(stats.draft_bytes),
            "target_forwards": stats.target_forwards,
        }
        return metrics, runs[-1]

    row["plain"], plain = timed(Engine(target), PLAIN)
    row |= _roofline(target, row, gpu)
    if "uncaptured" in settings.baselines:
        row["uncaptured"], _ = timed(Engine(target, capture=False), PLAIN)
    if "hugging_face" in settings.baselines:
        loops = _runs(lambda: decode_stock(target, prompts, max_new_tokens=most), settings)
        tokens = len(prompts) * (most - 1)
        row["hugging_face"] = _speeds([(tokens / one.decode_s, one.prefill_s) for one in loops])
    if parts is not None and (parts.cache or parts.evictor or parts.selector):
        row["same_cache"], other = timed(Engine(target, replace(parts, draft=None)), PLAIN)
        row["same_cache_of_plain"] = _speed(row, "same_cache") / _speed(row, "plain")
        plain = other if parts.draft is not None else plain
    if parts is not None and parts.draft is not None:
        engine = Engine(target, parts)
        row["draft"], drafted = timed(engine, shape)
        if not isinstance(shape, TreeShape):
            row["draft"]["costs"] = engine.costs.table()
        else:
            row |= _experts(target, len(prompts), shape)
        row |= _drafted(row, plain, drafted)
    return row


def _drafted(row: Row, plain: Generation, drafted: Generation) -> Row:
    """Return metrics of a drafted generation, compared with plain decoding in text and speed."""
    stats = drafted.stats
    cycles = [{"shape": list(widths), "cycles": count} for widths, count in stats.shapes.items()]
    draft = {**row["draft"], "cycles": cycles, "tau": stats.tau, "acceptance_rate": stats.acceptance_rate}
    if stats.copied_share > 0:
        draft["copied_share"] = stats.copied_share
    same = [a == b for a, b in zip(plain.tokens, drafted.tokens, strict=True)]
    found = {
        "draft": draft,
        "same": sum(same) / len(same),
        "ratio": _speed(row, "draft") / _speed(row, "plain"),
    }
    if "same_cache" in row:
        found["same_cache_ratio"] = _speed(row, "draft") / _speed(row, "same_cache")
    return found


def _runs(work: Callable[[], Run], settings: EngineSettings) -> list[Run]:
    """Return the results of the counted runs."""
    return [work() for _ in range(settings.warmup + settings.repeats)][settings.warmup :]


def _speeds(runs: Sequence[tuple[float, float]]) -> Row:
    """Return spreads of tokens per second and of the prefill's seconds."""
    tokens_per_s, prefill_s = zip(*runs, strict=True)
    return {"tokens_per_s": clock.spread(tokens_per_s), "prefill_s": clock.spread(prefill_s)}


def _speed(row: Row, system: str) -> float:
    """Return the tokens per second of one system."""
    return float(row[system]["tokens_per_s"]["median"])


def _roofline(target: Target, row: Row, gpu: Gpu | None) -> Row:
    """Return a plain step's roofline time and its share of the measured time; nothing on other devices."""
    if gpu is None:
        return {}
    phase = roofline.step(Sizes.of(target.info), batch=row["batch"], context=row["prompt_tokens"])
    least_ms = roofline.metrics(phase, gpu)["ms"]
    taken_ms = 1e3 * row["batch"] / _speed(row, "plain")
    return {"gpu": gpu.name, "roofline_ms": least_ms, "roofline_share": least_ms / taken_ms}


def _experts(target: Target, batch: int, shape: TreeShape) -> Row:
    """Return the distinct experts of a layer that a plain step and verification read (expected), and the
    weights that verification reads as a multiple of the plain step's; nothing without experts.
    """
    size = Sizes.of(target.info)
    if size.experts is None:
        return {}
    tokens = batch * shape.n_nodes
    return {
        "experts": {
            "plain": size.experts.read(batch),
            "verify": size.experts.read(tokens),
            "weights": (size.read(tokens) + size.head) / (size.read(batch) + size.head),
        }
    }


def _stretches(ids: Sequence[int], length: int, batch: int) -> list[list[int]]:
    """Return evenly spread excerpts of a text."""
    if len(ids) < length:
        raise DataError(f"held-out text has {len(ids)} tokens; lengths={length} asks for more")
    step = (len(ids) - length) // max(1, batch - 1) if batch > 1 else 0
    return [list(ids[i * step : i * step + length]) for i in range(batch)]


BENCH = Bench(settings=EngineSettings, run=run, columns=COLUMNS)

"""Tokens a second with a draft and without one: the same engine, prompts and process, one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from longtrain.decoding.engine import Engine
from longtrain.decoding.limits import Limits
from longtrain.decoding.sampling import Sampling
from longtrain.decoding.stats import Stats
from longtrain.evaluation.harness.answers import DecodingRequest, sequence_id
from longtrain.evaluation.harness.plan import groups
from longtrain.evaluation.harness.protocol import prompt_room
from longtrain.evaluation.prompts import Encoded
from longtrain.evaluation.suite import Advance, Suite
from longtrain.evaluation.task import Example, Task
from longtrain.systems import System

if TYPE_CHECKING:
    from longtrain.targets.model import Target

WARMUP_TOKENS = 16


@dataclass(frozen=True)
class TimedBatch:
    """Prompts that are timed together.

    Args:
        prompts: as they are given to the engine.
        request: of each.
        sequence_ids: what random coins know them by; None numbers them.
    """

    prompts: list[Encoded]
    request: DecodingRequest
    sequence_ids: tuple[int, ...] | None = None


def speed_rows(
    target: Target,
    systems: Sequence[System],
    suite: Suite,
    *,
    sampling: Sampling,
    prompts: int = 3,
    batch: int = 1,
    tokens: int | None = None,
    advance: Advance = lambda what, done: None,
) -> dict[str, Any]:
    """Time the systems of a suite on its first prompts, in turn on each batch.

    Args:
        target: the frozen model.
        systems: the full cache first: it is what the ratios are to.
        suite: its tasks that generate are timed; where prompts have stated lengths, each length.
        sampling: of the run.
        prompts: how many of each task or length are timed, after one short run that is not counted.
        batch: prompts decoded together.
        tokens: of each answer, where a task has longer ones; 1 times the first token alone.
        advance: told of progress.

    Returns:
        `device`, and one row a task or length: `task`, `length` (or None), `prompts`, `batch`,
        `max_new_tokens` and `figures` by system.
    """
    rows, timed = [], timed_systems(systems, tokens=tokens)
    for task in suite.tasks:
        if not isinstance(task, Task):
            continue
        for length, some in _first(task, prompts).items():
            batches = list(_batches(task, some, target, sampling=sampling, batch=batch, tokens=tokens))
            what = task.name if length is None else f"{task.name} @ {length}"
            figures = time_systems(target, timed, batches, what=what, advance=advance)
            about = {"task": task.name, "length": length, "prompts": len(some), "batch": batch}
            rows.append({**about, "max_new_tokens": batches[0].request.max_new_tokens, "figures": figures})
    return {"device": str(target.device), "rows": rows}


def speed_steps(systems: Sequence[System], suite: Suite, *, prompts: int, tokens: int | None = None) -> int:
    """How often `speed_rows` tells of a prompt done."""
    tasks = [task for task in suite.tasks if isinstance(task, Task)]
    each = sum(len(some) for task in tasks for some in _first(task, prompts).values())
    return len(timed_systems(systems, tokens=tokens)) * each


def timed_systems(systems: Sequence[System], *, tokens: int | None) -> list[System]:
    """The systems that are timed: where answers are cut to so many tokens, each at its first budget alone."""
    some = [system for system in systems if system.timed]
    return some if tokens is None else [group[0] for group in groups(some)]


def time_systems(
    target: Target,
    systems: Sequence[System],
    batches: Sequence[TimedBatch],
    *,
    what: str = "",
    advance: Advance = lambda what, done: None,
) -> dict[str, dict[str, Any]]:
    """Time systems in turn on each batch, after one short run of each that is not counted.

    Args:
        target: the frozen model.
        systems: the first is what the ratios are to.
        batches: what is decoded together.
        what: they are called when `advance` is told of prompts done.
        advance: told of progress.

    Returns:
        Figures by name.
    """
    for system in systems:
        _timed(target, system, replace(batches[0], request=batches[0].request.shortened(WARMUP_TOKENS)))
    stats: dict[str, list[Stats]] = {system.name: [] for system in systems}
    peak = dict.fromkeys(stats, 0)
    for some in batches:
        for system in systems:
            found, held = _timed(target, system, some)
            stats[system.name].append(found)
            peak[system.name] = max(peak[system.name], held)
            advance(f"speed of {system.name} @ {what}", len(some.prompts))
    plain = stats[systems[0].name]
    return {name: _figures(mine, plain, peak=peak[name]) for name, mine in stats.items()}


def _first(task: Task, prompts: int) -> dict[int | None, list[Example]]:
    """The first examples of a task, or of each of its stated prompt lengths."""
    by_length: dict[int | None, list[Example]] = {}
    for example in task.examples():
        length = int(task.facets(example)["length"]) if "lengths" in task.protocol else None
        some = by_length.setdefault(length, [])
        if len(some) < prompts:
            some.append(example)
    return by_length


def _batches(
    task: Task,
    some: Sequence[Example],
    target: Target,
    *,
    sampling: Sampling,
    batch: int,
    tokens: int | None,
) -> Iterator[TimedBatch]:
    """Examples as they are decoded in the suite: those of one temperature together."""
    tokenizer, room = target.require_tokenizer(), prompt_room(task, target)
    for heat in dict.fromkeys(task.temperature(example) for example in some):
        alike = [example for example in some if task.temperature(example) == heat]
        for first in range(0, len(alike), batch):
            mine = alike[first : first + batch]
            prompts = [task.encode(one, tokenizer, max_tokens=room) for one in mine]
            request = DecodingRequest.of(task, target, sampling, temperature=heat)
            request = request if tokens is None else request.shortened(tokens)
            yield TimedBatch(prompts, request, tuple(sequence_id((task.name, one.id)) for one in mine))


def _figures(mine: Sequence[Stats], full: Sequence[Stats], *, peak: int) -> dict[str, Any]:
    """Figures over all batches, which `full` ran in turn with `mine`; first tokens by batch."""
    one, plain = sum(mine, Stats()), sum(full, Stats())
    ours, theirs = one.end_to_end_tokens_per_s, plain.end_to_end_tokens_per_s
    overheads = [a.prefill_s - b.prefill_s for a, b in zip(mine, full, strict=True)]
    return {
        "tokens_per_s": _known(one.tokens_per_s),
        "end_to_end_tokens_per_s": _known(ours),
        "ratio": _over(one.tokens_per_s, plain.tokens_per_s),
        "end_to_end_ratio": _over(ours, theirs),
        "ms_per_cycle": 1e3 * one.decode_s / max(1, one.target_forwards - len(mine)),
        "prefill_s": one.prefill_s,
        "decode_s": one.decode_s,
        "first_token_s": median(stats.prefill_s for stats in mine),
        "first_token_overhead_s": median(overheads),
        "first_token_overhead": median(overheads) / median(stats.prefill_s for stats in full),
        "tokens": one.decode_tokens,
        "cache_bytes": one.cache_bytes,
        "draft_bytes": one.draft_bytes,
        "peak_device_bytes": peak or None,
    }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _over(a: float, b: float) -> float | None:
    """A ratio; None where texts were over at their first token."""
    return _known(a / b) if b else None


def _timed(target: Target, system: System, some: TimedBatch) -> tuple[Stats, int]:
    """Stats of one call, and the most device memory held during it."""
    on_gpu = target.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(target.device)
        torch.cuda.reset_peak_memory_stats(target.device)
    longest = max(len(prompt.ids) + len(prompt.after) for prompt in some.prompts)
    limits = Limits(len(some.prompts), longest + some.request.max_new_tokens, system.shape.n_nodes)
    engine = Engine(target, system.parts, limits=limits)
    generation = some.request.decode(engine, some.prompts, shape=system.shape, sequence_ids=some.sequence_ids)
    return generation.stats, torch.cuda.max_memory_allocated(target.device) if on_gpu else 0

"""Times decoding with a draft and without one: the same engine, prompts and process, one after the other."""

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

Json = dict[str, Any]
WARMUP_TOKENS = 16


@dataclass(frozen=True)
class TimedBatch:
    """Prompts that are timed together.

    Args:
        prompts: the encoded prompts given to the engine.
        request: the decoding request of each prompt.
        sequence_ids: keys of the prompts' random numbers.
    """

    prompts: list[Encoded]
    request: DecodingRequest
    sequence_ids: tuple[int, ...]


@dataclass(frozen=True)
class SpeedTest:
    """Times the systems of a suite on its first prompts, alternating between systems on each batch.

    Args:
        target: the frozen model.
        systems: the systems, the full cache first: ratios are relative to it.
        suite: its generating tasks are timed; if prompts have stated lengths, each length separately.
        sampling: the run's sampling settings.
        prompts: number of timed prompts for each task or length, after one short warm-up run.
        batch: number of prompts decoded together.
        tokens: limit for each answer; 1 times the first token only, in which case each system is
            timed at its first budget only.
    """

    target: Target
    systems: Sequence[System]
    suite: Suite
    sampling: Sampling
    prompts: int = 3
    batch: int = 1
    tokens: int | None = None

    @property
    def timed(self) -> list[System]:
        """The systems that are timed."""
        some = [system for system in self.systems if system.timed]
        return some if self.tokens is None else [group[0] for group in groups(some)]

    @property
    def steps(self) -> int:
        """The number of prompts whose completion `rows` reports."""
        return len(self.timed) * sum(len(some) for _, _, some in self._places())

    def rows(self, advance: Advance = lambda what, done: None) -> list[Json]:
        """Time the systems.

        Args:
            advance: called with progress.

        Returns:
            One mapping per task or length: `task`, `length` (or None), `prompts`, `batch`, `max_new_tokens`
                and
            `metrics` by system.
        """
        found = []
        for task, length, some in self._places():
            batches = list(self._batches(task, some))
            what = task.name if task.name == str(length) or length is None else f"{task.name} @ {length}"
            metrics = self._metrics(batches, what, advance)
            about = {"task": task.name, "length": length, "prompts": len(some), "batch": self.batch}
            found.append({**about, "max_new_tokens": batches[0].request.max_new_tokens, "metrics": metrics})
        return found

    def _places(self) -> list[tuple[Task, int | None, list[Example]]]:
        """The first examples of each task, or of each of its stated prompt lengths."""
        found = []
        for task in self.suite.tasks:
            if not isinstance(task, Task):
                continue
            by_length: dict[int | None, list[Example]] = {}
            for example in task.examples():
                length = int(task.facets(example)["length"]) if "lengths" in task.protocol else None
                by_length.setdefault(length, []).append(example)
            found += [(task, length, some[: self.prompts]) for length, some in by_length.items()]
        return found

    def _batches(self, task: Task, some: Sequence[Example]) -> Iterator[TimedBatch]:
        """Divide examples into batches, encoded as the suite does."""
        tokenizer, room = self.target.require_tokenizer(), prompt_room(task, self.target)
        request = DecodingRequest.of(task, self.target, self.sampling)
        request = request if self.tokens is None else request.shortened(self.tokens)
        for first in range(0, len(some), self.batch):
            mine = some[first : first + self.batch]
            prompts = [task.encode(one, tokenizer, max_tokens=room) for one in mine]
            yield TimedBatch(prompts, request, tuple(sequence_id((task.name, one.id)) for one in mine))

    def _metrics(self, batches: Sequence[TimedBatch], what: str, advance: Advance) -> dict[str, Json]:
        """Metrics by system, after one short warm-up run of each."""
        systems = self.timed
        for system in systems:
            short = replace(batches[0], request=batches[0].request.shortened(WARMUP_TOKENS))
            self._run(system, short)
        stats: dict[str, list[Stats]] = {system.name: [] for system in systems}
        peak = dict.fromkeys(stats, 0)
        for some in batches:
            for system in systems:
                found, held = self._run(system, some)
                stats[system.name].append(found)
                peak[system.name] = max(peak[system.name], held)
                advance(f"speed of {system.name} @ {what}", len(some.prompts))
        plain = stats[systems[0].name]
        return {name: _metrics(mine, plain, peak=peak[name]) for name, mine in stats.items()}

    def _run(self, system: System, some: TimedBatch) -> tuple[Stats, int]:
        """Decode one batch; returns its stats and the peak device memory in bytes."""
        device = self.target.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        longest = max(len(prompt.ids) + len(prompt.after) for prompt in some.prompts)
        limits = Limits(len(some.prompts), longest + some.request.max_new_tokens, system.shape.n_nodes)
        engine = Engine(self.target, system.parts, limits=limits)
        made = some.request.decode(engine, some.prompts, shape=system.shape, sequence_ids=some.sequence_ids)
        return made.stats, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _metrics(mine: Sequence[Stats], full: Sequence[Stats], *, peak: int) -> Json:
    """Metrics over all batches, which `full` ran alternately with `mine`; some of them by batch."""
    one, plain = sum(mine, Stats()), sum(full, Stats())
    ours, theirs = one.end_to_end_tokens_per_s, plain.end_to_end_tokens_per_s
    each = [_over(a.tokens_per_s, b.tokens_per_s) for a, b in zip(mine, full, strict=True)]
    ratios = [ratio for ratio in each if ratio is not None]
    overheads = [a.prefill_s - b.prefill_s for a, b in zip(mine, full, strict=True)]
    return {
        "tokens_per_s": _known(one.tokens_per_s),
        "end_to_end_tokens_per_s": _known(ours),
        "ratio": _over(one.tokens_per_s, plain.tokens_per_s),
        "ratio_range": [min(ratios), max(ratios)] if ratios else None,
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
    """A ratio, or None if sequences ended at their first token."""
    return _known(a / b) if b else None

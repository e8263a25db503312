"""Times decoding with each system: the same engine, prompts and process, one after the other, by batch."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from longtrain.decoding.averages import Costs
from longtrain.decoding.engine import Engine
from longtrain.decoding.limits import Limits
from longtrain.decoding.sampling import Sampling
from longtrain.decoding.stats import Stats
from longtrain.evaluation.harness.answers import OUT_OF_MEMORY, DecodingRequest
from longtrain.evaluation.harness.plan import groups
from longtrain.evaluation.harness.protocol import prompt_room
from longtrain.evaluation.prompts import Encoded
from longtrain.evaluation.suite import Advance, Suite
from longtrain.evaluation.task import Example, Task, sequence_id
from longtrain.log import get_logger
from longtrain.systems import System

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)

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
        prompts: number of timed prompts for each task or length, after one short warm-up run; rounded up to
            whole batches, so that a task with fewer prompts has some of them several times.
        batches: numbers of prompts decoded together, each timed in turn.
        tokens: tokens of each answer, whatever ends it, up to the task's own limit; None: answers as long as
            the suite's. 1 times the first token only, in which case each system is timed at its first budget
            only.
    """

    target: Target
    systems: Sequence[System]
    suite: Suite
    sampling: Sampling
    prompts: int = 3
    batches: Sequence[int] = (1,)
    tokens: int | None = None
    _costs: dict[str, Costs] = field(default_factory=dict, init=False, repr=False)
    """What each system has learned: each batch has an engine of its own."""

    @property
    def timed(self) -> list[System]:
        """The systems that are timed."""
        some = [system for system in self.systems if system.timed]
        return [group[0] for group in groups(some)] if self.tokens == 1 else some

    @property
    def steps(self) -> int:
        """The number of prompts whose completion `rows` reports."""
        counts = (len(self._filled(some, batch)) for _, _, some in self._places() for batch in self.batches)
        return len(self.timed) * sum(counts)

    def rows(self, advance: Advance = lambda what, done: None) -> list[Json]:
        """Time the systems.

        Args:
            advance: called with progress.

        Returns:
            One mapping per task or length and batch: `task`, `length` (or None), `prompts`, `batch`,
            `max_new_tokens` and `metrics` by system; of a system whose memory ran out only `failed`.
        """
        found = []
        for task, length, some in self._places():
            what = task.name if task.name == str(length) or length is None else f"{task.name} @ {length}"
            for batch in self.batches:
                timed = list(self._batches(task, self._filled(some, batch), batch))
                metrics = self._metrics(
                    timed, f"{what} x {batch}" if len(self.batches) > 1 else what, advance
                )
                count = min(len(some), len(self._filled(some, batch)))
                about = {"task": task.name, "length": length, "prompts": count, "batch": batch}
                most = timed[0].request.max_new_tokens
                found.append({**about, "max_new_tokens": most, "metrics": metrics})
        return found

    def _filled(self, some: Sequence[Example], batch: int) -> list[tuple[Example, int]]:
        """The examples timed at a batch, each with the number of its earlier occurrences; the last batch is
        filled with the first examples, since a smaller one would be another measurement.
        """
        count = batch * math.ceil(min(self.prompts, len(some)) / batch)
        return [(one, place // len(some)) for place, one in enumerate(islice(cycle(some), count))]

    def _places(self) -> list[tuple[Task, int | None, list[Example]]]:
        """The first examples of each task, or of each of its stated prompt lengths."""
        found, most = [], max(batch * math.ceil(self.prompts / batch) for batch in self.batches)
        for task in (one.generating for one in self.suite.tasks):
            if task is None:
                continue
            by_length: dict[int | None, list[Example]] = {}
            for example in task.examples():
                length = int(task.facets(example)["length"]) if "lengths" in task.protocol else None
                by_length.setdefault(length, []).append(example)
            found += [(task, length, some[:most]) for length, some in by_length.items()]
        return found

    def _batches(self, task: Task, some: Sequence[tuple[Example, int]], batch: int) -> Iterator[TimedBatch]:
        """Divide examples into batches, encoded as the suite does."""
        tokenizer, room = self.target.require_tokenizer(), prompt_room(task, self.target)
        request = DecodingRequest.of(task, self.target, self.sampling)
        if self.tokens is not None:
            request = replace(request.shortened(self.tokens), ignore_eos=True, stop=())
        for first in range(0, len(some), batch):
            mine = some[first : first + batch]
            prompts = [task.encode(one, tokenizer, max_tokens=room) for one, _ in mine]
            names = (f"{one.id}#{again}" if again else one.id for one, again in mine)
            yield TimedBatch(prompts, request, tuple(sequence_id((task.name, name)) for name in names))

    def _metrics(self, batches: Sequence[TimedBatch], what: str, advance: Advance) -> dict[str, Json]:
        """Metrics by system, after one short warm-up run of each, and one of plain decoding on every batch.

        The first run on prompts of a new length takes longer whatever the system, and plain decoding is timed
        first.
        """
        short = replace(batches[0], request=batches[0].request.shortened(WARMUP_TOKENS))
        fits = [system for system in self.timed if self._tried(system, short, what) is not None]
        stats: dict[str, list[Stats]] = {system.name: [] for system in self.timed}
        peak = dict.fromkeys(stats, 0)
        for number, some in enumerate(batches):
            if number and self.timed[0] in fits:
                short = replace(some, request=some.request.shortened(WARMUP_TOKENS))
                self._tried(self.timed[0], short, what)
            for system in self.timed:
                found = self._tried(system, some, what) if system in fits else None
                if found is None:
                    fits = [other for other in fits if other is not system]
                else:
                    stats[system.name].append(found[0])
                    peak[system.name] = max(peak[system.name], found[1])
                advance(f"speed of {system.name} @ {what}", len(some.prompts))
        known = {system.name for system in fits}
        first = self.timed[0].name
        plain = stats[first] if first in known else None
        return {
            name: _metrics(mine, plain, peak=peak[name]) if name in known else {"failed": OUT_OF_MEMORY}
            for name, mine in stats.items()
        }

    def _tried(self, system: System, some: TimedBatch, what: str) -> tuple[Stats, int] | None:
        """The result of `_run`, or None if memory ran out, which a large batch may be timed to find out."""
        try:
            return self._run(system, some)
        except torch.OutOfMemoryError:
            pass  # the error references the frames and their tensors until here
        log.warning("memory ran out: speed of %s @ %s", system.name, what)
        gc.collect()
        if self.target.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _run(self, system: System, some: TimedBatch) -> tuple[Stats, int]:
        """Decode one batch; returns its stats and the peak device memory in bytes."""
        device = self.target.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        longest = max(len(prompt.ids) + len(prompt.after) for prompt in some.prompts)
        limits = Limits(len(some.prompts), longest + some.request.max_new_tokens, system.nodes)
        engine = Engine(self.target, system.parts, limits=limits)
        engine.costs = self._costs.setdefault(system.name, engine.costs)
        made = some.request.decode(engine, some.prompts, shape=system.shape, sequence_ids=some.sequence_ids)
        return made.stats, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _metrics(mine: Sequence[Stats], full: Sequence[Stats] | None, *, peak: int) -> Json:
    """Metrics over all batches, which `full` ran alternately with `mine`; some of them by batch.

    Without `full`, whose memory ran out, there are no ratios to it.
    """
    one, plain = sum(mine, Stats()), sum(full or (), Stats())
    ours, theirs = one.end_to_end_tokens_per_s, plain.end_to_end_tokens_per_s
    pairs = list(zip(mine, full, strict=True)) if full else []
    each = [_over(a.tokens_per_s, b.tokens_per_s) for a, b in pairs]
    ratios = [ratio for ratio in each if ratio is not None]
    overhead = median(a.prefill_s - b.prefill_s for a, b in pairs) if pairs else None
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
        "first_token_overhead_s": overhead,
        "first_token_overhead": overhead and overhead / median(b.prefill_s for _, b in pairs),
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

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

Json = dict[str, Any]
WARMUP_TOKENS = 16


@dataclass(frozen=True)
class TimedBatch:
    """Prompts that are timed together.

    Args:
        prompts: as they are given to the engine.
        request: of each.
        sequence_ids: what random coins know them by.
    """

    prompts: list[Encoded]
    request: DecodingRequest
    sequence_ids: tuple[int, ...]


@dataclass(frozen=True)
class SpeedTest:
    """Times the systems of a suite on its first prompts, in turn on each batch.

    Args:
        target: the frozen model.
        systems: the full cache first: it is what the ratios are to.
        suite: its tasks that generate are timed; where prompts have stated lengths, each length.
        sampling: of the run.
        prompts: how many of each task or length are timed, after one short run that is not counted.
        batch: prompts decoded together.
        tokens: of each answer, where a task has longer ones; 1 times the first token alone. Each system is
            then timed at its first budget alone.
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
        """How often `rows` tells of a prompt done."""
        return len(self.timed) * sum(len(some) for _, _, some in self._places())

    def rows(self, advance: Advance = lambda what, done: None) -> list[Json]:
        """Time them.

        Args:
            advance: told of progress.

        Returns:
            One mapping a task or length: `task`, `length` (or None), `prompts`, `batch`, `max_new_tokens` and
            `figures` by system.
        """
        found = []
        for task, length, some in self._places():
            batches = list(self._batches(task, some))
            what = task.name if task.name == str(length) or length is None else f"{task.name} @ {length}"
            figures = self._figures(batches, what, advance)
            about = {"task": task.name, "length": length, "prompts": len(some), "batch": self.batch}
            found.append({**about, "max_new_tokens": batches[0].request.max_new_tokens, "figures": figures})
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
        """Examples as they are decoded in the suite: those of one temperature together."""
        tokenizer, room = self.target.require_tokenizer(), prompt_room(task, self.target)
        for heat in dict.fromkeys(task.temperature(example) for example in some):
            alike = [example for example in some if task.temperature(example) == heat]
            request = DecodingRequest.of(task, self.target, self.sampling, temperature=heat)
            request = request if self.tokens is None else request.shortened(self.tokens)
            for first in range(0, len(alike), self.batch):
                mine = alike[first : first + self.batch]
                prompts = [task.encode(one, tokenizer, max_tokens=room) for one in mine]
                yield TimedBatch(prompts, request, tuple(sequence_id((task.name, one.id)) for one in mine))

    def _figures(self, batches: Sequence[TimedBatch], what: str, advance: Advance) -> dict[str, Json]:
        """Figures by system, after one short run of each that is not counted."""
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
        return {name: _figures(mine, plain, peak=peak[name]) for name, mine in stats.items()}

    def _run(self, system: System, some: TimedBatch) -> tuple[Stats, int]:
        """Stats of one call, and the most device memory held during it."""
        device = self.target.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        longest = max(len(prompt.ids) + len(prompt.after) for prompt in some.prompts)
        limits = Limits(len(some.prompts), longest + some.request.max_new_tokens, system.shape.n_nodes)
        engine = Engine(self.target, system.parts, limits=limits)
        made = some.request.decode(engine, some.prompts, shape=system.shape, sequence_ids=some.sequence_ids)
        return made.stats, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _figures(mine: Sequence[Stats], full: Sequence[Stats], *, peak: int) -> Json:
    """Figures over all batches, which `full` ran in turn with `mine`; some of them by batch."""
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
    """A ratio; None where texts were over at their first token."""
    return _known(a / b) if b else None

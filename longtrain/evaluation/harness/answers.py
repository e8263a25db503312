"""Runs a batch of examples with one system: prompts in, records out.

Shapes: L layers, B batch, G KV heads, S prompt tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from longtrain.decoding.control import ShapeChoice
from longtrain.decoding.engine import Engine, Generation
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.errors import DataError
from longtrain.evaluation.harness.plan import Unit
from longtrain.evaluation.harness.protocol import prompt_room
from longtrain.evaluation.harness.shared import BatchScores, SharingEvictor
from longtrain.evaluation.prompts import Encoded
from longtrain.evaluation.records import Record, Turn, ids_sha256
from longtrain.evaluation.task import Example, Measured, Task
from longtrain.systems import System

if TYPE_CHECKING:
    from longtrain.targets.model import Target

Json = dict[str, Any]
OUT_OF_MEMORY = "out of memory"
TIMES = ("prefill_s", "decode_s", "target_forwards", "cache_bytes", "draft_bytes")
"""Keys of the engine's statistics that are recorded for a unit."""


@runtime_checkable
class TakesAnswers(Protocol):
    """An evictor that may read the question that follows eviction, and the expected answer (an oracle)."""

    def tell(self, questions: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        """Receive the tokens read after each of the next prompts, and the tokens of each expected answer."""


@dataclass(frozen=True)
class DecodingRequest:
    """The engine's arguments for prompts that are decoded together.

    Args:
        max_new_tokens: tokens to generate.
        sampling: temperature, top-p, top-k and seed.
        ignore_eos: continue past the end-of-text token.
        min_new_tokens: number of tokens that must precede an end token.
        stop_ids: tokens that end an answer; None: the target's own.
        stop: strings that end an answer.
    """

    max_new_tokens: int
    sampling: Sampling
    ignore_eos: bool = False
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()

    @classmethod
    def of(cls, task: Task, target: Target, sampling: Sampling) -> DecodingRequest:
        """The request by which a task's examples are decoded.

        Args:
            task: the task of the examples.
            target: the frozen model.
            sampling: the run's settings; a task may have its own temperature.
        """
        return cls(
            task.max_new_tokens,
            task.sampling(sampling),
            task.ignore_eos,
            task.min_new_tokens,
            (*target.info.eos_ids, *task.stop_ids(target.require_tokenizer())),
            task.stop_strings,
        )

    def shortened(self, max_new_tokens: int) -> DecodingRequest:
        """A copy with at most `max_new_tokens` new tokens."""
        most = min(max_new_tokens, self.max_new_tokens)
        return replace(self, max_new_tokens=most, min_new_tokens=min(most, self.min_new_tokens))

    def decode(
        self,
        engine: Engine,
        prompts: Sequence[Encoded],
        *,
        shape: TreeShape | ShapeChoice,
        sequence_ids: Sequence[int] | None = None,
    ) -> Generation:
        """Decode the prompts with an engine."""
        after = [list(prompt.after) for prompt in prompts] if any(one.after for one in prompts) else None
        ids = [list(prompt.ids) for prompt in prompts]
        return engine.generate(ids, shape=shape, sequence_ids=sequence_ids, after=after, **vars(self))


class Answerer:
    """Runs the systems of a group; their engines keep buffers and CUDA graphs from unit to unit.

    Args:
        target: the frozen model.
        sampling: the run's settings; a task may have its own temperature.
        group: the systems; several systems differ only in their budget, so that a batch is
            scored once for all, and tasks compare the scores of the first.
    """

    def __init__(self, target: Target, sampling: Sampling, group: Sequence[System]) -> None:
        self.target, self.sampling, self.first = target, sampling, group[0].name
        self._scores = BatchScores(reuse=len(group) > 1)
        self._engines: dict[str, Engine] = {}

    def free(self) -> None:
        """Release the memory of all engines and scores."""
        self._engines.clear()
        self._scores = BatchScores(reuse=self._scores.reuse)

    def measured(self, system: System, task: Measured, examples: Sequence[Example]) -> list[Record]:
        """Run a measured task, which evaluates the target on given text without generating.

        Args:
            system: the system to measure.
            task: the task of the examples.
            examples: examples that fit into memory together.
        """
        parts = system.parts
        if task.one_prefill:
            self._scores.expect([task.name, *(one.id for one in examples)])
            parts = self._sharing(parts)
        found = task.measure(self.target, parts, examples)
        for one, metrics in zip(examples, found, strict=True):
            for name, value in metrics.items():
                if not math.isfinite(value):
                    dtype = str(self.target.dtype).removeprefix("torch.")
                    raise DataError(
                        f"task {task.name}, example {one.id}, system {system.name}: {name}={value}; numbers "
                        f"overflowed in {dtype}; pass target.dtype=float32 (or bfloat16 in place "
                        "of float16), or leave out this system; finished examples are kept"
                    )
        return [
            Record(
                system.name,
                task.name,
                one.id,
                task.facets(one),
                score=task.score(metrics, one),
                measures=metrics,
            )
            for one, metrics in zip(examples, found, strict=True)
        ]

    def generated(self, system: System, task: Task, unit: Unit) -> tuple[list[Record], Json]:
        """Generate answers to the examples of a unit; returns their records and the unit's costs."""
        tokenizer, examples = self.target.require_tokenizer(), unit.examples
        room = prompt_room(task, self.target)
        prompts = [task.encode(one, tokenizer, max_tokens=room) for one in examples]
        made = self._decode(system, task, unit, prompts)
        ranks = self._ranks(system, task, examples, prompts)
        records = []
        for i, (example, prompt, turn) in enumerate(
            zip(examples, prompts, self._turns(made, prompts), strict=True)
        ):
            measures = {name: float(value) for name, value in task.measures(turn.text, example).items()}
            records.append(
                Record(
                    system.name,
                    task.name,
                    example.id,
                    task.facets(example),
                    prompt_tokens=len(prompt.ids),
                    prompt_sha256=ids_sha256([*prompt.ids, *prompt.after]),
                    cut=prompt.cut,
                    turns=(turn,),
                    score=task.score(turn.text, example),
                    measures={**measures, **(ranks[i] if ranks else {})} or None,
                    cycles=(tuple(made.stats.rows[i]),) if system.drafts else None,
                )
            )
        times = {name: getattr(made.stats, name) for name in TIMES}
        return records, times | {"output_tokens": sum(made.stats.output_tokens)}

    def failed(self, system: System, task: Task | Measured, example: Example) -> Record:
        """The record of an example that does not fit into memory even alone."""
        record = Record(system.name, task.name, example.id, task.facets(example), failed=OUT_OF_MEMORY)
        if isinstance(task, Measured):
            return record
        tokenizer, room = self.target.require_tokenizer(), prompt_room(task, self.target)
        prompt = task.encode(example, tokenizer, max_tokens=room)
        mark = ids_sha256([*prompt.ids, *prompt.after])
        return replace(record, prompt_tokens=len(prompt.ids), prompt_sha256=mark, cut=prompt.cut)

    def _turns(self, made: Generation, prompts: Sequence[Encoded]) -> list[Turn]:
        """The answer to each prompt of a batch."""
        tokenizer, stats, count = self.target.require_tokenizer(), made.stats, len(prompts)
        sizes = (stats.cache_bytes, stats.cache_bytes_full, stats.draft_bytes)
        held, full, draft = (_split(size, count) for size in sizes)
        return [
            Turn(
                str(tokenizer.decode(tokens, skip_special_tokens=True)),
                tuple(tokens),
                made.finish[i],
                len(prompts[i].ids),
                stats.kept_entries[i],
                cache_bytes=held[i],
                full_cache_bytes=full[i],
                draft_bytes=draft[i],
            )
            for i, tokens in enumerate(made.tokens)
        ]

    def _decode(self, system: System, task: Task, unit: Unit, prompts: Sequence[Encoded]) -> Generation:
        info, new = self.target.info, task.max_new_tokens
        for example, prompt in zip(unit.examples, prompts, strict=True):
            size = len(prompt.ids) + len(prompt.after)
            if size + new > info.max_positions:
                raise DataError(
                    f"task {task.name}, example {example.id}: {size} tokens of prompt and {new} "
                    f"new ones exceed the target's window of {info.max_positions}; pass a lower "
                    "suite.max_prompt_tokens or suite.max_new_tokens, or take a target with a longer window"
                )
        engine = self._engine(system)
        engine.limits = Limits(len(prompts), info.max_positions, max(system.nodes, 1))
        looked_at = system.name == self.first and task.compares_scores(unit.examples)
        self._scores.expect([prompt.ids for prompt in prompts], wanted=looked_at)
        if isinstance(system.parts.evictor, TakesAnswers):
            tokenizer = self.target.require_tokenizer()
            answers = [task.answer_ids(example, tokenizer) for example in unit.examples]
            system.parts.evictor.tell([prompt.after for prompt in prompts], answers)
        request = DecodingRequest.of(task, self.target, self.sampling)
        ids = [task.sequence_id(example) for example in unit.examples]
        return request.decode(engine, prompts, shape=system.shape, sequence_ids=ids)

    def _engine(self, system: System) -> Engine:
        if system.name not in self._engines:
            self._engines[system.name] = Engine(self.target, self._sharing(system.parts))
        return self._engines[system.name]

    def _sharing(self, parts: Parts) -> Parts:
        """The parts, with an evictor that shares its importance scores with the group's other systems."""
        if parts.evictor is None:
            return parts
        return replace(parts, evictor=SharingEvictor(parts.evictor, self._scores))

    def _ranks(
        self, system: System, task: Task, examples: Sequence[Example], prompts: Sequence[Encoded]
    ) -> list[dict[str, float]]:
        """The task's metrics of a batch's importance scores; empty if the task does not compare scores."""
        if not (system.evicts and self._scores.wanted) or self._scores.s_LBGS is None:
            return []
        return task.compare_scores(self.target, examples, prompts, self._scores.s_LBGS)


def _split(size: int, count: int) -> list[int]:
    """Divide a batch's bytes among its examples so that the parts add up to the total."""
    each, rest = divmod(size, count)
    return [each + (i < rest) for i in range(count)]

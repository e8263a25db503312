"""Examples that are run together with one system: prompts in, records out.

Shapes: L layers, B batch, G KV heads, S prompt tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from longtrain.decoding.engine import Engine, Generation
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.decoding.stats import Stats
from longtrain.errors import DataError
from longtrain.evaluation.harness.plan import Place, Unit
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
"""What the engine's figures say of a unit, all samples together."""


@runtime_checkable
class Told(Protocol):
    """An evictor that may know what is asked after eviction, and the expected answer."""

    def tell(self, questions: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        """Say what comes after each of the next prompts, and the tokens of each expected answer."""


@dataclass(frozen=True)
class DecodingRequest:
    """What an engine is asked of prompts that it decodes together.

    Args:
        max_new_tokens: tokens to generate.
        sampling: temperature and so on.
        ignore_eos: go on past the end of text.
        min_new_tokens: tokens before which nothing ends.
        stop_ids: tokens that end an answer; None: the target's own.
        stop: strings that end an answer.
    """

    max_new_tokens: int
    sampling: Sampling
    ignore_eos: bool = True
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, task: Task, target: Target, sampling: Sampling, *, temperature: float | None
    ) -> DecodingRequest:
        """As a task has its examples decoded.

        Args:
            task: the task of the examples.
            target: the frozen model.
            sampling: of the run.
            temperature: of the examples; None: the run's own.
        """
        return cls(
            task.max_new_tokens,
            sampling if temperature is None else replace(sampling, temperature=temperature),
            task.ignore_eos,
            task.min_new_tokens,
            (*target.info.eos_ids, *task.stop_ids(target.require_tokenizer())),
            task.stop_strings,
        )

    def shortened(self, max_new_tokens: int) -> DecodingRequest:
        """The same with fewer new tokens."""
        most = min(max_new_tokens, self.max_new_tokens)
        return replace(self, max_new_tokens=most, min_new_tokens=min(most, self.min_new_tokens))

    def decode(
        self,
        engine: Engine,
        prompts: Sequence[Encoded],
        *,
        shape: TreeShape,
        sequence_ids: Sequence[int] | None = None,
    ) -> Generation:
        """The engine's answers."""
        after = [list(prompt.after) for prompt in prompts] if any(one.after for one in prompts) else None
        ids = [list(prompt.ids) for prompt in prompts]
        return engine.generate(ids, shape=shape, sequence_ids=sequence_ids, after=after, **vars(self))


@dataclass
class _Answers:
    """What came of one example so far: the answer of each sample."""

    samples: list[list[Turn]] = field(default_factory=list)
    cycles: list[tuple[Any, ...]] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)
    measures: list[Mapping[str, float]] = field(default_factory=list)
    cut: bool = False

    def score(self) -> float | None:
        """The mean over samples; None where one has none."""
        known = [score for score in self.scores if score is not None]
        if len(known) < len(self.scores):
            return None
        return known[0] if len(known) == 1 else math.fsum(known) / len(known)

    def means(self) -> dict[str, float]:
        """Means of the measures over samples."""
        count = len(self.measures)
        return {key: math.fsum(one[key] for one in self.measures) / count for key in self.measures[0]}


class Answerer:
    """Lets the systems of a group answer; their engines keep buffers and CUDA graphs from unit to unit.

    Args:
        target: the frozen model.
        sampling: of the run; tasks may set the temperature of their own examples.
        group: the systems; where there are several they differ in their budget alone, so that a batch is
            scored once for all, and tasks look at the scores of the first.
    """

    def __init__(self, target: Target, sampling: Sampling, group: Sequence[System]) -> None:
        self.target, self.sampling, self.first = target, sampling, group[0].name
        self._scores = BatchScores(reuse=len(group) > 1)
        self._engines: dict[str, Engine] = {}

    def free(self) -> None:
        """Give back the memory of all engines and scores."""
        self._engines.clear()
        self._scores = BatchScores(reuse=self._scores.reuse)

    def measured(
        self, system: System, task: Measured, examples: Sequence[Example], known: dict[str, Any]
    ) -> list[Record]:
        """Records of examples over which the target is run without generating.

        Args:
            system: that is measured.
            task: the task of the examples.
            examples: some that fit into memory together.
            known: what the full cache gave for examples, filled and read by the task.
        """
        if task.against_full:
            found = task.measure_against_full(self.target, system.parts, examples, known)
        else:
            found = task.measure(self.target, system.parts, examples)
        for one, figures in zip(examples, found, strict=True):
            for name, value in figures.items():
                if not math.isfinite(value):
                    dtype = str(self.target.dtype).removeprefix("torch.")
                    raise DataError(
                        f"task {task.name}, example {one.id}, system {system.name}: {name}={value}; numbers "
                        f"ran over in {dtype}; pass target.dtype=float32 (or bfloat16 in place "
                        "of float16), or leave out this system; what is done is kept"
                    )
        return [
            Record(
                system.name,
                task.name,
                one.id,
                task.facets(one),
                score=task.score(figures, one),
                measures=figures,
            )
            for one, figures in zip(examples, found, strict=True)
        ]

    def generated(self, system: System, task: Task, unit: Unit) -> tuple[list[Record], Json]:
        """Records of examples that the target answers, and what it took."""
        tokenizer, examples = self.target.require_tokenizer(), unit.examples
        room = prompt_room(task, self.target)
        found = [_Answers() for _ in examples]
        total = Stats()
        first: list[Encoded] = []
        ranks: list[dict[str, float]] = []
        for sample in range(task.samples):
            prompts = [task.encode(one, tokenizer, max_tokens=room) for one in examples]
            made = self._decode(system, task, unit, prompts, sample=sample)
            self._take(task, made, prompts, found)
            total += made.stats
            if not first:
                first, ranks = prompts, self._ranks(system, task, examples, prompts)
            for example, answers in zip(examples, found, strict=True):
                text = answers.samples[-1][-1].text
                answers.scores.append(task.score(text, example))
                answers.measures.append(task.measures(text, example))
        records = [
            Record(
                system.name,
                task.name,
                one.id,
                task.facets(one),
                prompt_tokens=len(first[i].ids),
                prompt_sha256=ids_sha256([*first[i].ids, *first[i].after]),
                cut=found[i].cut,
                turns=tuple(found[i].samples[0]),
                score=found[i].score(),
                measures={**found[i].means(), **(ranks[i] if ranks else {})} or None,
                cycles=tuple(found[i].cycles) if system.drafts else None,
                samples=tuple(tuple(turns) for turns in found[i].samples[1:]),
            )
            for i, one in enumerate(examples)
        ]
        times = {name: getattr(total, name) for name in TIMES} | {"output_tokens": sum(total.output_tokens)}
        return records, times

    def failed(self, system: System, task: Task | Measured, example: Example) -> Record:
        """The record of an example that does not fit into memory, not even alone."""
        record = Record(system.name, task.name, example.id, task.facets(example), failed=OUT_OF_MEMORY)
        if isinstance(task, Measured):
            return record
        tokenizer, room = self.target.require_tokenizer(), prompt_room(task, self.target)
        prompt = task.encode(example, tokenizer, max_tokens=room)
        mark = ids_sha256([*prompt.ids, *prompt.after])
        return replace(record, prompt_tokens=len(prompt.ids), prompt_sha256=mark, cut=prompt.cut)

    def _take(
        self,
        task: Task,
        made: Generation,
        prompts: Sequence[Encoded],
        found: Sequence[_Answers],
    ) -> None:
        """Add one answer to every example."""
        tokenizer, stats, count = self.target.require_tokenizer(), made.stats, len(prompts)
        sizes = (stats.cache_bytes, stats.cache_bytes_full, stats.draft_bytes)
        held, full, draft = (_split(size, count) for size in sizes)
        for i, tokens in enumerate(made.tokens):
            text = str(tokenizer.decode(tokens, skip_special_tokens=True))
            if task.keep_special and made.texts is not None:
                text = made.texts[i]
            turn = Turn(
                text,
                tuple(tokens),
                made.finish[i],
                len(prompts[i].ids),
                stats.kept_rows[i],
                cache_bytes=held[i],
                full_cache_bytes=full[i],
                draft_bytes=draft[i],
            )
            found[i].samples.append([turn])
            found[i].cut |= prompts[i].cut
            found[i].cycles.append(tuple(stats.rows[i]))

    def _decode(
        self, system: System, task: Task, unit: Unit, prompts: Sequence[Encoded], *, sample: int
    ) -> Generation:
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
        engine.limits = Limits(len(prompts), info.max_positions, max(system.shape.n_nodes, 1))
        looked_at = system.name == self.first and task.compares_scores(unit.examples)
        self._scores.expect([prompt.ids for prompt in prompts], wanted=looked_at)
        if isinstance(system.parts.evictor, Told):
            tokenizer = self.target.require_tokenizer()
            answers = [task.answer_ids(example, tokenizer) for example in unit.examples]
            system.parts.evictor.tell([prompt.after for prompt in prompts], answers)
        request = DecodingRequest.of(task, self.target, self.sampling, temperature=unit.temperature)
        if sample:
            seed = request.sampling.seed + sample
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        ids = [task.sequence_id(example) for example in unit.examples]
        own = [
            sequence_id(place) if id_ is None else id_ for id_, place in zip(ids, unit.places, strict=True)
        ]
        return request.decode(engine, prompts, shape=system.shape, sequence_ids=own)

    def _engine(self, system: System) -> Engine:
        if system.name not in self._engines:
            parts, evictor = system.parts, system.parts.evictor
            if evictor is not None:
                parts = replace(parts, evictor=SharingEvictor(evictor, self._scores))
            self._engines[system.name] = Engine(self.target, parts)
        return self._engines[system.name]

    def _ranks(
        self, system: System, task: Task, examples: Sequence[Example], prompts: Sequence[Encoded]
    ) -> list[dict[str, float]]:
        """What a task finds in the scores of a batch; nothing where it does not look at them."""
        if not (system.evicts and self._scores.wanted) or self._scores.s_LBGS is None:
            return []
        return task.compare_scores(self.target, examples, prompts, self._scores.s_LBGS)


def sequence_id(place: Place) -> int:
    """What random coins know an example by, the same in every batch and system: 62 bits of its hash."""
    return int.from_bytes(hashlib.sha256("\n".join(place).encode()).digest()[:8]) >> 2


def _split(size: int, count: int) -> list[int]:
    """A batch's bytes by example, such that their sum is the batch's."""
    each, rest = divmod(size, count)
    return [each + (i < rest) for i in range(count)]

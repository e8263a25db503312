"""Runs the units of one system: prompts in, records out, each unit kept in the ledger as it comes."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from longtrain.decoding.engine import Engine, Generation
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError, DataError, LongtrainError
from longtrain.evaluation.harness.ledger import Ledger
from longtrain.evaluation.harness.plan import Place, Unit, remaining
from longtrain.evaluation.harness.protocol import Protocol, prompt_room
from longtrain.evaluation.prompts import Encoded
from longtrain.evaluation.records import Record, Turn, ids_sha256
from longtrain.evaluation.suite import Advance
from longtrain.evaluation.task import Example, Measured, Task
from longtrain.systems import System

if TYPE_CHECKING:
    from longtrain.targets.model import Target

Json = dict[str, Any]


@dataclass(frozen=True)
class Asked:
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
    def of(cls, task: Task, target: Target, sampling: Sampling, *, temperature: float | None) -> Asked:
        """As a task has its examples decoded.

        Args:
            task: theirs.
            target: the frozen model.
            sampling: of the run.
            temperature: of the examples; None: the run's own.
        """
        assert target.tokenizer is not None
        return cls(
            task.max_new_tokens,
            sampling if temperature is None else replace(sampling, temperature=temperature),
            task.ignore_eos,
            task.min_new_tokens,
            (*target.info.eos_ids, *task.stop_ids(target.tokenizer)),
            task.stop_strings,
        )

    def decode(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        *,
        shape: TreeShape,
        sequence_ids: Sequence[int] | None = None,
    ) -> Generation:
        """The engine's answers."""
        return engine.generate(prompts, shape=shape, sequence_ids=sequence_ids, **vars(self))


class StoppedError(LongtrainError):
    """The run was asked to end; what is done is kept."""


@dataclass(frozen=True)
class Runner:
    """Runs units on a target.

    Args:
        target: the frozen model.
        sampling: of the run; tasks may set the temperature of their own examples.
        advance: told of examples done.
        stopping: asked before every unit whether to leave.
    """

    target: Target
    sampling: Sampling
    advance: Advance = lambda what, done: None
    stopping: Callable[[], bool] = lambda: False
    _engine: list[Engine] = field(default_factory=list, init=False, repr=False, compare=False)
    """That of the system at hand: it keeps buffers and CUDA graphs from unit to unit."""

    def run(self, system: System, units: Sequence[Unit], ledger: Ledger) -> None:
        """Run what the ledger does not hold yet.

        Raises:
            StoppedError: `stopping` says so; the unit at hand is finished and kept.
            ConfigError: memory ran out, or a prompt does not fit the target.
            LongtrainError: whatever a task or a system runs into.
        """
        self._engine.clear()
        left = remaining(list(units), places_of(ledger))
        for number, unit in enumerate(left):
            if self.stopping():
                count = sum(len(one.examples) for one in left[number:])
                raise StoppedError(
                    f"stopped as asked with {count} examples of {system.name} left in this part; what is "
                    "done is kept, and the same command goes on from here"
                )
            ledger.put(unit.key, self.unit(system, unit))
            self.advance(f"{system.name} · {unit.task.name}", len(unit.examples))

    def unit(self, system: System, unit: Unit) -> Json:
        """Records and times of one unit, as JSON values."""
        started = time.perf_counter()
        times: Json = {}
        try:
            if isinstance(unit.task, Measured):
                records = self._measured(system, unit.task, unit.examples)
            else:
                records, times = self._generated(system, unit.task, unit)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"memory ran out in task {unit.task.name} with {system.name} at a batch of "
                f"{len(unit.examples)}; {_smaller(len(unit.examples))}; what is done is kept, and the same "
                "command goes on from here"
            ) from None
        times["wall_s"] = time.perf_counter() - started
        times["batch"] = len(unit.examples)
        return {"records": [record.to_json() for record in records], "times": times}

    def _measured(self, system: System, task: Measured, examples: Sequence[Example]) -> list[Record]:
        found = task.measure(self.target, system.parts, examples)
        for one, figures in zip(examples, found, strict=True):
            for name, value in figures.items():
                if not math.isfinite(value):
                    raise DataError(
                        f"task {task.name}, example {one.id}, system {system.name}: {name}={value}; numbers "
                        f"ran over in {_dtype(self.target)}; pass target.dtype=float32 (or bfloat16 in place "
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

    def _generated(self, system: System, task: Task, unit: Unit) -> tuple[list[Record], Json]:
        tokenizer, examples = self.target.tokenizer, unit.examples
        if tokenizer is None:
            raise ConfigError(
                f"target {self.target.info.name} has no tokenizer, so no text can be given to it"
            )
        room = prompt_room(task, self.target)
        answers: list[list[str]] = [[] for _ in examples]
        turns: list[list[Turn]] = [[] for _ in examples]
        cycles: list[list[Any]] = [[] for _ in examples]
        first: list[Encoded] = []
        cut = [False] * len(examples)
        times = {"prefill_s": 0.0, "decode_s": 0.0, "output_tokens": 0}
        times |= {"target_forwards": 0, "cache_bytes": 0, "draft_bytes": 0}
        for _ in range(task.n_turns):
            prompts = [
                task.encode(one, tokenizer, max_tokens=room, answers=said)
                for one, said in zip(examples, answers, strict=True)
            ]
            first = first or prompts
            cut = [was or prompt.cut for was, prompt in zip(cut, prompts, strict=True)]
            made = self._decode(system, task, unit, prompts)
            for i, tokens in enumerate(made.tokens):
                text = str(tokenizer.decode(tokens, skip_special_tokens=True))
                answers[i].append(text)
                kept = made.stats.kept_rows[i]
                turns[i].append(Turn(text, tuple(tokens), made.finish[i], len(prompts[i].ids), kept))
                cycles[i].append(tuple(made.stats.rows[i]))
            times["prefill_s"] += made.stats.prefill_s
            times["decode_s"] += made.stats.decode_s
            times["output_tokens"] += sum(made.stats.output_tokens)
            times["target_forwards"] += made.stats.target_forwards
            for name in ("cache_bytes", "draft_bytes"):
                times[name] = max(times[name], getattr(made.stats, name))
        records = [
            Record(
                system.name,
                task.name,
                one.id,
                task.facets(one),
                prompt_tokens=len(first[i].ids),
                prompt_sha256=ids_sha256(first[i].ids),
                cut=cut[i],
                turns=tuple(turns[i]),
                score=task.score(answers[i][-1], one),
                cycles=tuple(cycles[i]) if system.drafts else None,
            )
            for i, one in enumerate(examples)
        ]
        return records, times

    def _decode(self, system: System, task: Task, unit: Unit, prompts: Sequence[Encoded]) -> Generation:
        info, new = self.target.info, task.max_new_tokens
        for example, prompt in zip(unit.examples, prompts, strict=True):
            if len(prompt.ids) + new > info.max_positions:
                raise DataError(
                    f"task {task.name}, example {example.id}: {len(prompt.ids)} tokens of prompt and {new} "
                    f"new ones exceed the target's window of {info.max_positions}; pass a lower "
                    "suite.max_prompt_tokens or suite.max_new_tokens, or take a target with a longer window"
                )
        limits = Limits(len(prompts), info.max_positions, max(system.shape.n_nodes, 1))
        if not self._engine or self._engine[0].parts is not system.parts:
            self._engine[:] = [Engine(self.target, system.parts)]
        self._engine[0].limits = limits
        asked = Asked.of(task, self.target, self.sampling, temperature=unit.temperature)
        return asked.decode(
            self._engine[0],
            [prompt.ids for prompt in prompts],
            shape=system.shape,
            sequence_ids=[sequence_id(place) for place in unit.places],
        )


def _dtype(target: Target) -> str:
    return str(target.dtype).removeprefix("torch.")


def _smaller(batch: int) -> str:
    if batch > 1:
        return f"pass suite.batch={batch // 2}"
    return "pass shorter prompts, a lower suite.max_new_tokens, or take a larger GPU"


def sequence_id(place: Place) -> int:
    """What random coins know an example by, the same in every batch and system: 62 bits of its hash."""
    return int.from_bytes(hashlib.sha256("\n".join(place).encode()).digest()[:8]) >> 2


def ledger_settings(protocol: Protocol, target: Target, system: System) -> Json:
    """What a system's records follow from; a ledger of other settings is refused."""
    return {
        "protocol": protocol.settings,
        "target": target.info.weights_hash,
        "dtype": str(target.dtype),
        "system": system.facts,
    }


def places_of(ledger: Ledger) -> set[Place]:
    """Every (task, example) that is done."""
    return {
        (record["task"], record["example"])
        for payload in ledger.done.values()
        for record in payload["records"]
    }


def records_of(ledger: Ledger) -> dict[Place, Record]:
    """The record of every example that is done; of two, that of the first unit by name."""
    found: dict[Place, Record] = {}
    for key in sorted(ledger.done):
        for values in ledger.done[key]["records"]:
            found.setdefault((values["task"], values["example"]), Record.from_json(values))
    return found


def times_of(ledger: Ledger) -> list[Json]:
    """What each task took, all units together: seconds, tokens and tokens a second, the most bytes held."""
    tasks: dict[str, Json] = {}
    for key in sorted(ledger.done):
        task, times = key.rpartition(":")[0], ledger.done[key]["times"]
        row = tasks.setdefault(task, {"task": task, "units": 0, "examples": 0})
        row["units"] += 1
        row["examples"] += times["batch"]
        for name in ("prefill_s", "decode_s", "output_tokens", "wall_s", "target_forwards"):
            if name in times:
                row[name] = row.get(name, 0) + times[name]
        for name in ("cache_bytes", "draft_bytes"):
            if name in times:
                row[name] = max(row.get(name, 0), times[name])
    for row in tasks.values():
        if row.get("decode_s"):
            row["tokens_per_s"] = row["output_tokens"] / (row["prefill_s"] + row["decode_s"])
    return list(tasks.values())

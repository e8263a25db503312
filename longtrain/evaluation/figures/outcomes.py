"""The named numbers of each record, scores and figures made of them, and the lines of `examples.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from longtrain.decoding.stats import repeated
from longtrain.errors import DataError
from longtrain.evaluation.figures.acceptance import ACCEPTANCE, LOOPING, tau_of
from longtrain.evaluation.figures.statistics import (
    NOTHING,
    Bootstrap,
    Interval,
    Ratio,
    mean_of_ratios,
    paired_difference,
    paired_mean_difference,
    paired_quotient,
    pooled_ratio,
    wilson,
)
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import Figure, Suite
from longtrain.evaluation.task import Example, Measured, Task
from longtrain.systems import System

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]
Numbers = Mapping[str, float]
Share = tuple[float, float]
Pair = tuple[Numbers, Numbers]
"""Numbers of one example with two systems, or in two runs."""
Table = dict[str, dict[str, list[Record]]]
"""System -> task -> records in the order of the task's examples."""


def by_example(suite: Suite, systems: Sequence[System], records: Iterable[Record]) -> Table:
    """Records by system and task, in the order of the task's examples.

    Raises:
        DataError: a record of an unknown system, task or example, or two of one example; or two systems
            had other prompts.
    """
    prompts: dict[tuple[str, str], Record] = {}
    ids = {task.name: dict.fromkeys(one.id for one in task.examples()) for task in suite.tasks}
    found: dict[str, dict[str, dict[str, Record]]] = {
        system.name: {name: {} for name in ids} for system in systems
    }
    for record in records:
        where = f"record of system {record.system}, task {record.task}, example {record.example}"
        if record.system not in found or record.example not in ids.get(record.task, ()):
            raise DataError(f"{where}: this run has no such thing; remove its ledgers, or pass name=OTHER")
        if found[record.system][record.task].setdefault(record.example, record) is not record:
            raise DataError(f"{where} is there twice; remove the run's ledgers and run again")
        first = prompts.setdefault((record.task, record.example), record)
        if first.prompt_sha256 != record.prompt_sha256:
            raise DataError(
                f"{where} had another prompt than with system {first.system} ({record.prompt_sha256} and "
                f"{first.prompt_sha256}); remove the run's ledgers and run again"
            )
    return {
        system: {
            name: [cell[id_] for id_ in ids[name] if id_ in cell] for name, cell in tasks.items() if cell
        }
        for system, tasks in found.items()
    }


def numbers_of(record: Record) -> dict[str, float]:
    """Everything about a record that a figure can be made of, by name.

    `score`, the task's own measures, and: `one`, which is 1; of what was generated `prompt_tokens`,
    `output_tokens`, `repeated_tokens` (those in text that the answer held before), `kept_rows` (rows of the
    prompt in the cache, mean over turns, layers and KV heads), `cache_bytes`, `full_cache_bytes` and
    `draft_bytes` (the first answer's cache while decoding and before eviction, and what the draft held
    beside it); of drafts `cycle_tokens` over `cycles`, which is
    the acceptance length, and `fresh_tokens` over `fresh_cycles`, which is that of texts that do not repeat
    themselves: loops flatter a draft.
    """
    found = {"one": 1.0, **({} if record.score is None else {"score": record.score})}
    if record.failed:
        return {}
    if record.turns:
        found |= {"prompt_tokens": record.prompt_tokens, "output_tokens": record.output_tokens}
        found["repeated_tokens"] = sum(repeated(turn.tokens) for turn in record.turns)
        found["kept_rows"] = math.fsum(turn.kept_rows for turn in record.turns) / len(record.turns)
        found["cache_bytes"] = record.turns[0].cache_bytes
        found["full_cache_bytes"] = record.turns[0].full_cache_bytes
        found["draft_bytes"] = record.turns[0].draft_bytes
    if record.cycles is not None:
        tokens, cycles = tau_of(record.rows())
        found |= {"cycle_tokens": sum(tokens), "cycles": sum(cycles)}
        if found.get("repeated_tokens", 0) <= LOOPING * max(1, record.output_tokens):
            found |= {"fresh_tokens": found["cycle_tokens"], "fresh_cycles": found["cycles"]}
    return found | dict(record.measures or {})


POSITION = "position"
"""Facet of a stretch of a text: where it ends."""


def stretches_of(record: Record) -> list[Record]:
    """A record for each stretch of a text whose numbers are among the measures, as `NAME@END`; in order."""
    found: dict[int, dict[str, float]] = {}
    for key, value in (record.measures or {}).items():
        name, at, end = key.partition("@")
        if at:
            found.setdefault(int(end), {})[name] = value
    return [
        replace(
            record,
            facets={POSITION: end},
            turns=(),
            cycles=None,
            score=some.pop("score", None),
            measures=some,
        )
        for end, some in sorted(found.items())
    ]


def kept_share(record: Record) -> float | None:
    """Share of the prompt's rows that stay in the cache, mean over turns; None where unknown."""
    if record.measures is not None and {"kept_rows", "context_tokens"} <= set(record.measures):
        return record.measures["kept_rows"] / record.measures["context_tokens"]
    return mean(turn.kept_rows / turn.prompt_tokens for turn in record.turns if turn.prompt_tokens)


@dataclass(frozen=True)
class Parting:
    """Where two records' answers to one example first differ.

    Args:
        first: a record.
        second: the record that it is compared with.
        turn: the first turn that differs, from 1.
        position: the first token of it that does.
    """

    first: Record
    second: Record
    turn: int
    position: int


def parting(first: Record, second: Record) -> Parting | None:
    """The turn and the token at which two records' answers first differ; None where they are the same."""
    for turn, (a, b) in enumerate(zip(first.turns, second.turns, strict=False), 1):
        if a.tokens != b.tokens:
            pairs = enumerate(zip(a.tokens, b.tokens, strict=False))
            at = next((i for i, (x, y) in pairs if x != y), min(len(a.tokens), len(b.tokens)))
            return Parting(first, second, turn, at)
    if len(first.turns) != len(second.turns):
        return Parting(first, second, min(len(first.turns), len(second.turns)) + 1, 0)
    return None


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of those values that are there; None where none is."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def plain(value: Any) -> Any:
    """JSON values as a reader gets them back: tuples are lists, NumPy's numbers Python's, NaN null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Reading:
    """How an outcome gives its share of a suite's score.

    Args:
        share: numbers of a record -> (numerator, denominator); None where there is no figure.
        of: what is made of the ratio of sums, elementwise.
        bounds: the least and the most that the figure can be.
    """

    share: Callable[[Numbers], Share | None]
    of: Callable[[Any], Any] = np.asarray
    bounds: tuple[float, float] = (0.0, math.inf)

    def ratio(self, some: Iterable[Numbers]) -> Ratio:
        """Shares of records; one without a figure has the denominator 0 and counts for nothing."""
        shares = [self.share(numbers) or (0.0, 0.0) for numbers in some]
        return [above for above, _ in shares], [below for _, below in shares]

    def mean(self, strata: Iterable[Iterable[Numbers]], draw: Bootstrap) -> Interval:
        """The mean over strata of their figures."""
        ratios = [self.ratio(some) for some in strata]
        return mean_of_ratios(ratios, draw, of=self.of, bounds=self.bounds)

    def difference(self, strata: Iterable[Sequence[Pair]], draw: Bootstrap) -> Interval:
        """The mean over strata of the first figures minus that of the second, over the same examples."""
        ratios = [(self.ratio(a for a, _ in some), self.ratio(b for _, b in some)) for some in strata]
        return paired_mean_difference(ratios, draw, of=self.of, bounds=self.bounds)


def reading_of(scale: Mapping[str, Any]) -> Reading:
    """How scores are read: `maximum` times the mean score, exp(Σ nats / Σ tokens), or tokens a cycle.

    Args:
        scale: `name` and `maximum` of the suite's scale.
    """
    if scale["name"] == "perplexity":
        return Reading(lambda one: _share(one, "nats", "tokens"), np.exp, (1.0, math.inf))
    if scale["name"] == ACCEPTANCE:  # plain decoding gives one token a cycle
        return Reading(
            lambda one: _share(one, "cycle_tokens", "cycles") or _share(one, "one", "one", "output_tokens"),
            bounds=(1.0, math.inf),
        )
    best = 1.0 if scale["maximum"] is None else scale["maximum"]
    bounds = (0.0, math.inf if scale["maximum"] is None else best)

    def share(one: Numbers) -> Share | None:
        return (best * one["score"], 1.0) if "score" in one else None

    return Reading(share, bounds=bounds)


def figures_of(figures: Sequence[Figure], some: Sequence[Numbers | Pair], draw: Bootstrap) -> Json:
    """Name -> interval of each figure that these records have.

    Args:
        figures: what the suite reports.
        some: numbers of the records, or where there is a full cache beside them pairs of theirs and its own.
        draw: how the bootstrap draws.
    """
    rows = [one if isinstance(one, tuple) else (one,) for one in some]
    found = {one.name: _interval(one, rows, draw) for one in figures}
    return {name: interval.to_json() for name, interval in found.items() if interval.n}


def change_of(figure: Figure, pairs: Sequence[Pair], draw: Bootstrap) -> Interval:
    """A figure of the first records minus that of the second."""
    first, second = _ratios(figure, pairs, sides=2)
    gap = paired_difference(first, second, draw)
    return gap.through(lambda nats: 100 * math.expm1(nats)) if figure.growth else gap


def _interval(figure: Figure, rows: Sequence[tuple[Numbers, ...]], draw: Bootstrap) -> Interval:
    if figure.kind in ("change", "quotient"):
        pairs = [(row[0], row[1]) for row in rows if len(row) == 2]
        if figure.kind == "change":
            return change_of(figure, pairs, draw)
        (mine, _), (whole, _) = _ratios(figure, pairs, sides=2)
        return paired_quotient(mine, whole, draw)
    ((above, below),) = _ratios(figure, rows, sides=1)
    if figure.kind == "wilson":
        return wilson(round(sum(above)), round(sum(below)))
    if figure.kind == "pooled":
        pooled = pooled_ratio((above, below), draw)
        return pooled.through(math.exp) if figure.growth else pooled
    total = math.fsum(below)
    return Interval(math.fsum(above) / total, math.nan, math.nan, len(above)) if total else NOTHING


def _ratios(figure: Figure, rows: Sequence[tuple[Numbers, ...]], *, sides: int) -> list[Ratio]:
    """A figure's two numbers of the first sides of those rows that have them on each of these sides."""
    needed = {figure.above, figure.below}
    there = [row for row in rows if all(needed <= set(one) for one in row[:sides])]
    return [
        ([row[side][figure.above] for row in there], [row[side][figure.below] for row in there])
        for side in range(sides)
    ]


def _share(one: Numbers, above: str, below: str, needs: str = "one") -> Share | None:
    return (one[above], one[below]) if {above, below, needs} <= set(one) else None


START_CHARS, END_CHARS = 300, 700
"""Characters shown of a prompt: from its beginning and up to its end."""


def examples(
    suite: Suite,
    systems: Sequence[System],
    records: Iterable[Record],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: Mapping[str, int],
) -> Iterator[Json]:
    """One mapping an example that any system has an outcome of, in the suite's order.

    Args:
        suite: that ran.
        systems: that ran.
        records: of all systems, in any order.
        tokenizer: the target's.
        max_tokens: task -> most tokens of a prompt's text, as the protocol has it.

    Raises:
        DataError: a record of an unknown system, task or example, or two of one example.
    """
    found = by_example(suite, systems, records)
    for task in suite.tasks:
        there: dict[str, dict[str, Record]] = {}
        for system in systems:
            for record in found[system.name].get(task.name, []):
                there.setdefault(record.example, {})[system.name] = record
        for example in task.examples():
            if example.id not in there:
                continue
            outputs = there[example.id]
            first = next(iter(outputs.values()))
            start, end = _excerpts(task, example, tokenizer, max_tokens.get(task.name))
            yield plain(
                {
                    "task": task.name,
                    "example": example.id,
                    "facets": first.facets,
                    "prompt_tokens": first.prompt_tokens,
                    "prompt_sha256": first.prompt_sha256,
                    "cut": first.cut,
                    "prompt_start": start,
                    "prompt_end": end,
                    "references": task.references(example) if isinstance(task, Task) else [],
                    "outputs": {name: output(record) for name, record in outputs.items()},
                }
            )


def output(record: Record) -> Json:
    """What one system made of an example; only what there is.

    `cycles` are tokens by cycles and cycles, from which the acceptance length follows.
    """
    values: Json = {"texts": record.texts, "score": record.score, "output_tokens": record.output_tokens}
    if record.measures is not None:
        values["measures"] = record.measures
    if record.cycles is not None:
        numbers = numbers_of(record)
        values["cycles"] = [numbers["cycle_tokens"], numbers["cycles"]]
    return values


def numbers_of_output(values: Json) -> dict[str, float]:
    """The numbers of an output that figures are made of, named as in `outcomes.numbers_of`."""
    found = {"one": 1.0, **({} if values["score"] is None else {"score": values["score"]})}
    if values["output_tokens"]:
        found["output_tokens"] = values["output_tokens"]
    if values.get("cycles") is not None:
        found["cycle_tokens"], found["cycles"] = values["cycles"]
    return found | (values.get("measures") or {})


def _excerpts(
    task: Task | Measured, example: Example, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None
) -> tuple[str, str]:
    """The prompt's first and last characters as the target got them; nothing of a task without prompts."""
    if not isinstance(task, Task) or max_tokens is None:
        return "", ""
    ids = list(task.encode(example, tokenizer, max_tokens=max_tokens).ids)
    if len(ids) <= START_CHARS + END_CHARS:
        text = str(tokenizer.decode(ids))
        if len(text) <= START_CHARS + END_CHARS:
            return text, ""
        return text[:START_CHARS], text[-END_CHARS:]
    start = str(tokenizer.decode(ids[:START_CHARS]))  # a token is a character at least, or part of one
    return start[:START_CHARS], str(tokenizer.decode(ids[-END_CHARS:]))[-END_CHARS:]

"""The outcome of one example with one system: its answers, its score, and its draft-verify cycles."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from longtrain.decoding.stats import Cycle

Json = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """One answer.

    Args:
        text: the answer without special tokens.
        tokens: its token ids, including the end token.
        finish: the reason it ended: `stop_id`, `stop_string` or `length`.
        prompt_tokens: number of tokens before it.
        kept_entries: the prompt's KV entries in the cache during decoding, mean over layers and KV heads.
        cache_bytes: this answer's share of the batch's cache during decoding.
        full_cache_bytes: the same before eviction.
        draft_bytes: this answer's share of the memory of the batch's draft.
    """

    text: str
    tokens: tuple[int, ...]
    finish: str
    prompt_tokens: int
    kept_entries: float
    cache_bytes: int = 0
    full_cache_bytes: int = 0
    draft_bytes: int = 0

    @property
    def output_tokens(self) -> int:
        """Number of tokens of the answer, including the end token."""
        return len(self.tokens)

    def to_json(self) -> Json:
        """Plain JSON values."""
        return asdict(self) | {"tokens": list(self.tokens)}

    @classmethod
    def from_json(cls, values: Json) -> Turn:
        """The inverse of `to_json`."""
        return cls(**{**values, "tokens": tuple(values["tokens"])})


@dataclass(frozen=True)
class Record:
    """The outcome of one example with one system.

    Args:
        system: name of the system.
        task: name of the task.
        example: id of the example.
        facets: properties by which metrics are split.
        prompt_tokens: number of prompt tokens of the first turn; 0 if nothing was generated.
        prompt_sha256: 16 hex digits of the hash of the first turn's ids.
        cut: True if the prompt's middle was left out.
        turns: the answers; empty if nothing was generated.
        score: the score, 0 to 1, or None.
        measures: metrics of a `Measured` task, or metrics beside the score.
        cycles: draft-verify cycles of each turn, if a draft ran.
        failed: the reason if there is no outcome (`out of memory`), else empty.
    """

    system: str
    task: str
    example: str
    facets: Json
    prompt_tokens: int = 0
    prompt_sha256: str = ""
    cut: bool = False
    turns: tuple[Turn, ...] = ()
    score: float | None = None
    measures: dict[str, float] | None = None
    cycles: tuple[tuple[Cycle, ...], ...] | None = None
    failed: str = ""

    @property
    def texts(self) -> list[str]:
        """The text of each turn's answer."""
        return [turn.text for turn in self.turns]

    @property
    def output_tokens(self) -> int:
        """Total number of tokens of all answers."""
        return sum(turn.output_tokens for turn in self.turns)

    def rows(self) -> list[list[Cycle]]:
        """The draft-verify cycles of each turn; empty if no draft ran."""
        return [list(turn) for turn in self.cycles or ()]

    def to_json(self) -> Json:
        """Plain JSON values, token ids included; cycles as lists of numbers."""
        values: Json = {
            "system": self.system,
            "task": self.task,
            "example": self.example,
            "facets": dict(self.facets),
            "prompt_tokens": self.prompt_tokens,
            "prompt_sha256": self.prompt_sha256,
            "cut": self.cut,
            "turns": [turn.to_json() for turn in self.turns],
            "score": self.score,
        }
        if self.measures is not None:
            values["measures"] = dict(self.measures)
        if self.cycles is not None:
            values["cycles"] = [[_numbers(cycle) for cycle in turn] for turn in self.cycles]
        if self.failed:
            values["failed"] = self.failed
        return values

    @classmethod
    def from_json(cls, values: Json) -> Record:
        """The inverse of `to_json`."""
        turns = tuple(map(Turn.from_json, values["turns"]))
        cycles = values.get("cycles")
        known = None if cycles is None else tuple(tuple(_cycle(c) for c in turn) for turn in cycles)
        return cls(**{**values, "turns": turns, "cycles": known})


@dataclass(frozen=True)
class Parting:
    """The position at which two records' answers to one example first differ.

    Args:
        first: a record.
        second: the record to compare with.
        turn: number of the first turn that differs, from 1.
        position: index of the first token of the turn that differs.
    """

    first: Record
    second: Record
    turn: int
    position: int


def parting(first: Record, second: Record) -> Parting | None:
    """Find the turn and token at which two records' answers first differ; None if they are equal."""
    for turn, (a, b) in enumerate(zip(first.turns, second.turns, strict=False), 1):
        if a.tokens != b.tokens:
            pairs = enumerate(zip(a.tokens, b.tokens, strict=False))
            at = next((i for i, (x, y) in pairs if x != y), min(len(a.tokens), len(b.tokens)))
            return Parting(first, second, turn, at)
    if len(first.turns) != len(second.turns):
        return Parting(first, second, min(len(first.turns), len(second.turns)) + 1, 0)
    return None


def ids_sha256(ids: Sequence[int]) -> str:
    """16 hex digits of the hash of token ids."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:16]


def _numbers(cycle: Cycle) -> list[int]:
    return [
        cycle.position,
        cycle.drafted,
        cycle.nodes,
        cycle.accepted,
        cycle.emitted,
        int(cycle.ended),
        cycle.put_off,
        *((cycle.copied,) if cycle.copied else ()),
    ]


def _cycle(numbers: list[int]) -> Cycle:
    position, drafted, nodes, accepted, emitted, ended, *rest = numbers
    return Cycle(position, drafted, nodes, accepted, emitted, bool(ended), *rest)

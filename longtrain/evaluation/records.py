"""What came of one example with one system: the texts, the score, and how they were decoded."""

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
        text: special tokens left out.
        tokens: its ids, what ended it included.
        finish: why it ended: `stop_id`, `stop_string` or `length`.
        prompt_tokens: tokens of what was before it.
        kept_rows: rows of the prompt in the cache while it was decoded, mean over layers and KV heads.
        cache_bytes: this answer's part of the batch's cache while decoding.
        full_cache_bytes: the same before eviction.
        draft_bytes: this answer's part of what the batch's draft held beside it.
    """

    text: str
    tokens: tuple[int, ...]
    finish: str
    prompt_tokens: int
    kept_rows: float
    cache_bytes: int = 0
    full_cache_bytes: int = 0
    draft_bytes: int = 0

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer, what ended it included."""
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
    """An example's outcome.

    Args:
        system: name of the system.
        task: name of the task.
        example: id of the example.
        facets: what figures are split by.
        prompt_tokens: of the first turn; 0 where nothing was generated.
        prompt_sha256: 16 hex digits of the hash of the first turn's ids.
        cut: whether the prompt's middle was left out.
        turns: the answers; empty where nothing was generated. Of several samples the first.
        score: 0 to 1; None where there is none. Of several samples the mean.
        measures: figures of a `Measured` task, or those beside the score.
        cycles: of each turn, where a draft ran.
        samples: the answers of further samples.
        failed: why there is no outcome (`out of memory`); empty where there is one.
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
    samples: tuple[tuple[Turn, ...], ...] = ()
    failed: str = ""

    @property
    def texts(self) -> list[str]:
        """The answers, turn by turn."""
        return [turn.text for turn in self.turns]

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(turn.output_tokens for turn in self.turns)

    def rows(self) -> list[list[Cycle]]:
        """The cycles of each turn; empty where no draft ran."""
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
        if self.samples:
            values["samples"] = [[turn.to_json() for turn in turns] for turns in self.samples]
        if self.failed:
            values["failed"] = self.failed
        return values

    @classmethod
    def from_json(cls, values: Json) -> Record:
        """The inverse of `to_json`."""
        turns = tuple(map(Turn.from_json, values["turns"]))
        samples = tuple(tuple(map(Turn.from_json, some)) for some in values.get("samples", ()))
        cycles = values.get("cycles")
        known = None if cycles is None else tuple(tuple(_cycle(c) for c in turn) for turn in cycles)
        return cls(**{**values, "turns": turns, "samples": samples, "cycles": known})


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
    ]


def _cycle(numbers: list[int]) -> Cycle:
    position, drafted, nodes, accepted, emitted, ended, *put_off = numbers  # older records lack the last
    return Cycle(position, drafted, nodes, accepted, emitted, bool(ended), *put_off)

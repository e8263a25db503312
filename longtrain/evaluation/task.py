"""What a benchmark's task is to whoever runs it: examples, their prompts, how to generate, and the score."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError
from longtrain.evaluation.prompts import Encoded, encode

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from longtrain.decoding.roles import Parts
    from longtrain.evaluation.records import Record
    from longtrain.systems import System
    from longtrain.targets.model import Target

Facet = int | float | str


@dataclass(frozen=True)
class Example:
    """One question of a task.

    Args:
        id: its name, no other example of the task has it.
        fields: the row as published.
    """

    id: str
    fields: Mapping[str, Any]


class WithExamples:
    """What tasks of both kinds have: a name, and examples in a fixed order."""

    name: str
    rows: tuple[Example, ...]

    def examples(self) -> Iterator[Example]:
        """The examples, in their order: the published one of a benchmark."""
        return iter(self.rows)

    def serves(self, system: System) -> bool:
        """Whether a system is run on this task; others have no records of it."""
        return True

    def facets(self, example: Example) -> dict[str, Facet]:
        """What figures are split by: `{"length": 4096, "depth": 50, "category": "math"}`."""
        return {}


@dataclass(frozen=True)
class Task(WithExamples):
    """A task of a benchmark with its examples.

    What most tasks differ in are functions among the fields; a benchmark of another kind overrides methods.

    Args:
        name: as the benchmark writes it.
        rows: the examples, in the published order.
        template: the prompt; `{field}` stands for a field of the row.
        max_new_tokens: most tokens of an answer.
        metric: name of the metric, for the protocol.
        judge: (what was generated, special tokens left out; example) -> score from 0 to 1. It does the
            benchmark's own post-processing. None: there is no score.
        chat: whether the prompt becomes a user's message of the chat template.
        stops: texts whose last token ends an answer, beside the target's own end tokens.
        stop_strings: strings that end an answer wherever they stand in its text.
        min_new_tokens: tokens that no end token may stand among.
        ignore_eos: let no token end an answer, so that each has `max_new_tokens`.
        max_prompt_tokens: most tokens of the prompt's text; None: what the target's window leaves.
        samples: answers to each prompt, each drawn with a seed of its own; the score is their mean.
        keep_special: leave special tokens in the texts of answers, all but the one that ended it.
        protocol: further JSON values that prompts, decoding or scores follow from, to be hashed.
        written: example -> its prompt in tokens, of a length of its own and never cut; None: the template is
            filled. Where there is a facet `length`, it says how long such a prompt is.
        facets_of: example -> what figures are split by.
        expected: example -> expected answers, to be read beside the output.
        temperature_of: example -> temperature of its answers; None: the run's own (`decode.temperature`).
    """

    name: str
    rows: tuple[Example, ...]
    template: str
    max_new_tokens: int
    metric: str
    judge: Callable[[str, Example], float] | None
    chat: bool = True
    stops: tuple[str, ...] = ()
    stop_strings: tuple[str, ...] = ()
    min_new_tokens: int = 0
    ignore_eos: bool = False
    max_prompt_tokens: int | None = None
    samples: int = 1
    keep_special: bool = False
    protocol: Mapping[str, Any] = field(default_factory=dict)
    written: Callable[[Example], Encoded] | None = None
    facets_of: Callable[[Example], dict[str, Facet]] = lambda example: {}
    expected: Callable[[Example], Sequence[str]] = lambda example: ()
    temperature_of: Callable[[Example], float | None] = lambda example: None

    def prompt(self, example: Example) -> str:
        """The text of an example, before truncation and chat template."""
        return self.template.format(**example.fields)

    def size(self, example: Example) -> int:
        """How long its prompt is, in whatever unit: examples of like size are decoded together."""
        length = self.facets(example).get("length") if self.written else None
        return len(self.prompt(example)) if length is None else int(length)

    def facets(self, example: Example) -> dict[str, Facet]:
        """What figures are split by."""
        return self.facets_of(example)

    def encode(self, example: Example, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int) -> Encoded:
        """The tokens that the target is given.

        Args:
            example: of this task.
            tokenizer: the target's.
            max_tokens: most tokens of the prompt's text.
        """
        if self.written is not None:
            return self.written(example)
        return encode(tokenizer, self.prompt(example), chat=self.chat, max_tokens=max_tokens)

    def temperature(self, example: Example) -> float | None:
        """Temperature of an example's answers; None: the run's own (`decode.temperature`)."""
        return self.temperature_of(example)

    def references(self, example: Example) -> list[str]:
        """Expected answers, to be read beside the output."""
        return list(self.expected(example))

    def score(self, text: str, example: Example) -> float | None:
        """The score of a generated text, 0 to 1; None where the task has none."""
        return None if self.judge is None else self.judge(text, example)

    def measures(self, text: str, example: Example) -> Mapping[str, float]:
        """Further figures of a generated text, by name; the same names for every text of the task."""
        return {}

    def related(self, record: Record, full: Record, example: Example) -> Record:
        """A record, scored anew if its score follows from what the full cache gave for the same example.

        Args:
            record: of any system, the full cache among them.
            full: the full cache's record.
            example: the example that both records are of.
        """
        return record

    def sequence_id(self, example: Example) -> int | None:
        """What random coins know an example by; None: a hash of the names of task and example."""
        return None

    def answer_ids(self, example: Example, tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
        """Tokens of the expected answer, for an evictor that may know it (an oracle)."""
        return ()

    def compares_scores(self, examples: Sequence[Example]) -> bool:
        """Whether the importance scores that an evictor gives these prompts are to be looked at."""
        return False

    def compare_scores(
        self, target: Target, examples: Sequence[Example], prompts: Sequence[Encoded], s_LBGS: Tensor
    ) -> list[dict[str, float]]:
        """Figures of an evictor's scores, one mapping an example.

        Args:
            target: the frozen model.
            examples: decoded together.
            prompts: of these examples.
            s_LBGS: importance of every prompt token for each layer and KV head, not pooled.
        """
        raise NotImplementedError

    def stop_ids(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """Tokens that end an answer, beside the target's own end tokens.

        Raises:
            ConfigError: the tokenizer writes a stop text with no token.
        """
        ids = []
        for text in self.stops:
            tokens = tokenizer.encode(text, add_special_tokens=False)
            if not tokens:
                raise ConfigError(
                    f"task {self.name} ends answers at {text!r}, for which this tokenizer has no token; "
                    "leave out the task or use another tokenizer"
                )
            ids.append(tokens[-1])
        return tuple(ids)

    def settings(self) -> dict[str, Any]:
        """JSON values that the prompts, the decoding and the scores follow from, to be hashed into a result.

        `max_prompt_tokens` is not among them: the protocol has it as resolved for the target.
        """
        return {
            "task": self.name,
            "template": self.template,
            "max_new_tokens": self.max_new_tokens,
            "min_new_tokens": self.min_new_tokens,
            "metric": self.metric,
            "chat": self.chat,
            "stops": list(self.stops),
            "n_turns": 1,  # stands here for the hashes of results that have been recorded
            "ignore_eos": self.ignore_eos,
            **({"stop_strings": list(self.stop_strings)} if self.stop_strings else {}),
            **({"samples": self.samples} if self.samples > 1 else {}),
            **({"keep_special": True} if self.keep_special else {}),
            "temperatures": self._temperatures(),
            "protocol": dict(self.protocol),
            "rows": len(self.rows),
            "rows_sha256": rows_sha256(self.rows),
        }

    def _temperatures(self) -> dict[str, float]:
        """Example -> temperature, where it is not the run's own."""
        own = {row.id: self.temperature(row) for row in self.rows}
        return {name: value for name, value in own.items() if value is not None}


class Measured(WithExamples, ABC):
    """A task without generation: the target is run over given text (perplexity).

    Args:
        name: of the task.
        rows: the examples, in a fixed order.
    """

    against_full: bool = False
    """Whether figures follow from what the full cache gives too; all systems then run unit by unit."""

    def size(self, example: Example) -> int:
        """How long it is, in whatever unit: examples of like size are measured together."""
        return 0

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """JSON values that the figures follow from, `rows` and `rows_sha256` among them."""

    @abstractmethod
    def measure(self, target: Target, parts: Parts, examples: Sequence[Example]) -> list[dict[str, float]]:
        """One mapping an example: `{"nats": .., "tokens": .., "bytes": ..}`."""

    def measure_against_full(
        self, target: Target, parts: Parts, examples: Sequence[Example], known: dict[str, Any]
    ) -> list[dict[str, float]]:
        """As `measure`, with figures beside the full cache's.

        Args:
            target: the frozen model.
            parts: of the system.
            examples: measured together.
            known: example -> what the full cache gave, kept while the systems run over the same examples;
                what is missing is computed and put there.
        """
        raise NotImplementedError

    def score(self, measures: Mapping[str, float], example: Example) -> float | None:
        """The score of an example, 0 to 1, that follows from what was measured; None where there is none."""
        return None


def rows_sha256(rows: Sequence[Example]) -> str:
    """Hash of examples: names and fields."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.id, dict(row.fields)], sort_keys=True).encode() + b"\n")
    return digest.hexdigest()

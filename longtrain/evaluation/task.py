"""A benchmark's task: its examples, their prompts, and how answers are generated and scored."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError
from longtrain.evaluation.prompts import Encoded, encode

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from longtrain.decoding.roles import Parts
    from longtrain.decoding.sampling import Sampling
    from longtrain.evaluation.records import Record
    from longtrain.systems import System
    from longtrain.targets.model import Target

Facet = int | float | str


@dataclass(frozen=True)
class Example:
    """One example (question) of a task.

    Args:
        id: its name, unique within the task.
        fields: the example's fields as published.
    """

    id: str
    fields: Mapping[str, Any]


class WithExamples:
    """The common part of both kinds of tasks: a name, and examples in a fixed order."""

    name: str
    rows: tuple[Example, ...]

    def examples(self) -> Iterator[Example]:
        """The examples in order; for a benchmark, in the published order."""
        return iter(self.rows)

    @property
    def generating(self) -> Task | None:
        """The task whose answers are decoded where speed is timed; None if it decodes nothing."""
        return None

    def serves(self, system: System) -> bool:
        """True if a system is run on this task; other systems have no records of it."""
        return True

    def facets(self, example: Example) -> dict[str, Facet]:
        """Properties by which metrics are split, such as `{"length": 4096, "depth": 50}`."""
        return {}


@dataclass(frozen=True)
class Task(WithExamples):
    """A task of a benchmark with its examples.

    Most tasks differ only in the functions among the fields; benchmarks of another kind override methods.

    Args:
        name: the name that the benchmark uses.
        rows: the examples, in the published order.
        template: the prompt; `{field}` is replaced by a field of the example.
        max_new_tokens: the maximum number of tokens of an answer.
        metric: name of the metric, for the protocol.
        judge: (generated text without special tokens, example) -> score from 0 to 1. It includes the
            benchmark's own post-processing. None: there is no score.
        chat: put the prompt into the chat template as a user's message.
        stops: texts whose last token ends an answer, in addition to the target's own end tokens.
        stop_strings: strings that end an answer wherever they occur in its text.
        min_new_tokens: number of first tokens that cannot be end tokens.
        ignore_eos: ignore end tokens, so that each answer has `max_new_tokens` tokens.
        max_prompt_tokens: maximum tokens of the prompt's text; None: the room in the target's context window.
        protocol: further JSON values that determine prompts, decoding or scores, to be hashed.
        written: example -> its encoded prompt, which is never cut; None: the template is
            filled. The facet `length`, if any, is the length of such a prompt.
        facets_of: example -> properties by which metrics are split.
        expected: example -> expected answers, shown beside the output.
        temperature: sampling temperature; None: the run's own (`decode.temperature`).
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
    protocol: Mapping[str, Any] = field(default_factory=dict)
    written: Callable[[Example], Encoded] | None = None
    facets_of: Callable[[Example], dict[str, Facet]] = lambda example: {}
    expected: Callable[[Example], Sequence[str]] = lambda example: ()
    temperature: float | None = None

    @property
    def generating(self) -> Task | None:
        """The task itself."""
        return self

    def sampling(self, usual: Sampling) -> Sampling:
        """The sampling settings of its answers; only the temperature can differ from the run's."""
        return usual if self.temperature is None else replace(usual, temperature=self.temperature)

    def prompt(self, example: Example) -> str:
        """The text of an example's prompt, before truncation and chat template."""
        return self.template.format(**example.fields)

    def size(self, example: Example) -> int:
        """The prompt's length in any unit: examples of similar size are decoded together."""
        length = self.facets(example).get("length") if self.written else None
        return len(self.prompt(example)) if length is None else int(length)

    def facets(self, example: Example) -> dict[str, Facet]:
        """Properties by which metrics are split."""
        return self.facets_of(example)

    def encode(self, example: Example, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int) -> Encoded:
        """Encode an example's prompt.

        Args:
            example: an example of this task.
            tokenizer: the target's.
            max_tokens: the maximum number of tokens of the prompt's text.
        """
        if self.written is not None:
            return self.written(example)
        return encode(tokenizer, self.prompt(example), chat=self.chat, max_tokens=max_tokens)

    def references(self, example: Example) -> list[str]:
        """Expected answers, shown beside the output."""
        return list(self.expected(example))

    def score(self, text: str, example: Example) -> float | None:
        """The score of a generated text, 0 to 1, or None if the task has no score."""
        return None if self.judge is None else self.judge(text, example)

    def measures(self, text: str, example: Example) -> Mapping[str, float]:
        """Additional metrics of a generated text, by name; the same names for every text of the task."""
        return {}

    def related(self, record: Record, full: Record, example: Example) -> Record:
        """Rescore a record if its score depends on the full cache's record of the same example.

        Args:
            record: a record of any system, including the full cache.
            full: the full cache's record.
            example: the example of both records.
        """
        return record

    def sequence_id(self, example: Example) -> int:
        """The key of an example's random numbers."""
        return sequence_id((self.name, example.id))

    def answer_ids(self, example: Example, tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
        """Tokens of the expected answer, for an oracle that may read it."""
        return ()

    def compares_scores(self, examples: Sequence[Example]) -> bool:
        """True if an evictor's importance scores of these prompts are to be compared."""
        return False

    def compare_scores(
        self, target: Target, examples: Sequence[Example], prompts: Sequence[Encoded], s_LBGS: Tensor
    ) -> list[dict[str, float]]:
        """Metrics of an evictor's importance scores, one mapping per example.

        Args:
            target: the frozen model.
            examples: examples that are decoded together.
            prompts: the encoded prompts of these examples.
            s_LBGS: importance of every prompt token for each layer and KV head, not pooled.
        """
        raise NotImplementedError

    def stop_ids(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """Tokens that end an answer, in addition to the target's own end tokens.

        Raises:
            ConfigError: a stop text is encoded as no token.
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
        """JSON values that determine prompts, decoding and scores, to be hashed into a result.

        `max_prompt_tokens` is not among them: the protocol contains its value resolved for the target.
        """
        return {
            "task": self.name,
            "template": self.template,
            "max_new_tokens": self.max_new_tokens,
            "min_new_tokens": self.min_new_tokens,
            "metric": self.metric,
            "chat": self.chat,
            "stops": list(self.stops),
            "n_turns": 1,  # kept for the hashes of results that have been recorded
            "ignore_eos": self.ignore_eos,
            **({"stop_strings": list(self.stop_strings)} if self.stop_strings else {}),
            "temperatures": {}
            if self.temperature is None
            else {row.id: self.temperature for row in self.rows},
            "protocol": dict(self.protocol),
            "rows": len(self.rows),
            "rows_sha256": rows_sha256(self.rows),
        }


class Measured(WithExamples, ABC):
    """A task without generation: the target is run over given text (perplexity).

    Args:
        name: the task's name.
        rows: the examples, in a fixed order.
    """

    one_prefill = False
    """True if `measure` prefills its examples' contexts once, all together: an evictor's importance scores
    then serve all budgets.
    """

    def size(self, example: Example) -> int:
        """The example's length in any unit: examples of similar size are measured together."""
        return 0

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """JSON values that determine the scores, including `rows` and `rows_sha256`."""

    @abstractmethod
    def measure(self, target: Target, parts: Parts, examples: Sequence[Example]) -> list[dict[str, float]]:
        """Measure examples; one mapping per example: `{"nats": .., "tokens": .., "bytes": ..}`."""

    def score(self, measures: Mapping[str, float], example: Example) -> float | None:
        """The score of an example, 0 to 1, computed from its measurements, or None if it has none."""
        return None


def rows_sha256(rows: Sequence[Example]) -> str:
    """Hash of examples: names and fields."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.id, dict(row.fields)], sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def sequence_id(place: tuple[str, str]) -> int:
    """The key of the random numbers of an example, (task, example): the same in every batch and system."""
    return int.from_bytes(hashlib.sha256("\n".join(place).encode()).digest()[:8]) >> 2  # 62 bits

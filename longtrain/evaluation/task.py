"""What a benchmark's task is to whoever runs it: examples, their prompts, how to generate, and the score."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Example:
    """One question of a task.

    Args:
        id: its name, no other example of the task has it.
        fields: the row as published.
    """

    id: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """A task of a benchmark with its examples.

    Args:
        name: as the benchmark writes it.
        rows: the examples, in the published order.
        template: the prompt; `{field}` stands for a field of the row.
        max_new_tokens: most tokens of an answer.
        metric: name of the metric, for the protocol.
        judge: (what was generated, special tokens left out; example) -> score from 0 to 1. It does the
            benchmark's own post-processing.
        chat: whether the prompt becomes a user's message of the chat template.
        stops: texts whose last token ends an answer, beside the target's own end tokens.
        min_new_tokens: tokens that no end token may stand among.
    """

    name: str
    rows: tuple[Example, ...]
    template: str
    max_new_tokens: int
    metric: str
    judge: Callable[[str, Example], float]
    chat: bool = True
    stops: tuple[str, ...] = ()
    min_new_tokens: int = 0

    def examples(self) -> Iterator[Example]:
        """The examples, in the published order."""
        return iter(self.rows)

    def prompt(self, example: Example) -> str:
        """The text of an example, before truncation and chat template."""
        return self.template.format(**example.fields)

    def score(self, text: str, example: Example) -> float:
        """The score of a generated text, 0 to 1."""
        return self.judge(text, example)

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
        """JSON values that the prompts and scores follow from, to be hashed into a result."""
        return {
            "task": self.name,
            "template": self.template,
            "max_new_tokens": self.max_new_tokens,
            "min_new_tokens": self.min_new_tokens,
            "metric": self.metric,
            "chat": self.chat,
            "stops": list(self.stops),
            "rows": len(self.rows),
            "rows_sha256": self._rows_sha256(),
        }

    def _rows_sha256(self) -> str:
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(json.dumps([row.id, dict(row.fields)], sort_keys=True).encode() + b"\n")
        return digest.hexdigest()

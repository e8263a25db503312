"""The lines of `examples.jsonl`: excerpts of each example's prompt, and the output of every system."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from longtrain.evaluation.analysis.numbers import output, plain
from longtrain.evaluation.analysis.results import by_example
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import Suite
from longtrain.evaluation.task import Example, Measured, Task
from longtrain.systems import System

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]

START_CHARS, END_CHARS = 300, 700
"""Characters shown of a prompt's beginning, and of its end."""


def examples(
    suite: Suite,
    systems: Sequence[System],
    records: Iterable[Record],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: Mapping[str, int],
) -> Iterator[Json]:
    """One mapping for each example with at least one record, in the suite's order.

    Args:
        suite: the suite that ran.
        systems: the systems that ran.
        records: the records of all systems, in any order.
        tokenizer: the target's.
        max_tokens: task -> maximum number of tokens of a prompt's text, from the protocol.

    Raises:
        DataError: two systems had other prompts.
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


def _excerpts(
    task: Task | Measured, example: Example, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None
) -> tuple[str, str]:
    """The first and last characters of the prompt given to the target; empty for tasks without prompts."""
    if not isinstance(task, Task) or max_tokens is None:
        return "", ""
    ids = list(task.encode(example, tokenizer, max_tokens=max_tokens).ids)
    if len(ids) <= START_CHARS + END_CHARS:
        text = str(tokenizer.decode(ids))
        if len(text) <= START_CHARS + END_CHARS:
            return text, ""
        return text[:START_CHARS], text[-END_CHARS:]
    start = str(tokenizer.decode(ids[:START_CHARS]))  # a token decodes to at least a part of a character
    return start[:START_CHARS], str(tokenizer.decode(ids[-END_CHARS:]))[-END_CHARS:]

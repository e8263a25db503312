"""`examples.jsonl`: excerpts of each prompt, what is expected, and every output beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from longtrain.evaluation.figures.outcomes import by_example, numbers_of, plain
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import Suite
from longtrain.evaluation.task import Example, Measured, Task
from longtrain.systems import System

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]

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
    if record.marks is not None:
        values["marks"] = record.marks
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

"""Examples of a RULER task at a stated length for a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from longtrain.errors import ConfigError
from longtrain.evaluation.ruler.questions import DocumentWriter, Questions
from longtrain.evaluation.ruler.sizing import Framing, back_off, largest
from longtrain.evaluation.ruler.sources import Haystack, Vocabulary, vocabulary
from longtrain.evaluation.ruler.tasks import SEED, PromptText, PromptWriter, find_task
from longtrain.evaluation.ruler.writers import (
    CodedWordsWriter,
    CommonWordsWriter,
    NeedleWriter,
    VariableWriter,
)

TOKENS_AT_ONCE = 1 << 18
MOST_AT_ONCE = 32


@dataclass(frozen=True)
class RulerExample:
    """One prompt with its answers.

    Args:
        task: the task's name.
        index: place in the run; with task, length, seed and tokenizer it decides everything else.
        solved: a solved example that stands before the user's message, in a chat turn of its own.
        input: the user's message.
        answer_prefix: what the assistant's message begins with; the model continues it.
        answers: the right answers: all of them are wanted, or any (`metric`).
        length_tokens: prompt, frame, answer prefix and room for the answer; at most the stated length.
        prompt_tokens: the same without room for the answer: what the model reads.
        max_new_tokens: room for the answer.
        metric: `string_match_all` or `string_match_part`.
        size: haystack in the task's units (words, lines or documents).
    """

    task: str
    index: int
    solved: str
    input: str
    answer_prefix: str
    answers: tuple[str, ...]
    length_tokens: int
    prompt_tokens: int
    max_new_tokens: int
    metric: str
    size: int


class Generator:
    """Writes the examples of a task at one length.

    An example depends on task, length, seed, index, tokenizer and sources alone, so that a run can be cut
    into pieces anywhere. The size of the haystack is searched once, on a prompt of its own, and taken back in
    the official steps for examples that turn out too long. Nothing is written before it is asked for.

    Args:
        task: one of `TASKS`.
        framing: tokenizer and chat template; lengths are counted with them.
        length: tokens of prompt and answer together, chat template included.
        seed: of everything drawn.
        haystack: text of the essay tasks; None: the bundled novels.
        words: word lists; None: longtrain's own.
        questions: of `qa_1` (`read_squad`) and `qa_2` (`read_hotpotqa`); needed there.

    Raises:
        ConfigError: an unknown task, a length below 1, or no questions.

    Source: RULER §3 and its generators; section by section in this package's modules.
    """

    def __init__(
        self,
        task: str,
        framing: Framing,
        *,
        length: int,
        seed: int = SEED,
        haystack: Haystack | None = None,
        words: Vocabulary | None = None,
        questions: Questions | None = None,
    ) -> None:
        self.task, self.length, self.seed, self.framing = find_task(task), length, seed, framing
        if length < 1:
            raise ConfigError(f"a RULER length of {length} tokens holds no prompt; pass one of at least 1000")
        self.room = length - self.task.max_new_tokens
        self.writer = self._writer(haystack, words, questions)

    def stream(self, what: int | str) -> str:
        """The seed of an example's random numbers."""
        return f"ruler {self.task.name} {self.length} {self.seed} {what}"

    @cached_property
    def size(self) -> int:
        """The most haystack that fits, measured on a prompt of its own.

        Raises:
            ConfigError: the task does not fit the length.
        """
        stream = self.stream("size")

        def count(size: int) -> int:
            return self.framing.count([self.writer.write(size, 0, stream)])[0]

        least = self.writer.least(0)
        size = largest(count, self.room, least=least, unit=self.writer.unit)
        if size is None:
            raise self._too_short(0, count(least))
        return size

    def examples(self, indices: range) -> Iterator[RulerExample]:
        """The examples of these numbers, counted from 0.

        Raises:
            ConfigError: the task does not fit the length.
            DataError: a source has too little.
        """
        at_once = max(1, min(MOST_AT_ONCE, TOKENS_AT_ONCE // self.length))
        for first in range(indices.start, indices.stop, at_once):
            chunk = range(first, min(first + at_once, indices.stop))
            sizes = [max(self.size, self.writer.least(index)) for index in chunk]
            prompts = [self.writer.write(s, i, self.stream(i)) for s, i in zip(sizes, chunk, strict=True)]
            counts = self.framing.count(prompts)
            for index, own, prompt, tokens in zip(chunk, sizes, prompts, counts, strict=True):
                yield self._fitted(index, own, prompt, tokens)

    def _writer(
        self, haystack: Haystack | None, words: Vocabulary | None, questions: Questions | None
    ) -> PromptWriter:
        task, length, seed, framing = self.task, self.length, self.seed, self.framing
        if task.family == "niah":
            text, lists = haystack or Haystack.bundled(), words or vocabulary()
            return NeedleWriter(task, length, seed=seed, haystack=text, vocabulary=lists)
        if task.family == "variable_tracking":
            return VariableWriter(task, length, stream=self.stream("solved example"), framing=framing)
        if task.family == "common_words_extraction":
            lists = words or vocabulary()
            return CommonWordsWriter(task, length, seed=seed, vocabulary=lists, framing=framing)
        if task.family == "freq_words_extraction":
            return CodedWordsWriter(task, seed=seed, room=self.room - framing.tokens)
        return DocumentWriter(task, seed=seed, questions=questions)

    def _fitted(self, index: int, size: int, prompt: PromptText, tokens: int) -> RulerExample:
        while tokens > self.room:
            if size <= self.writer.least(index):
                raise self._too_short(index, tokens)
            size = back_off(self.writer, size, index)
            prompt = self.writer.write(size, index, self.stream(index))
            tokens = self.framing.count([prompt])[0]
        return RulerExample(
            task=self.task.name,
            index=index,
            solved=prompt.solved,
            input=prompt.input,
            answer_prefix=prompt.answer_prefix,
            answers=prompt.answers,
            length_tokens=tokens + self.task.max_new_tokens,
            prompt_tokens=tokens,
            max_new_tokens=self.task.max_new_tokens,
            metric=self.task.metric,
            size=size,
        )

    def _too_short(self, index: int, tokens: int) -> ConfigError:
        return ConfigError(
            f"RULER task {self.task.name} does not fit a length of {self.length} tokens: the shortest prompt "
            f"of example {index} takes {tokens}, its answer {self.task.max_new_tokens}; pass a length of at "
            f"least {tokens + self.task.max_new_tokens}"
        )

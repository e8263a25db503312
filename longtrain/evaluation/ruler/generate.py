"""Examples of a RULER task at a stated length for a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError
from longtrain.evaluation.ruler.haystack import Haystack
from longtrain.evaluation.ruler.needles import NeedleWriter
from longtrain.evaluation.ruler.questions import Questions, QuestionWriter
from longtrain.evaluation.ruler.sizing import Framing, back_off, largest
from longtrain.evaluation.ruler.tasks import SEED, Draft, Task, Writer, find_task
from longtrain.evaluation.ruler.variables import VariableWriter
from longtrain.evaluation.ruler.vocabulary import Vocabulary, vocabulary
from longtrain.evaluation.ruler.words import CodedWordsWriter, CommonWordsWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS_AT_ONCE = 1 << 18
MOST_AT_ONCE = 32


@dataclass(frozen=True)
class Example:
    """One prompt with its answers.

    Args:
        task: the task's name.
        index: place in the run; with task, length, seed and tokenizer it decides everything else.
        input: the user's message.
        answer_prefix: what the assistant's message begins with; the model continues it.
        answers: the right answers: all of them are wanted, or any (`metric`).
        length_tokens: prompt, frame, answer prefix and room for the answer; at most the stated length.
        prompt_tokens: the same without room for the answer: what the model reads.
        frame_tokens: tokens of the chat template alone.
        max_new_tokens: room for the answer.
        metric: `string_match_all` or `string_match_part`.
        size: haystack in the task's units (words, lines or documents).
    """

    task: str
    index: int
    input: str
    answer_prefix: str
    answers: tuple[str, ...]
    length_tokens: int
    prompt_tokens: int
    frame_tokens: int
    max_new_tokens: int
    metric: str
    size: int

    def to_row(self) -> dict[str, Any]:
        """A row as the official generator writes it (a line of validation.jsonl)."""
        return {
            "index": self.index,
            "input": self.input,
            "outputs": list(self.answers),
            "length": self.length_tokens - self.frame_tokens,
            "length_w_model_temp": self.length_tokens,
            "answer_prefix": self.answer_prefix,
        }


def generate(
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    n: int,
    seed: int = SEED,
    start: int = 0,
    haystack: Haystack | None = None,
    words: Vocabulary | None = None,
    questions: Questions | None = None,
    chat: bool | None = None,
    chat_options: Mapping[str, Any] | None = None,
) -> Iterator[Example]:
    """Examples `start` to `start + n - 1` of a task.

    An example depends on task, length, seed, index, tokenizer and sources alone, so that a run can be cut
    into pieces anywhere. The size of the haystack is searched once, on a prompt of its own, and taken back in
    the official steps for examples that turn out too long.

    Args:
        task: one of `TASKS`.
        tokenizer: the evaluated model's; lengths are counted with it.
        length: tokens of prompt and answer together, chat template included.
        n: how many.
        seed: of everything drawn.
        start: index of the first.
        haystack: text of the essay tasks; None: the bundled novels.
        words: word lists; None: longtrain's own.
        questions: of `qa_1` (`read_squad`) and `qa_2` (`read_hotpotqa`); needed there.
        chat: count and frame with the chat template; None: if the tokenizer has one.
        chat_options: more arguments of the chat template.

    Raises:
        ConfigError: an unknown task, a count or length that cannot be, a length that the task does not fit,
            or no questions.
        DataError: a source has too little.

    Source: RULER §3 and its generators; section by section in this package's modules.
    """
    found = find_task(task)
    if n < 1 or start < 0 or length < 1:
        raise ConfigError(
            f"n={n}, start={start}, length={length}; allowed: n and length from 1, start from 0"
        )
    framing = Framing(tokenizer, chat=chat, options=chat_options)
    run = _Run(found, length, seed, framing)
    writer = run.writer(haystack, words, questions)
    return run.examples(writer, range(start, start + n))


class Generator:
    """Examples of a task at one length by their index; the same ones as `generate` gives.

    Nothing is written before it is asked for, and the size of the haystack is searched once.

    Args:
        task, length, seed, haystack, words, questions: as `generate`.
        framing: tokenizer and chat template.

    Raises:
        ConfigError: see `generate`.
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
        self._run = _Run(find_task(task), length, seed, framing)
        self._writer = self._run.writer(haystack, words, questions)
        self._size: int | None = None

    def example(self, index: int) -> Example:
        """Example number `index`, from 0.

        Raises:
            ConfigError: the task does not fit the length.
            DataError: a source has too little.
        """
        if self._size is None:
            self._size = self._run.size(self._writer)
        (found,) = self._run.examples(self._writer, range(index, index + 1), size=self._size)
        return found


class _Run:
    """One task at one length."""

    def __init__(self, task: Task, length: int, seed: int, framing: Framing) -> None:
        self.task, self.length, self.seed, self.framing = task, length, seed, framing
        self.room = length - task.max_new_tokens

    def stream(self, what: int | str) -> str:
        """The seed of an example's random numbers."""
        return f"ruler {self.task.name} {self.length} {self.seed} {what}"

    def writer(
        self, haystack: Haystack | None, words: Vocabulary | None, questions: Questions | None
    ) -> Writer:
        if self.task.family == "niah":
            text = haystack or Haystack.bundled()
            return NeedleWriter(
                self.task, self.length, seed=self.seed, haystack=text, vocabulary=words or vocabulary()
            )
        if self.task.family == "variable_tracking":
            return VariableWriter(
                self.task, self.length, stream=self.stream("solved example"), framing=self.framing
            )
        if self.task.family == "common_words_extraction":
            return CommonWordsWriter(self.task, self.length, seed=self.seed, vocabulary=words or vocabulary())
        if self.task.family == "freq_words_extraction":
            return CodedWordsWriter(self.task, seed=self.seed, room=self.room - self.framing.tokens)
        return QuestionWriter(self.task, seed=self.seed, questions=questions)

    def examples(self, writer: Writer, indices: range, size: int | None = None) -> Iterator[Example]:
        size = self.size(writer) if size is None else size
        at_once = max(1, min(MOST_AT_ONCE, TOKENS_AT_ONCE // self.length))
        for first in range(indices.start, indices.stop, at_once):
            chunk = range(first, min(first + at_once, indices.stop))
            sizes = [max(size, writer.least(index)) for index in chunk]
            drafts = [writer.write(s, i, self.stream(i)) for s, i in zip(sizes, chunk, strict=True)]
            counts = self.framing.count(drafts)
            for index, own, draft, tokens in zip(chunk, sizes, drafts, counts, strict=True):
                yield self._fitted(writer, index, own, draft, tokens)

    def size(self, writer: Writer) -> int:
        """The most haystack that fits, measured on a prompt of its own."""
        stream = self.stream("size")

        def count(size: int) -> int:
            return self.framing.count([writer.write(size, 0, stream)])[0]

        least = writer.least(0)
        size = largest(count, self.room, least=least, unit=writer.unit)
        if size is None:
            raise self._too_short(0, count(least))
        return size

    def _fitted(self, writer: Writer, index: int, size: int, draft: Draft, tokens: int) -> Example:
        while tokens > self.room:
            if size <= writer.least(index):
                raise self._too_short(index, tokens)
            size = back_off(writer, size, index)
            draft = writer.write(size, index, self.stream(index))
            tokens = self.framing.count([draft])[0]
        return Example(
            task=self.task.name,
            index=index,
            input=draft.input,
            answer_prefix=draft.answer_prefix,
            answers=draft.answers,
            length_tokens=tokens + self.task.max_new_tokens,
            prompt_tokens=tokens,
            frame_tokens=self.framing.tokens,
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

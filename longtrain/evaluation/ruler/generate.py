"""Examples of a RULER task at a stated length for a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from longtrain.errors import ConfigError
from longtrain.evaluation.ruler.questions import Questions
from longtrain.evaluation.ruler.sizing import Framing, Material, PromptText, back_off, largest
from longtrain.evaluation.ruler.sources import Haystack, Vocabulary, vocabulary
from longtrain.evaluation.ruler.tasks import SEED, find_task
from longtrain.evaluation.ruler.writers import WRITERS

TOKENS_AT_ONCE = 1 << 18
MOST_AT_ONCE = 32


@dataclass(frozen=True, kw_only=True)
class RulerExample(PromptText):
    """One prompt with its answers and its length.

    Args:
        index: place in the run; with task, length, seed and tokenizer it decides everything else.
        length_tokens: prompt, frame, answer prefix and room for the answer; at most the stated length.
        prompt_tokens: the same without room for the answer: what the model reads.
        size: haystack in the task's units (words, lines or documents).
    """

    index: int
    length_tokens: int
    prompt_tokens: int
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
        questions: of `qa_1` (SQuAD) and `qa_2` (HotpotQA); needed there.

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
        known = find_task(task)
        if length < 1:
            raise ConfigError(f"a RULER length of {length} tokens holds no prompt; pass one of at least 1000")
        haystack, words = haystack or Haystack.bundled(), words or vocabulary()
        self.of = Material(known, length, seed, framing, haystack, words, questions)
        self.task, self.length, self.framing, self.room = known, length, framing, self.of.room
        self.stream = self.of.stream
        self.writer = WRITERS[known.family](self.of)

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

    def _fitted(self, index: int, size: int, prompt: PromptText, tokens: int) -> RulerExample:
        while tokens > self.room:
            if size <= self.writer.least(index):
                raise self._too_short(index, tokens)
            size = back_off(self.writer, size, index)
            prompt = self.writer.write(size, index, self.stream(index))
            tokens = self.framing.count([prompt])[0]
        return RulerExample(
            **vars(prompt),
            index=index,
            length_tokens=tokens + self.task.max_new_tokens,
            prompt_tokens=tokens,
            size=size,
        )

    def _too_short(self, index: int, tokens: int) -> ConfigError:
        return ConfigError(
            f"RULER task {self.task.name} does not fit a length of {self.length} tokens: the shortest prompt "
            f"of example {index} takes {tokens}, its answer {self.task.max_new_tokens}; pass a length of at "
            f"least {tokens + self.task.max_new_tokens}"
        )

"""Examples of a RULER task at a stated length for a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from longtrain.errors import ConfigError
from longtrain.evaluation.ruler.sizing import Material, PromptText, back_off, largest
from longtrain.evaluation.ruler.writers import WRITERS


@dataclass(frozen=True, kw_only=True)
class RulerExample(PromptText):
    """One prompt with its answers and its length.

    Args:
        index: number in the run; with task, length, seed and tokenizer it determines everything else.
        length_tokens: tokens of prompt, chat template, answer prefix and room for the answer; at most the
            stated length.
        prompt_tokens: the same without room for the answer: the tokens that the model reads.
        size: size of the haystack in the task's units (words, lines or documents).
    """

    index: int
    length_tokens: int
    prompt_tokens: int
    size: int


class Generator:
    """Generates the examples of a task at one length.

    An example depends only on its material and its index, so that a run can be divided anywhere. The
    haystack's size is searched once, on a separate prompt, and reduced in the official steps for
    examples that turn out too long.

    Args:
        of: task, length, tokenizer and source texts.

    Raises:
        ConfigError: the task needs questions and there are none.

    Source: RULER §3 and its generators; section by section in this package's modules.
    """

    def __init__(self, of: Material) -> None:
        self.of = of
        self.writer = WRITERS[of.task.family](of)

    @cached_property
    def size(self) -> int:
        """The largest haystack that fits, measured on a separate prompt.

        Raises:
            ConfigError: the task does not fit the length.
        """
        stream = self.of.stream("size")

        def count(size: int) -> int:
            return self.of.framing.count(self.writer.write(size, 0, stream))

        least = self.writer.least(0)
        size = largest(count, self.of.room, least=least, unit=self.writer.unit)
        if size is None:
            raise self._too_short(0, count(least))
        return size

    def example(self, index: int) -> RulerExample:
        """Generate example number `index`, counted from 0.

        Raises:
            ConfigError: the task does not fit the length.
            DataError: a source has too little text.
        """
        least, stream = self.writer.least(index), self.of.stream(index)
        size = max(self.size, least)
        prompt = self.writer.write(size, index, stream)
        while (tokens := self.of.framing.count(prompt)) > self.of.room:
            if size <= least:
                raise self._too_short(index, tokens)
            size = back_off(self.writer, size, index)
            prompt = self.writer.write(size, index, stream)
        return RulerExample(
            **vars(prompt),
            index=index,
            length_tokens=tokens + self.of.task.max_new_tokens,
            prompt_tokens=tokens,
            size=size,
        )

    def _too_short(self, index: int, tokens: int) -> ConfigError:
        answer = self.of.task.max_new_tokens
        return ConfigError(
            f"RULER task {self.of.task.name} does not fit a length of {self.of.length} tokens: the shortest "
            f"prompt of example {index} takes {tokens}, its answer {answer}; pass a length of at least "
            f"{tokens + answer}"
        )

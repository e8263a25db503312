"""The source material of RULER's prompts, their length in tokens, and the search for the largest haystack."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from longtrain.evaluation.prompts import around_message, uses_chat
from longtrain.evaluation.ruler.questions import Questions
from longtrain.evaluation.ruler.sources import Haystack, Vocabulary, vocabulary
from longtrain.evaluation.ruler.tasks import SEED, SHORT, RulerSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BISECT_EVERY = 4
STEP, SHORT_STEP = 10, 5
"""Reduction step of the official generators for prompts that are too long: from 4096 tokens on, and below."""


@dataclass(frozen=True)
class PromptText:
    """A prompt whose tokens have not been counted yet.

    Args:
        input: the user's message.
        answer_prefix: the beginning of the assistant's message, which the model continues.
        answers: the right answers; all of them are required, or any (`RulerSpec.metric`).
        solved: a solved example before the user's message, in a chat turn of its own.
    """

    input: str
    answer_prefix: str
    answers: tuple[str, ...]
    solved: str = ""


class Framing:
    """Wraps prompts in the chat template, or in the tokenizer's own special tokens.

    The input is the user's message and the answer prefix begins the assistant's, as in the official runs.

    Args:
        tokenizer: the evaluated model's.
        chat: use its chat template; None: if it has one.
        options: further arguments of the template, such as `enable_thinking`.

    Raises:
        ConfigError: `chat` is True and there is no template.
        DataError: the template does not render the user's message once.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat = uses_chat(tokenizer, chat)
        self.before, self.after = around_message(tokenizer, **dict(options or {})) if self.chat else ("", "")
        self.tokens = self._count(self.before + self.after)
        """Tokens of the frame alone."""

    def text(self, prompt: str, answer_prefix: str = "", solved: str = "") -> str:
        """The whole prompt: solved example, user's message in the template, beginning of the answer."""
        return f"{solved}{self.before}{prompt}{self.after}{answer_prefix}"

    def ids(self, prompt: str, answer_prefix: str = "", solved: str = "") -> list[int]:
        """Token ids of the whole prompt; there are `RulerExample.prompt_tokens` of them."""
        return self._encode(self.text(prompt, answer_prefix, solved))

    def count(self, prompt: PromptText) -> int:
        """Number of tokens of a prompt, template and answer prefix included."""
        return self._count(self.text(prompt.input, prompt.answer_prefix, prompt.solved))

    def count_text(self, text: str) -> int:
        """Number of tokens of a text without a template."""
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def _encode(self, text: str) -> list[int]:
        """Token ids of a text; the chat template writes its own special tokens."""
        return list(self.tokenizer(text, add_special_tokens=not self.chat, verbose=False).input_ids)

    def _count(self, text: str) -> int:
        return len(self._encode(text))


@dataclass(frozen=True)
class Material:
    """The source material of a task's prompts at one length.

    Args:
        task: one of `TASKS`.
        length: tokens of prompt and answer together, chat template included.
        framing: wraps prompts and counts tokens.
        seed: the run's seed; it orders needles, lists and documents, the same in every example.
        haystack: the text of essay haystacks.
        words: the source of keys and word lists.
        questions: the questions, for tasks that need them.
    """

    task: RulerSpec
    length: int
    framing: Framing
    seed: int = SEED
    haystack: Haystack = field(default_factory=Haystack.bundled)
    words: Vocabulary = field(default_factory=vocabulary)
    questions: Questions | None = None

    @property
    def room(self) -> int:
        """Tokens available for the prompt, its template included."""
        return self.length - self.task.max_new_tokens

    def stream(self, what: int | str) -> str:
        """The seed string of an example's random numbers."""
        return f"ruler {self.task.name} {self.length} {self.seed} {what}"


class PromptWriter(ABC):
    """Writes prompts with a haystack of a given size in words, lines or documents.

    Sizes are `least + k * unit`; `step` is the official generator's reduction of prompts that are too long.
    """

    unit = 1

    def __init__(self, of: Material) -> None:
        self.of, self.seed, self.options = of, of.seed, of.task.options
        self.template, self.prefix = of.task.template, of.task.answer_prefix
        self.short = of.length < SHORT
        self.step = STEP

    @abstractmethod
    def least(self, index: int) -> int:
        """The smallest size that example `index` can have."""

    @abstractmethod
    def write(self, size: int, index: int, stream: str) -> PromptText:
        """Write example `index` with a haystack of `size`. All randomness comes from
        `random.Random(stream)`.
        """


def largest(count: Callable[[int], int], limit: int, *, least: int, unit: int = 1) -> int | None:
    """Find the largest size `least + k * unit` whose count is at most `limit`.

    The official generator bisects; here probes are placed by interpolation, since counts grow
    nearly in proportion to sizes, with an occasional bisection step that bounds the number of probes.

    Args:
        count: size -> tokens of the prompt; need not be strictly increasing.
        limit: the maximum number of tokens.
        least: the smallest size.
        unit: the distance between sizes.

    Returns: the size, which fits while the next larger one does not; None if `least` does not fit.
    """
    low, at_low = 0, count(least)
    if at_low > limit:
        return None
    high = at_high = 0
    probes = 0
    slope = at_low / (least / unit + 1)
    while high == 0 or high - low > 1:
        if high == 0:
            probe = low + max(1, int((limit - at_low) / max(slope, 1e-3)) + 1)
        elif probes % _BISECT_EVERY == _BISECT_EVERY - 1:
            probe = (low + high) // 2
        else:
            probe = low + round((limit - at_low + 0.5) * (high - low) / max(at_high - at_low, 1))
            probe = min(max(probe, low + 1), high - 1)
        tokens = count(least + probe * unit)
        probes += 1
        if tokens > limit:
            high, at_high = probe, tokens
        else:
            slope = max((tokens - at_low) / (probe - low), slope / 8)
            low, at_low = probe, tokens
    return least + low * unit


def back_off(writer: PromptWriter, size: int, index: int) -> int:
    """The next size to try after a prompt was too long: one step less, as in the official generator.

    Note: below one step the official generator loops forever; here the size is reduced by eighths.
    """
    least = writer.least(index)
    smaller = (
        size - writer.step if size > writer.step else size - max(1, size // (8 * writer.unit)) * writer.unit
    )
    return max(least, smaller)

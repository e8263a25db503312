"""What prompts are written from, how long one is for the evaluated model, and how much haystack fits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError
from longtrain.evaluation.prompts import around_message
from longtrain.evaluation.ruler.questions import Questions
from longtrain.evaluation.ruler.sources import Haystack, Vocabulary
from longtrain.evaluation.ruler.tasks import SHORT, RulerSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BISECT_EVERY = 4
STEP, SHORT_STEP = 10, 5
"""What the official generators take off a prompt that is too long, from 4096 tokens on and below."""


@dataclass(frozen=True)
class PromptText:
    """A prompt that is written but not yet counted.

    Args:
        input: the user's message.
        answer_prefix: what the assistant's message begins with; the model continues it.
        answers: the right answers: all of them are wanted, or any (`RulerSpec.metric`).
        solved: a solved example that stands before the user's message, in a chat turn of its own.
    """

    input: str
    answer_prefix: str
    answers: tuple[str, ...]
    solved: str = ""


class Framing:
    """What stands around a prompt: the chat template, or the tokenizer's own special tokens.

    The input is the user's message and the answer prefix begins the assistant's, as in the official runs.

    Args:
        tokenizer: the evaluated model's.
        chat: use its chat template; None: if it has one.
        options: more arguments of the template, such as `enable_thinking`.

    Raises:
        ConfigError: a chat template was asked for and there is none.
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
        self.chat = bool(tokenizer.chat_template) if chat is None else chat
        if self.chat and not tokenizer.chat_template:
            raise ConfigError(
                "chat=true, but the tokenizer has no chat template; pass chat=false, or give one"
            )
        self.before, self.after = around_message(tokenizer, **dict(options or {})) if self.chat else ("", "")
        self.tokens = self._count([self.before + self.after])[0]
        """Tokens of the frame alone."""

    def text(self, prompt: str, answer_prefix: str = "", solved: str = "") -> str:
        """What the model reads: a solved example, the user's message in its frame, the answer's beginning."""
        return f"{solved}{self.before}{prompt}{self.after}{answer_prefix}"

    def ids(self, prompt: str, answer_prefix: str = "", solved: str = "") -> list[int]:
        """What the model reads, in tokens; `RulerExample.prompt_tokens` of them."""
        return list(self._encode([self.text(prompt, answer_prefix, solved)])[0])

    def count(self, prompts: Sequence[PromptText]) -> list[int]:
        """Tokens of each prompt, frame and answer prefix included."""
        return self._count([self.text(one.input, one.answer_prefix, one.solved) for one in prompts])

    def count_text(self, text: str) -> int:
        """Tokens of a text without any frame."""
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids; the chat template writes its own special tokens."""
        return self.tokenizer(texts, add_special_tokens=not self.chat, verbose=False).input_ids

    def _count(self, texts: list[str]) -> list[int]:
        return [len(ids) for ids in self._encode(texts)]


@dataclass(frozen=True)
class Material:
    """What the prompts of a task at a length are written from.

    Args:
        task: one of `TASKS`.
        length: tokens of prompt and answer together, chat template included.
        seed: of the run; it orders needles, lists and documents, alike in every example.
        framing: counts tokens.
        haystack: the text of essay haystacks.
        words: where keys and word lists come from.
        questions: of the tasks with questions.
    """

    task: RulerSpec
    length: int
    seed: int
    framing: Framing
    haystack: Haystack
    words: Vocabulary
    questions: Questions | None = None

    @property
    def room(self) -> int:
        """Tokens for the prompt, its frame included."""
        return self.length - self.task.max_new_tokens

    def stream(self, what: int | str) -> str:
        """The seed of an example's random numbers."""
        return f"ruler {self.task.name} {self.length} {self.seed} {what}"


class PromptWriter(ABC):
    """Writes prompts of a wanted size: words, lines or documents of haystack, by task.

    Sizes are `least + k * unit`; `step` is what the official generator takes off a prompt that is too long.
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
        """Example `index` of a size. All chance comes from `random.Random(stream)`."""


def largest(count: Callable[[int], int], limit: int, *, least: int, unit: int = 1) -> int | None:
    """The largest size `least + k * unit` whose count is at most `limit`.

    The official generator halves an interval; here probes are placed by interpolation, since counts grow
    nearly in proportion to sizes, with a halving now and then so that it always ends soon.

    Args:
        count: tokens of a prompt of a size; need not grow strictly.
        limit: most tokens.
        least: the smallest size.
        unit: distance of sizes.

    Returns: the size; it fits and the next larger one does not. None if `least` does not fit.
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
    """The next size to try after a prompt turned out too long: a step less, as the official generator does.

    Note: below one step the official generator draws again for ever; here it goes on by eighths.
    """
    least = writer.least(index)
    smaller = (
        size - writer.step if size > writer.step else size - max(1, size // (8 * writer.unit)) * writer.unit
    )
    return max(least, smaller)

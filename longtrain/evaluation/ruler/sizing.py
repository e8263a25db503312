"""How long a prompt is for the evaluated model, and how much haystack fits a length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError
from longtrain.evaluation.prompts import around_message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from longtrain.evaluation.ruler.tasks import PromptText, PromptWriter

_BISECT_EVERY = 4


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

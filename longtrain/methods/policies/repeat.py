"""Builds requests to repeat a prompt, chunk by chunk, in the target's own chat format (KVzip)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from longtrain.data.chat.mask import apply_template
from longtrain.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from longtrain.targets.model import Target

FIRST = "Repeat the previous context exactly."
LATER = "Repeat the part of the previous context exactly, starting with"
"""Requests for the first chunk, and for a later one, to which the end of the chunk before is appended."""

_BEFORE = 8
"""Tokens of the chunk before that a later request quotes."""

LONGEST_REQUEST = 256
"""Most tokens of a request, chat headers included."""


@dataclass(frozen=True)
class Repeat:
    """A prompt's chunks and the tokens that repeat them.

    Args:
        chunks: start and stop of each chunk in the prompt.
        requests: tokens that ask for each chunk.
        prompt: tokens of the prompt.
    """

    chunks: tuple[tuple[int, int], ...]
    requests: tuple[tuple[int, ...], ...]
    prompt: tuple[int, ...]

    def rows(self, turn: int) -> list[int]:
        """Return request and answer of a chunk; empty if the prompt has no such chunk."""
        if turn >= len(self.chunks):
            return []
        return [*self.requests[turn], *self.prompt[slice(*self.chunks[turn])]]


def repeat_of(target: Target, prompt: Sequence[int], *, chunk: int) -> Repeat:
    """Split a prompt without its chat header into chunks, and build their requests.

    Args:
        target: the model whose tokenizer encodes the requests.
        prompt: tokens of the prompt.
        chunk: most tokens of a chunk.

    Raises:
        ConfigError: there is no tokenizer, or its chat headers are too long.
    """
    tokenizer = target.require_tokenizer()
    header, answer, turn = _chat(tokenizer, str(getattr(tokenizer, "chat_template", None) or ""))
    start = min(_common(prompt, header), len(prompt) - 1)
    chunks = tuple((at, min(at + chunk, len(prompt))) for at in range(start, len(prompt), chunk))
    # the prompt ends where the assistant would begin: its user turn is closed
    closed = bool(answer) and list(prompt[-len(answer) :]) == answer
    opening = turn if closed else ""
    requests = []
    for nth, (at, _) in enumerate(chunks):
        text = f"{opening or chr(10) * 2}{LATER if nth else FIRST}"
        quoted = prompt[max(start, at - _BEFORE) : at] if nth else ()
        requests.append((*tokenizer.encode(text, add_special_tokens=False), *quoted, *answer))
    longest = max(map(len, requests))
    if longest > LONGEST_REQUEST:
        raise ConfigError(
            f"a request of evict=kvzip has {longest} tokens in the chat template of {target.info.name}; "
            f"allowed: {LONGEST_REQUEST}; pass a shorter one: target.chat_template=FILE"
        )
    return Repeat(chunks, tuple(requests), tuple(prompt))


@lru_cache(maxsize=4)
def _chat(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[list[int], list[int], str]:
    """Return the ids before a first user message, those from there to the answer, and the text between turns.

    Without a chat template (empty): nothing, a line break, nothing. They are rendered once for each template,
    not for every prompt of a training step. `template` tells them apart: it is the text of the tokenizer's,
    or of its mapping of several.
    """
    if not template:
        return [], tokenizer.encode("\n", add_special_tokens=False), ""
    user, answer, again = "dummy-question", "dummy-answer", "dummy-request"

    def render(*messages: tuple[str, str]) -> str:
        turns = [{"role": role, "content": content} for role, content in messages]
        return str(
            apply_template(
                tokenizer,
                turns,
                name="of repeat",
                add_generation_prompt=True,
                tokenize=False,
                enable_thinking=False,
            )
        )

    before, after = render(("user", user)).split(user)
    between = render(("user", user), ("assistant", answer), ("user", again))
    turn = between.split(answer)[1].split(again)[0]
    encode = tokenizer.encode
    return encode(before, add_special_tokens=False), encode(after, add_special_tokens=False), turn


def _common(prompt: Sequence[int], header: Sequence[int]) -> int:
    """Count the leading tokens of the prompt that equal the header's."""
    for at, (ours, theirs) in enumerate(zip(prompt, header, strict=False)):
        if ours != theirs:
            return at
    return min(len(prompt), len(header))

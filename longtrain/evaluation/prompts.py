"""Converts a prompt's text to token ids: cut in the middle if too long, then put into the chat template.

`around_message` and `chat_ids` return what the template puts before and after a user's message.

Shapes: T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from longtrain.data.chat.mask import apply_template
from longtrain.data.retrieval.synthetic import ChatIds
from longtrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TEMPLATE = (
    "this task's prompt is a chat message and the tokenizer has no chat template; set "
    "target.chat_template, or run without chat (the result then has a note)"
)

TODAY = datetime(2024, 7, 26, tzinfo=UTC)
"""The date given to templates that ask for it, so that prompts do not depend on the day. It is the
default date of Llama 3.1's template.
"""
_DIRECTIVES = "aAbBcdHIjmMpSuUwWxXyYzZ"


@dataclass(frozen=True)
class Encoded:
    """A prompt as token ids.

    Args:
        ids: tokens in the cache when KV entries are evicted.
        cut: True if the middle was left out.
        after: tokens read after eviction, such as a question that the policy must not see.
    """

    ids: tuple[int, ...]
    cut: bool = False
    after: tuple[int, ...] = ()


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool, max_tokens: int) -> Encoded:
    """Encode a prompt's text, cut to `max_tokens` if it is too long.

    As in the official runner, the text is measured with its special tokens and without the chat template. If
    it is too long, its first and last `max_tokens // 2` tokens are turned back into text, special tokens left
    out, and joined; that text is tokenised anew, so that the prompt can come out a few tokens longer or
    shorter than `max_tokens`, the chat template not counted.

    Args:
        tokenizer: the target's.
        text: the filled template of a task.
        chat: put the text into the chat template as a user's message, with thinking off.
        max_tokens: the maximum number of tokens of the text.

    Raises:
        ConfigError: `max_tokens` below 2, or `chat` without a chat template.

    Source: LongBench, pred.py, `get_pred`.
    """
    if max_tokens < 2:
        raise ConfigError(f"max_tokens={max_tokens} leaves no prompt; allowed: 2 or more")
    if chat and not tokenizer.chat_template:
        raise ConfigError(NO_TEMPLATE)
    ids: Any = tokenizer(text, verbose=False).input_ids
    cut = len(ids) > max_tokens
    if cut:
        half = max_tokens // 2
        halves = ids[:half], ids[-half:]
        text = "".join(str(tokenizer.decode(part, skip_special_tokens=True)) for part in halves)
    if chat:
        return Encoded(encode_chat(tokenizer, [{"role": "user", "content": text}]), cut)
    if cut:
        ids = tokenizer(text, verbose=False).input_ids
    return Encoded(tuple(ids), cut)


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], *, thinking: bool = False
) -> tuple[int, ...]:
    """The tokens of a conversation up to the beginning of the assistant's next answer.

    Args:
        tokenizer: the target's.
        messages: each with `role` and `content`, the last one the user's.
        thinking: turn thinking on in templates that have the option.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    whole = render_chat(tokenizer, messages, enable_thinking=thinking)
    ids: Any = tokenizer(whole, add_special_tokens=False, verbose=False).input_ids
    return tuple(ids)


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], **options: Any
) -> str:
    """Render a conversation up to the beginning of the assistant's next answer, independent of the date.

    Args:
        tokenizer: the target's.
        messages: each with `role` and `content`.
        options: variables passed to the template.

    Raises:
        ConfigError: the tokenizer has no chat template.
        DataError: the template fails.
    """
    if not tokenizer.chat_template:
        raise ConfigError(NO_TEMPLATE)
    template = str(tokenizer.get_chat_template())
    return str(
        apply_template(
            tokenizer,
            [dict(message) for message in messages],
            name="of the suite",
            chat_template=_dated(template) if "strftime_now" in template else template,
            add_generation_prompt=True,
            tokenize=False,
            **options,
        )
    )


def _dated(template: str) -> str:
    """Prefix a template with a macro `strftime_now` that returns `TODAY` and takes precedence over the
    renderer's.

    The line break after the macro belongs to its last tag (templates are rendered with `trim_blocks`), so
    the template begins on a line of its own, as it would alone.
    """
    known = {f"%{mark}{one}" for one in _DIRECTIVES for mark in ("-", "")}
    replacements = "".join(f" | replace({one!r}, {TODAY.strftime(one)!r})" for one in sorted(known))
    return f"{{% macro strftime_now(format) -%}}{{{{ format{replacements} }}}}{{%- endmacro %}}\n{template}"


def around_message(tokenizer: PreTrainedTokenizerBase, **options: Any) -> tuple[str, str]:
    """The text before a user's message, and the text after it up to the beginning of the answer.

    Args:
        tokenizer: a tokenizer with a chat template.
        options: variables of the template, such as `enable_thinking`.

    Raises:
        ConfigError: there is no chat template.
        DataError: the template does not render the message exactly once.
    """
    template = str(tokenizer.chat_template)
    mark = f"MESSAGE{hashlib.sha256(template.encode()).hexdigest()[:16]}"  # no template contains its own hash
    rendered = render_chat(tokenizer, [{"role": "user", "content": mark}], **options)
    parts = rendered.split(mark)
    if len(parts) != 2:
        raise DataError(
            f"the chat template renders the user's message {len(parts) - 1} times, prompts need it once; "
            "pass chat=false where the suite has it, or another target.chat_template"
        )
    before, after = parts
    return before, after


def uses_chat(tokenizer: PreTrainedTokenizerBase, chat: bool | None) -> bool:
    """True if a suite's prompts are put into the chat template.

    Args:
        tokenizer: the target's.
        chat: `suite.chat`; None: True if there is a template.

    Raises:
        ConfigError: `chat` is True and there is no template.
    """
    if chat and not tokenizer.chat_template:
        raise ConfigError(
            "suite.chat=true and the tokenizer has no chat template; set target.chat_template, or pass "
            "suite.chat=false"
        )
    return bool(tokenizer.chat_template) if chat is None else chat


def chat_note(tokenizer: PreTrainedTokenizerBase, chat: bool | None) -> str:
    """The note in results about the chat template; for arguments and errors see `uses_chat`."""
    if uses_chat(tokenizer, chat):
        return "prompts in the target's chat template"
    return f"without chat template: {'suite.chat=false' if chat is False else 'the tokenizer has none'}"


def chat_ids(
    tokenizer: PreTrainedTokenizerBase, *, chat: bool | None = None, without: str = "\nAnswer:"
) -> ChatIds:
    """The tokens around a user's turn, taken from the chat template, or plain text without one.

    Args:
        tokenizer: the target's.
        chat: see `uses_chat`.
        without: text after the user's message if there is no template.

    Raises:
        ConfigError: see `uses_chat`.
        DataError: see `around_message`.
    """
    if not uses_chat(tokenizer, chat):
        before, after = tokenizer.bos_token or "", without
    else:
        before, after = around_message(tokenizer, enable_thinking=False)
    user, assistant = (tuple(tokenizer.encode(part, add_special_tokens=False)) for part in (before, after))
    return ChatIds(user, assistant, ())

"""What a chat template puts before and after a user's message, as text and as tokens."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from longtrain.data.retrieval.synthetic import ChatIds
from longtrain.errors import DataError
from longtrain.evaluation.prompts import render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def around_message(tokenizer: PreTrainedTokenizerBase, **options: Any) -> tuple[str, str]:
    """The text before a user's message, and that after it up to where the answer begins.

    Args:
        tokenizer: with a chat template.
        options: variables of the template, such as `enable_thinking`.

    Raises:
        ConfigError: there is no chat template.
        DataError: the template does not render the message, or does more than once.
    """
    template = str(tokenizer.chat_template)
    mark = f"MESSAGE{hashlib.sha256(template.encode()).hexdigest()[:16]}"  # no template holds its own hash
    rendered = render_chat(tokenizer, [{"role": "user", "content": mark}], **options)
    parts = rendered.split(mark)
    if len(parts) != 2:
        raise DataError(
            f"the chat template renders the user's message {len(parts) - 1} times, prompts need it once; "
            "pass chat=false where the suite has it, or another target.chat_template"
        )
    before, after = parts
    return before, after


def chat_ids(tokenizer: PreTrainedTokenizerBase) -> ChatIds:
    """The tokens around a user's turn, read off the chat template; plain text where there is none."""
    if not tokenizer.chat_template:
        before, after = tokenizer.bos_token or "", "\nAnswer:"
    else:
        before, after = around_message(tokenizer, enable_thinking=False)
    user, assistant = (tuple(tokenizer.encode(part, add_special_tokens=False)) for part in (before, after))
    return ChatIds(user, assistant, ())

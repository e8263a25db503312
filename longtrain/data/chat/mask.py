"""Computes label masks of conversations (the tokens that the assistant wrote) and checks them.

`mask_T[t]` is True if token t is a label, predicted from the tokens before it. Objectives pair it with the
hidden state at t - 1. A mask that is shifted against the tokens decodes to something else than the
assistant's words; `audit` checks this.

Shapes: T tokens of one document.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from longtrain.data.chat.bounded import MEMORY, Bounded, Failed
from longtrain.data.chat.prefixes import Prefixes
from longtrain.data.read import encoder
from longtrain.data.read.adapters import Message
from longtrain.errors import DataError

MARKS = re.compile(r"{%-?\s*generation\s*-?%}")

ARRAYS = {"input_ids": np.int64, "assistant_masks": np.bool_}
"""Arrays taken from a tokenised conversation, under the tokenizer's names, with their dtypes."""

_renderer: tuple[Any, Bounded] | None = None
"""The last tokenizer used, and the child process that applies its chat template."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as tokens: `ids_T` int64, `mask_T` bool."""

    ids_T: np.ndarray
    mask_T: np.ndarray


def check_template(tokenizer: Any, how: str) -> None:
    """Refuse a tokenizer whose chat template does not mark the assistant's tokens.

    Args:
        tokenizer: the tokenizer of the target.
        how: `template` or `prefix`.

    Raises:
        DataError: no chat template, or `how` is `template` and the template has no generation marks.
    """
    template = _template(tokenizer)
    if not template:
        raise DataError(
            f"tokenizer {_name(tokenizer)} has no chat template, but the data holds conversations; "
            f"use a chat model's tokenizer, or prepare plain text (data=text data.text=PATH)"
        )
    if how == "template" and not MARKS.search(template):
        raise DataError(
            f"the chat template of {_name(tokenizer)} has no {{% generation %}} marks, so the assistant's "
            f"tokens cannot be told from the rest; put {{% generation %}} ... {{% endgeneration %}} around "
            f"the assistant's content and end marker in its chat_template.jinja, or pass data.mask=prefix"
        )


def usual(tokenizer: Any) -> str:
    """The default of `data.mask`: by generation marks if the chat template has them, else by prefix."""
    template = _template(tokenizer)
    return "prefix" if template and not MARKS.search(template) else "template"


def render(tokenizer: Any, messages: Sequence[Message], *, how: str, name: str) -> Rendered:
    """Tokenise a conversation and compute its label mask.

    Args:
        tokenizer: the tokenizer of the target.
        messages: turns with `role` and `content`.
        how: `template`: the template's generation marks delimit the assistant's text. `prefix`: the turns are
            rendered one more at a time, and each text must be a prefix of the whole; if its tokens are not,
            because a token crosses the edge of an answer, answers are tokenised separately. `all`: every
            token is a label.
        name: name of the conversation in error messages.

    Raises:
        DataError: the template refuses the conversation, or (`prefix`) rewrites earlier turns.
    """
    if how == "prefix":
        return _render_by_prefix(tokenizer, messages, name)
    if how == "all":
        ids_T = _ids(tokenizer, messages, name)
        return Rendered(ids_T, np.ones(len(ids_T), bool))
    encoded = apply_template(
        tokenizer,
        messages,
        name=name,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        add_generation_prompt=False,
    )
    return Rendered(np.asarray(encoded["input_ids"], np.int64), np.asarray(encoded["assistant_masks"], bool))


def render_prompt(tokenizer: Any, messages: Sequence[Message], *, name: str) -> np.ndarray:
    """Return the ids of a conversation up to the start of the assistant's answer, int64."""
    return _ids(tokenizer, messages, name, add_generation_prompt=True)


def render_next(
    tokenizer: Any, messages: Sequence[Message], before: Sequence[int], *, name: str
) -> list[int]:
    """Return the ids of `render_prompt`, of which those of the prompt before the last answer are known.

    A tokenizer splits a text at special tokens before anything else. So only what begins at the last special
    token of the earlier prompt is tokenised, if the template repeats that prompt and its ids show that the
    split is such; else the whole.

    Args:
        tokenizer: the tokenizer of the target.
        messages: turns, the last two an answer and a question.
        before: ids of the prompt that the answer was written for (`render_prompt` or this function).
        name: name of the conversation in error messages.

    Raises:
        DataError: the template refuses the conversation.
    """
    options: dict[str, Any] = {"name": name, "tokenize": False, "add_generation_prompt": True}
    whole = str(apply_template(tokenizer, messages, **options))
    earlier = str(apply_template(tokenizer, messages[:-2], **options))

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    marks = {number: str(mark) for number, mark in tokenizer.added_tokens_decoder.items() if mark.special}
    last = next((at for at in range(len(before) - 1, -1, -1) if before[at] in marks), None)
    if last is not None and whole.startswith(earlier):
        start = earlier.rfind(marks[before[last]])
        if start >= 0 and encode(earlier[start:]) == list(before[last:]):
            return [*before[:last], *encode(whole[start:])]
    return encode(whole)


def apply_template(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], *, name: str, **options: Any
) -> Any:
    """Apply a tokenizer's chat template to a conversation.

    A template is a program that may be wrong, hostile or endless, so it runs in a child process with limits
    of time and memory.

    Args:
        tokenizer: the tokenizer of the target.
        messages: turns with `role` and `content`.
        name: name of the conversation in error messages.
        options: further arguments of the tokenizer's `apply_chat_template`.

    Raises:
        DataError: the template fails, or takes too long.
    """
    global _renderer
    if _renderer is None or _renderer[0] is not tokenizer:
        if _renderer is not None:
            _renderer[1].close()
        prefixes = Prefixes(tokenizer) if Prefixes.serves(tokenizer) else None
        _renderer = tokenizer, Bounded(partial(_rendered, tokenizer, prefixes), MEMORY // encoder.sharing)
    # tokenizer attributes that the template reads may have changed since the process was forked
    template = getattr(tokenizer, "chat_template", None)
    now = {"chat_template": template} if isinstance(template, str) else {}
    options = {**getattr(tokenizer, "special_tokens_map", {}), **now, **options}
    try:
        return _renderer[1](list(messages), **options)
    except Failed as error:
        raise DataError(
            f"conversation {name}: the chat template refuses it ({error}); "
            f"roles are {', '.join(str(message['role']) for message in messages)}"
        ) from None


def _rendered(
    tokenizer: Any, prefixes: Prefixes | None, messages: list[Mapping[str, str]], **options: Any
) -> Any:
    """Return the result of `apply_chat_template`: text, or arrays of its tokens, which are quick to send."""
    if prefixes and options.get("tokenize") and not options.get("return_assistant_tokens_mask"):
        text = tokenizer.apply_chat_template(messages, **{**options, "tokenize": False})
        return {"input_ids": prefixes.encode(text)}
    found = tokenizer.apply_chat_template(messages, **options)
    if not isinstance(found, Mapping):
        return found
    return {name: np.asarray(found[name], kind) for name, kind in ARRAYS.items() if name in found}


def spans(mask_T: np.ndarray) -> list[tuple[int, int]]:
    """Return the runs of consecutive labels as (begin, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask_T.astype(np.int8), [0]])))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


def audit(tokenizer: Any, rendered: Rendered, messages: Sequence[Message], *, name: str) -> str:
    """Check that the labels decode to exactly the assistant's words, each followed only by its end marker.

    The labels of a blank answer are its end marker, or none.

    Args:
        tokenizer: the tokenizer of the target.
        rendered: the conversation's tokens and mask.
        messages: turns that the tokens were made from.
        name: name of the conversation in error messages.

    Returns:
        The end marker behind the last answer, among the labels; empty if there is none.

    Raises:
        DataError: a span is missing, cut, or shifted against the assistant's words.
    """
    marker = ""
    for text, content in _paired(tokenizer, rendered, messages, name):
        rest = _after(text, content)
        if rest is None or _without_marks(tokenizer, rest):
            raise DataError(
                f"conversation {name}: labels do not line up with the answer: they read {_cut(text)}, the "
                f"answer is {_cut(content)}; each label must be the assistant's own token (mask[t] is about "
                f"token t), then its end marker; check the template's generation marks, or pass "
                f"data.mask=prefix"
            )
        marker = rest.strip()
    return marker


def _paired(
    tokenizer: Any, rendered: Rendered, messages: Sequence[Message], name: str
) -> list[tuple[str, str]]:
    """Pair the text of each run of labels with its answer; a blank answer without labels is skipped."""
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    texts = [
        tokenizer.decode(rendered.ids_T[begin:end].tolist(), skip_special_tokens=False)
        for begin, end in spans(rendered.mask_T)
    ]
    if len(texts) == len(answers):
        return list(zip(texts, answers, strict=True))
    filled = sum(bool(answer.strip()) for answer in answers)
    pairs: list[tuple[str, str]] = []
    of_blank = len(texts) - filled
    for answer in answers:
        if len(pairs) == len(texts):
            break
        text = texts[len(pairs)]
        if not answer.strip():
            if of_blank <= 0 or _without_marks(tokenizer, text):
                continue
            of_blank -= 1
        pairs.append((text, answer))
    if of_blank or len(pairs) != len(texts):
        raise DataError(
            f"conversation {name}: {len(texts)} stretches of labels for {len(answers)} answers, of which "
            f"{len(answers) - filled} are blank; the chat template's generation marks do not fit it (drop "
            "the row, or pass data.mask=prefix)"
        )
    return pairs


def check_share(labels: int, tokens: int, documents: int, what: str) -> None:
    """Refuse a corpus of conversations in which no token, or every token, is a label.

    Raises:
        DataError: a share of 0% or 100%.
    """
    if documents and labels == 0:
        raise DataError(
            f"0% of the {tokens} tokens in {documents} {what} are labels: nothing would be learned; check "
            f"the chat template's generation marks and the roles in the data"
        )
    if documents and labels == tokens:
        raise DataError(
            f"100% of the {tokens} tokens in {documents} {what} are labels, prompts too; check where the "
            f"chat template's generation marks begin, or say that this is meant with data.mask=all"
        )


def _render_by_prefix(tokenizer: Any, messages: Sequence[Message], name: str) -> Rendered:
    whole = _ids(tokenizer, messages, name)
    mask_T = np.zeros(len(whole), bool)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render_prompt(tokenizer, messages[:turn], name=name)
        last = turn + 1 == len(messages)
        through = whole if last else _ids(tokenizer, messages[: turn + 1], name)
        for part in (before, through):
            if len(part) > len(whole) or not np.array_equal(part, whole[: len(part)]):
                return _render_by_text(tokenizer, messages, name)
        mask_T[len(before) : len(through)] = True
    return Rendered(whole, mask_T)


def _render_by_text(tokenizer: Any, messages: Sequence[Message], name: str) -> Rendered:
    """Tokenise each answer separately from its surroundings, as it is when the target generates it.

    Tokenised as a whole, the white space at the start of an answer may merge with the end of the header into
    one token, which the target never sees when it reads the header alone.
    """
    whole = str(apply_template(tokenizer, messages, name=name, tokenize=False))
    parts: list[tuple[str, bool]] = []
    done = 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked: dict[str, Any] = {"name": name, "tokenize": False, "add_generation_prompt": True}
        before = str(apply_template(tokenizer, messages[:turn], **asked))
        through = str(apply_template(tokenizer, messages[: turn + 1], name=name, tokenize=False))
        if not (through.startswith(before) and whole.startswith(through) and len(before) >= done):
            raise DataError(
                f"conversation {name}: data.mask=prefix does not work with this chat template: up to "
                f"turn {turn + 1} it is rendered otherwise than within the whole; add generation marks"
            )
        parts += [(whole[done : len(before)], False), (whole[len(before) : len(through)], True)]
        done = len(through)
    parts.append((whole[done:], False))
    ids = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text, _ in parts]
    ids_T = np.concatenate([np.asarray(one, np.int64) for one in ids])
    if tokenizer.decode(ids_T.tolist()) != tokenizer.decode(
        tokenizer(whole, add_special_tokens=False).input_ids
    ):
        raise DataError(
            f"conversation {name}: data.mask=prefix does not work with this tokenizer, which reads a text in "
            "parts otherwise than as a whole; put generation marks into its chat_template.jinja"
        )
    labelled = [np.full(len(one), label) for one, (_, label) in zip(ids, parts, strict=True)]
    return Rendered(ids_T, np.concatenate(labelled))


def _ids(
    tokenizer: Any, messages: Sequence[Message], name: str, *, add_generation_prompt: bool = False
) -> np.ndarray:
    """Return the ids of a conversation, int64."""
    options = {"tokenize": True, "return_dict": True, "add_generation_prompt": add_generation_prompt}
    return np.asarray(apply_template(tokenizer, messages, name=name, **options)["input_ids"], np.int64)


def _after(text: str, content: str) -> str | None:
    """Return the labelled text after the answer, or None if the text does not begin with the answer."""
    for start in (text, text.removeprefix(" ")):
        for answer in (content, content.strip()):
            if start.startswith(answer):
                return start[len(answer) :]
    return None


def _without_marks(tokenizer: Any, text: str) -> str:
    """Return the text without special and added tokens and without surrounding white space."""
    for token in sorted({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}, key=len, reverse=True):
        text = text.replace(token, "")
    return text.strip()


def _template(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template or ""


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__


def _cut(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}")

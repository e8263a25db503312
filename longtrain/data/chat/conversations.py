"""Tokenises conversations and labels every answer, or only the last one with all before it as the prompt.

Shapes: T tokens of one conversation.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from longtrain.data.chat import mask as masks
from longtrain.data.chat.prompts import PromptDocument
from longtrain.data.config import DataConfig
from longtrain.data.read.adapters import Document, Message
from longtrain.errors import DataError
from longtrain.log import get_logger

log = get_logger(__name__)

AUDIT_FIRST, AUDIT_EVERY = 200, 50

T = TypeVar("T")


@dataclass
class Conversations:
    """Tokenises conversations with the chat template, limits their length, and checks their labels.

    Args:
        config: the mixture.
        tokenizer: the target's.
        limit: largest number of tokens of a conversation; None: no limit.
        counts: counters of tokenised, shortened and skipped conversations, which are incremented.
    """

    config: DataConfig
    tokenizer: Any
    limit: int | None
    counts: Counter[str]
    seen: int = 0
    ready: deque[Any] = field(default_factory=deque)
    """What another process has rendered of the next conversation, in the order in which it is needed."""
    made: list[Any] = field(default_factory=list)
    """What was rendered for this conversation."""

    def __post_init__(self) -> None:
        if self.config.mask == "auto":
            self.config = replace(self.config, mask=masks.usual(self.tokenizer))

    def of(
        self, document: Document, *, written: bool, ready: Iterable[Any] = ()
    ) -> tuple[np.ndarray, np.ndarray] | PromptDocument | None:
        """Return a conversation with its labels, or as a prompt where only its last answer is one, or None.

        Args:
            document: a document with messages.
            written: the target writes the last answer.
            ready: what `rendered_ahead` gives; the rest is rendered now.

        Raises:
            DataError: as for `labelled` and `prompt`.
        """
        self.ready, self.made = deque(ready), []
        if written or self.config.labels == "last_answer":
            return self.prompt(document, recorded=not written)
        return self.labelled(document)

    def labelled(self, document: Document) -> tuple[np.ndarray, np.ndarray] | None:
        """Return ids and mask of a conversation, every answer a label; None if it is skipped (and counted).

        A blank answer contributes its end marker as a label, if the template marks it.

        Raises:
            DataError: the chat template marks the wrong tokens as the assistant's.
        """
        messages = list(document.messages or ())
        if not messages or messages[-1]["role"] != "assistant":
            self.counts["unanswered"] += 1
            return None
        if self.config.mask != "all" and not any(_answers(messages)):
            self.counts["empty"] += 1
            return None
        rendered = self._render(messages, document.name)
        over = 0 if self.limit is None else len(rendered.ids_T) - self.limit
        if over > 0 and self.config.long_documents == "truncate" and self.config.mask != "all":
            messages = self._do(shorten, messages, over)
            rendered = self._render(messages, document.name)
            self.counts["truncated"] += 1
        self._check(rendered, messages, document.name)
        self.count(len(rendered.ids_T), int(rendered.mask_T.sum()))
        return rendered.ids_T, rendered.mask_T

    def prompt(self, document: Document, *, recorded: bool) -> PromptDocument | None:
        """Return a conversation up to its last answer; `long_documents=truncate` shortens its longest turn.

        Args:
            document: a document with messages.
            recorded: keep the last answer, up to `answer_tokens`, as the response.

        Returns:
            The prompt, or None if the conversation is skipped (and counted).

        Raises:
            DataError: it is too long and `long_documents` is `error`, or the template refuses it.
        """
        messages = list(document.messages or ())
        last = messages[-1:]
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages or (recorded and last[0]["role"] != "assistant"):
            self.counts["unanswered"] += 1
            return None
        if recorded and not any(_answers(last)):
            self.counts["empty"] += 1
            return None
        asked = self._fitted(messages, document.name)
        if asked is None:
            return None
        messages, ids_T = asked
        answer_T = None
        if recorded:
            whole = self._render([*messages, *last], document.name)
            self._check(whole, [*messages, *last], document.name)
            if not whole.mask_T.any():
                self.counts["unlabelled"] += 1
                return None
            begin, end = masks.spans(whole.mask_T)[-1]
            ids_T, answer_T = (
                whole.ids_T[:begin],
                whole.ids_T[begin : min(end, begin + self.config.answer_tokens)],
            )
        return PromptDocument(document, ids_T, self._begin(messages, ids_T, document.name), answer_T)

    def count(self, tokens: int, labels: int) -> None:
        """Count a conversation's tokens and labels; check the share of labels once enough are counted."""
        self.counts["conversations"] += 1
        self.counts["chat tokens"] += tokens
        self.counts["chat labels"] += labels
        if self.counts["conversations"] == AUDIT_FIRST:
            self.check_share()

    def check_share(self) -> None:
        """Refuse conversations in which no token, or every token, is a label.

        Raises:
            DataError: a share of 0% or 100%.
        """
        if self.config.mask != "all":
            labels, tokens = self.counts["chat labels"], self.counts["chat tokens"]
            masks.check_share(labels, tokens, self.counts["conversations"], "conversations")

    def _render(self, messages: list[Message], name: str) -> masks.Rendered:
        return self._do(masks.render, messages, how=self.config.mask, name=name)

    def _do(self, work: Callable[..., T], *args: Any, **options: Any) -> T:
        """Return what `work` gives for the tokenizer, as another process has found it, or found now."""
        self.made.append(self.ready.popleft() if self.ready else work(self.tokenizer, *args, **options))
        return self.made[-1]  # type: ignore[no-any-return]

    def _check(self, rendered: masks.Rendered, messages: list[Message], name: str) -> None:
        """Audit the labels of the first conversations and of a sample of the others."""
        self.seen += 1
        if self.config.mask == "all" or (self.seen > AUDIT_FIRST and self.seen % AUDIT_EVERY):
            return
        if self.seen > AUDIT_FIRST or (rendered.mask_T.any() and not rendered.mask_T.all()):
            marker = masks.audit(self.tokenizer, rendered, messages, name=name)
            if not marker and not self.counts["endless"]:
                log.warning(
                    "answers end without an end marker among the labels, so when to stop is not learned; "
                    "put it inside the chat template's generation marks"
                )
            self.counts["endless"] += not marker

    def _fitted(self, messages: list[Message], name: str) -> tuple[list[Message], np.ndarray] | None:
        """Return the prompt's turns and tokens within the length limit; None if it is skipped."""
        ids_T = self._do(masks.render_prompt, messages, name=name)
        room = len(ids_T) if self.limit is None else self.limit - self.config.answer_tokens
        if len(ids_T) > room and self.config.long_documents == "truncate":
            self.counts["truncated"] += 1
            messages = self._do(shorten, messages, len(ids_T) - room)
            ids_T = self._do(masks.render_prompt, messages, name=name)
        if len(ids_T) > room and self.config.long_documents == "error":
            raise DataError(
                f"the prompt of {name} has {len(ids_T)} tokens, the limit is {room} "
                f"(data.max_doc_tokens or the target's context, less data.answer_tokens); shorten it, or "
                f"pass data.long_documents=truncate"
            )
        if len(ids_T) > room:
            self.counts["long"] += 1
            return None
        return messages, ids_T

    def _begin(self, messages: list[Message], ids_T: np.ndarray, name: str) -> int:
        """Return the first label's index: the answer's start, or with `question=response` the question's."""
        if self.config.question == "prompt":
            return len(ids_T)
        *context, asked = messages
        question = asked.get("question", "")
        if question and asked["content"].endswith(question) and asked["content"] != question:
            before = {**asked, "content": asked["content"].removesuffix(question).rstrip()}
            without_T = self._do(masks.render_prompt, [*context, before], name=name)
        elif any(message["role"] != "system" for message in context):
            without_T = self._do(masks.render, context, how="all", name=name).ids_T
        else:
            self.counts["inseparable"] += 1
            return len(ids_T)
        n = min(len(without_T), len(ids_T))
        differ = np.flatnonzero(without_T[:n] != ids_T[:n])
        return max(1, int(differ[0]) if len(differ) else n)


def rendered_ahead(
    config: DataConfig, limit: int | None, written: bool, tokenizer: Any, document: Document
) -> list[Any]:
    """Return what `Conversations.of` has rendered of a conversation, in one of the processes of an `Encoder`.

    It ends with what fails, which is then done once more, and its error raised, by the process that asks.
    """
    # none of the first ones, and so none that is audited: that is done in the order of all conversations
    here = Conversations(config, tokenizer, limit, Counter(), seen=AUDIT_FIRST)
    with suppress(DataError):
        here.of(document, written=written)
    return here.made


def _answers(messages: list[Message]) -> list[str]:
    """Return the assistant's answers, stripped of surrounding white space."""
    return [message["content"].strip() for message in messages if message["role"] == "assistant"]


def shorten(tokenizer: Any, messages: list[Message], over: int) -> list[Message]:
    """Cut at least `over` tokens out of the middle of the longest turn that is not the assistant's."""
    asked = [i for i, message in enumerate(messages) if message["role"] != "assistant"]
    if not asked:
        return messages
    longest = max(asked, key=lambda i: len(messages[i]["content"]))
    ids = tokenizer(messages[longest]["content"], add_special_tokens=False, verbose=False)["input_ids"]
    keep = max(0, len(ids) - over - 16)
    head, tail = ids[: keep // 2], ids[len(ids) - (keep - keep // 2) :]
    content = f"{tokenizer.decode(head)} ... {tokenizer.decode(tail)}" if keep else "..."
    return [{**m, "content": content} if i == longest else m for i, m in enumerate(messages)]

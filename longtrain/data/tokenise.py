"""Documents to tokens: render, tokenise, mask, limit and check, batch by batch.

Shapes: T tokens of one document.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longtrain.data import mask as masks
from longtrain.data.adapters import Document, Message
from longtrain.data.config import DataConfig, SourceConfig
from longtrain.data.prepared import Writer
from longtrain.data.respond import Answers, Generate, respond
from longtrain.data.sources import Inputs, documents
from longtrain.errors import ConfigError, DataError
from longtrain.log import get_logger

log = get_logger(__name__)

BATCH_CHARS = 4_000_000
BATCH_DOCUMENTS = 512
AUDIT_FIRST, AUDIT_EVERY = 200, 50
DROPS = {
    "short": "shorter than data.min_doc_tokens",
    "long": "longer than the limit and not to be shortened",
    "unanswered": "conversations that do not end with an answer",
    "unlabelled": "without any label",
}
Tokens = tuple[np.ndarray, np.ndarray]
"""ids_T int64 and mask_T bool."""
Made = tuple[Document, np.ndarray, np.ndarray]
"""A document with its ids_T and mask_T."""


@dataclass
class Tokenise:
    """Turns sources into documents of a `Writer`, and counts what it meets.

    Args:
        config: the mixture.
        tokenizer: the target's.
        limit: longest document, tokens; None: none.
        generate: writes answers, for `answers: target`.
        answers: those already written.
    """

    config: DataConfig
    tokenizer: Any
    limit: int | None
    generate: Generate | None
    answers: Answers
    counts: Counter[str] = field(default_factory=Counter)
    nearest_val: tuple[int, int] | None = None

    def write(self, writer: Writer, sources: list[tuple[SourceConfig, Inputs]], bar: Any) -> None:
        """All sources' documents, tokenised and checked.

        Raises:
            DataError: nothing is left to train on.
        """
        synthetic = [(i, source) for i, (source, _) in enumerate(sources) if source.reader == "synthetic"]
        for index, (source, found) in enumerate(sources):
            if source.reader == "synthetic":
                continue
            before = len(writer.starts)
            for batch in _batches(bar(documents(source, found), f"{source.reader} {source.where}")):
                self._add(writer, index, self._tokens(batch))
            self._check_share()
            if len(writer.starts) == before:
                raise DataError(
                    f"data source {source.reader} {source.where} gave no document; {self.summary()}"
                )
        for index, source in synthetic:
            self._add(writer, index, bar(self._written(writer, source), f"synthetic {source.where}"))
        if self.nearest_val is not None and not any(writer.val) and len(writer.val) > 1:
            writer.val[self.nearest_val[1]] = True
        if all(writer.val):
            raise DataError(f"data '{self.config.name}' has no document to train on; {self.summary()}")

    def summary(self) -> str:
        """What was read and left out, in words."""
        dropped = [f"{self.counts[key]} {text}" for key, text in DROPS.items() if self.counts[key]]
        shortened = [f"{self.counts['truncated']} shortened"] if self.counts["truncated"] else []
        words = ", ".join([*dropped, *shortened]) or "all kept"
        return f"read {self.counts['documents']} documents: {words}"

    def _check_share(self) -> None:
        if self.config.mask != "all":
            labels, tokens = self.counts["chat labels"], self.counts["chat tokens"]
            masks.check_share(labels, tokens, self.counts["conversations"], "conversations")

    def _add(self, writer: Writer, source: int, items: Iterable[Made]) -> None:
        for document, ids_T, mask_T in items:
            if len(ids_T) < self.config.min_doc_tokens:
                self.counts["short"] += 1
                continue
            if not mask_T[1:].any():
                self.counts["unlabelled"] += 1
                continue
            val = document.val
            if val is None and self.config.val_fraction:
                draw = hashlib.sha256(f"{self.config.seed}:{source}:{document.name}".encode()).digest()
                place = int.from_bytes(draw[:8], "big")
                val = place < self.config.val_fraction * 2**64
                if self.nearest_val is None or place < self.nearest_val[0]:
                    self.nearest_val = (place, len(writer.starts))
            writer.add(ids_T, mask_T, name=document.name, kind=document.kind, source=source, val=bool(val))

    def _tokens(self, batch: list[Document]) -> Iterator[Made]:
        """Ids and mask of each document that is kept."""
        self.counts["documents"] += len(batch)
        texts = iter(self._encode([document.text for document in batch if document.text is not None]))
        written = self._answers([document for document in batch if document.messages])
        for document in batch:
            if document.text is not None:
                ids_T = next(texts)
                item = (ids_T, np.ones(len(ids_T), bool))
            elif document.messages is not None:
                made = next(written) if document.messages else None
                if made is None:
                    continue
                item = made
            else:
                item = (_some(document.ids_T), _some(document.mask_T))
            kept = self._limited(document, *item)
            if kept is not None:
                yield document, *kept

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        if not texts:
            return []
        encoded = self.tokenizer(
            texts, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )["input_ids"]
        end = [self.tokenizer.eos_token_id] if self.config.append_eos else []
        if end == [None]:
            raise ConfigError(
                "data.append_eos=true, but the tokenizer has no end-of-sequence token; set it to false"
            )
        return [np.asarray([*ids, *end], np.int64) for ids in encoded]

    def _limited(self, document: Document, ids_T: np.ndarray, mask_T: np.ndarray) -> Tokens | None:
        """Apply the limit to a document's tokens; None: left out."""
        if self.limit is None or len(ids_T) <= self.limit or self.config.long_documents == "split":
            return ids_T, mask_T
        if self.config.long_documents == "error":
            raise DataError(
                f"document {document.name} has {len(ids_T)} tokens, the limit is {self.limit} "
                f"(data.max_doc_tokens, or the target's context); shorten it, or pass "
                f"data.long_documents=split or truncate"
            )
        if document.messages is not None and self.config.mask != "all":
            self.counts["long"] += 1
            return None
        self.counts["truncated"] += 1
        return ids_T[: self.limit], mask_T[: self.limit]

    def _answers(self, batch: list[Document]) -> Iterator[Tokens | None]:
        """Ids and mask of each conversation, or None where it is left out."""
        if self.config.answers == "target":
            yield from self._answered_by_target(batch)
            return
        if batch:
            masks.check_template(self.tokenizer, self.config.mask)
        for document in batch:
            messages = list(_some(document.messages))
            if messages[-1]["role"] != "assistant":
                self.counts["unanswered"] += 1
                yield None
                continue
            rendered, messages = self._fitted(messages, document.name)
            count = self.counts["conversations"] = self.counts["conversations"] + 1
            if self._to_audit(rendered, count):
                self._note_end(masks.audit(self.tokenizer, rendered, messages, name=document.name))
            self.counts["chat tokens"] += len(rendered.ids_T)
            self.counts["chat labels"] += int(rendered.mask_T.sum())
            if count == AUDIT_FIRST:
                self._check_share()
            yield rendered.ids_T, rendered.mask_T

    def _note_end(self, marker: str) -> None:
        if not marker and not self.counts["endless"]:
            log.warning(
                "answers end without an end marker among the labels, so when to stop is not learned; put it "
                "inside the chat template's generation marks"
            )
        self.counts["endless"] += not marker

    def _to_audit(self, rendered: masks.Rendered, count: int) -> bool:
        """The first conversations and a sample of the rest; those all or none are first left to the share."""
        if self.config.mask == "all" or (count > AUDIT_FIRST and count % AUDIT_EVERY):
            return False
        return count > AUDIT_FIRST or bool(rendered.mask_T.any() and not rendered.mask_T.all())

    def _answered_by_target(self, batch: list[Document]) -> Iterator[Tokens | None]:
        if batch and self.generate is None:
            raise DataError("data.answers=target needs the target to write answers; run: longtrain prepare")
        prompts = [self._prompt(document) for document in batch]
        wanted = [prompt for prompt in prompts if prompt]
        answers = iter(respond(wanted, self.generate, self.answers) if self.generate else ())
        for prompt in prompts:
            if prompt is None:
                yield None
                continue
            answer = next(answers)
            mask_T = np.zeros(len(prompt) + len(answer), bool)
            mask_T[len(prompt) :] = True
            self.counts["conversations"] += 1
            self.counts["chat tokens"] += len(mask_T)
            self.counts["chat labels"] += len(answer)
            yield np.asarray([*prompt, *answer], np.int64), mask_T

    def _prompt(self, document: Document) -> list[int] | None:
        """What the target is to answer: the conversation without its last answer; None: left out."""
        messages = list(_some(document.messages))
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            self.counts["unanswered"] += 1
            return None
        ids = masks.render_prompt(self.tokenizer, messages, name=document.name).tolist()
        room = len(ids) if self.limit is None else self.limit - self.config.answer_tokens
        if len(ids) > room and self.config.long_documents == "truncate":
            self.counts["truncated"] += 1
            messages = shorten(self.tokenizer, messages, len(ids) - room)
            ids = masks.render_prompt(self.tokenizer, messages, name=document.name).tolist()
        if len(ids) > room and self.config.long_documents == "error":
            raise DataError(
                f"the prompt of {document.name} has {len(ids)} tokens, the limit is {room} "
                f"(data.max_doc_tokens or the target's context, less data.answer_tokens); shorten it, or "
                f"pass data.long_documents=truncate"
            )
        if len(ids) > room:
            self.counts["long"] += 1
            return None
        return ids

    def _fitted(self, messages: list[Message], name: str) -> tuple[masks.Rendered, list[Message]]:
        """A conversation rendered, its longest prompt shortened in the middle where that is asked for."""
        rendered = masks.render(self.tokenizer, messages, how=self.config.mask, name=name)
        over = 0 if self.limit is None else len(rendered.ids_T) - self.limit
        if over <= 0 or self.config.long_documents != "truncate" or self.config.mask == "all":
            return rendered, messages
        shorter = shorten(self.tokenizer, messages, over)
        rendered = masks.render(self.tokenizer, shorter, how=self.config.mask, name=name)
        self.counts["truncated"] += 1
        return rendered, shorter

    def _written(self, writer: Writer, source: SourceConfig) -> Iterator[Made]:
        from longtrain.data.retrieval import written

        for name, kind, ids_T, mask_T in written(source, writer, self.tokenizer, seed=self.config.seed):
            self.counts["documents"] += 1
            yield Document(name, source.kind or kind, val=source.split == "val"), ids_T, mask_T


def shorten(tokenizer: Any, messages: list[Message], over: int) -> list[Message]:
    """Cut `over` tokens (and a few more) out of the middle of the longest turn not the assistant's."""
    asked = [i for i, message in enumerate(messages) if message["role"] != "assistant"]
    if not asked:
        return messages
    longest = max(asked, key=lambda i: len(messages[i]["content"]))
    ids = tokenizer(messages[longest]["content"], add_special_tokens=False, verbose=False)["input_ids"]
    keep = max(0, len(ids) - over - 16)
    head, tail = ids[: keep // 2], ids[len(ids) - (keep - keep // 2) :]
    content = f"{tokenizer.decode(head)} ... {tokenizer.decode(tail)}" if keep else "..."
    return [{**m, "content": content} if i == longest else m for i, m in enumerate(messages)]


def _batches(stream: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in stream:
        batch.append(document)
        size += len(document.text or "") + sum(len(message["content"]) for message in document.messages or ())
        if size >= BATCH_CHARS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _some(value: Any) -> Any:
    if value is None:
        raise DataError("a document holds neither text, messages nor ids; give it one of them")
    return value

"""Turns documents into tokens and label masks: tokenises, limits and checks them, batch by batch.

Shapes: T tokens of one document.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from longtrain.data.chat.conversations import Conversations, rendered_ahead
from longtrain.data.chat.held_out import HeldOut
from longtrain.data.chat.prompts import Answers, Generate, PromptDocument, check_room, cut_text, respond
from longtrain.data.config import DataConfig, SourceConfig
from longtrain.data.packing.again import SourceAgain
from longtrain.data.packing.prepared import PreparedWriter
from longtrain.data.read.adapters import Document
from longtrain.data.read.encoder import Chat, Encoder
from longtrain.data.read.kept import KeptText
from longtrain.data.read.sources import BATCH_DOCUMENTS, Inputs, batches, documents, groups, held_out
from longtrain.data.retrieval.synthetic import check_synthetic, synthetic_documents
from longtrain.errors import DataError
from longtrain.log import get_logger
from longtrain.progress import follow

log = get_logger(__name__)

LOGGED = 3
"""Number of skipped documents (`data.on_error=skip`) whose errors are logged."""
DROPS = {
    "short": "shorter than data.min_doc_tokens",
    "long": "longer than the limit and not to be shortened",
    "unanswered": "conversations that do not end with an answer",
    "unlabelled": "without any label",
    "empty": "with an empty answer",
    "bad": "in error",
}
NOTES = {
    "truncated": "shortened",
    "inseparable": "kept whole, their question not told from the context",
}
Tokens = tuple[np.ndarray, np.ndarray]
"""ids_T int64 and mask_T bool."""
Made = tuple[Document, np.ndarray, np.ndarray]
"""A document with its ids_T and mask_T."""


@dataclass
class Tokenise:
    """Tokenises the sources' documents into a `PreparedWriter`, and counts skipped and changed ones.

    Args:
        config: the mixture.
        tokenizer: the target's.
        limit: tokens of the longest document; None: no limit.
        generate: generates answers, for `answers: target`.
        answers: the answers generated so far.
        known_ids: number of token ids that the target has embeddings for.
        again: index of a source -> its documents, where prepared data has them already.

    `read` has what was counted in each source, by its index.
    """

    config: DataConfig
    tokenizer: Any
    limit: int | None
    generate: Generate | None
    answers: Answers
    known_ids: int
    again: Mapping[int, SourceAgain] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    texts: KeptText | None = None
    errors: list[DataError] = field(default_factory=list)
    read: dict[int, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.conversations = Conversations(self.config, self.tokenizer, self.limit, self.counts)
        self.held_out = HeldOut(self.config.val_fraction, self.config.seed)
        self.report = self._skip if self.config.on_error == "skip" else _refuse

    def write(self, writer: PreparedWriter, sources: list[tuple[SourceConfig, Inputs]]) -> None:
        """Write all sources' documents, tokenised and checked.

        Raises:
            DataError: nothing is left to train on.
        """
        synthetic = [(i, source) for i, (source, _) in enumerate(sources) if source.reader == "synthetic"]
        self.texts = KeptText(writer.folder) if synthetic else None
        self._check(sources)
        with self._encoder() as encoder:
            for index, (source, found) in enumerate(sources):
                if source.reader == "synthetic":
                    continue
                before = Counter(self.counts)
                if index in self.again:
                    self._write_again(writer, index, source, self.again[index])
                else:
                    self._write_source(writer, encoder, index, source, found)
                self.read[index] = dict(self.counts - before)
        for index, source in synthetic:
            made = self._follow(self._synthetic(source), source)
            for items in groups(made, BATCH_DOCUMENTS):
                self._add(writer, index, self._with_answers(items, source))
        self.held_out.complete(writer)
        if all(writer.val):
            raise DataError(f"data '{self.config.name}' has no document to train on; {self.summary()}")

    def _write_source(
        self, writer: PreparedWriter, encoder: Encoder, index: int, source: SourceConfig, found: Inputs
    ) -> None:
        """Write one source's documents."""
        before = self.counts["kept"] + self.counts["text only"]
        files = len(found["files"]) if source.reader == "text" else None
        stream = batches(self._follow(self._read(source, found), source, total=files))
        for batch, made in encoder.batches(stream, self._chat(source)):
            self._add(writer, index, self._tokens(batch, made, index, source))
        self.conversations.check_share()
        if self.counts["kept"] + self.counts["text only"] == before:
            first = f"; the first: {self.errors[0]}" if self.errors else ""
            raise DataError(
                f"data source {source.reader} {source.where} gave no document; {self.summary()}{first}"
            )

    def _write_again(
        self, writer: PreparedWriter, index: int, source: SourceConfig, again: SourceAgain
    ) -> None:
        """Write one source's documents as they were tokenised before; what is held out is chosen anew."""
        log.info(
            "source=%s %s tokens are those of data=%s", source.reader, source.where, again.prepared.folder
        )
        self.counts.update({name: count for name, count in again.read.items() if name != "kept"})
        val = held_out(source)
        for name, kind, ids_T, mask_T in again.documents():
            self._add(writer, index, [(Document(name, kind, val=val), ids_T, mask_T)])
        self.conversations.check_share()

    def _check(self, sources: list[tuple[SourceConfig, Inputs]]) -> None:
        """Refuse settings that cannot work with any documents, before a source is read."""
        if any(self._prompted(source) for source, _ in sources):
            check_room(self.config, self.limit)
        for source, _ in sources:
            if source.reader == "synthetic":
                check_synthetic(source, self.tokenizer, self.config)

    def answer(self, sources: list[tuple[SourceConfig, Inputs]]) -> None:
        """Have the target generate the missing answers, or the missing ones of the part of `answers`."""
        self.answers.path.parent.mkdir(parents=True, exist_ok=True)
        self.texts = KeptText(self.answers.path.parent)
        self._check(sources)
        with self._encoder() as encoder:
            for index, (source, found) in enumerate(sources):
                if source.reader != "synthetic":
                    stream = batches(self._follow(self._read(source, found), source))
                    for batch, made in encoder.batches(stream, self._chat(source)):
                        deque(self._tokens(batch, made, index, source), maxlen=0)
        for source, _ in sources:
            if source.reader == "synthetic":
                for items in groups(self._follow(self._synthetic(source), source), BATCH_DOCUMENTS):
                    deque(self._with_answers(items, source), maxlen=0)

    def summary(self) -> str:
        """Return the numbers of documents that were tokenised and skipped, in words."""
        reasons = {**DROPS, **NOTES}
        words = ", ".join(f"{self.counts[key]} {text}" for key, text in reasons.items() if self.counts[key])
        several = any(source.prompts > 1 for source in self.config.sources) and self.config.prompt_tokens
        cut = ", several prompts from each text" if several else ""
        return f"read {self.counts['documents']} documents{cut}: {words or 'all kept'}"

    def _skip(self, error: DataError) -> None:
        """Count a skipped document, and log the first ones."""
        self.counts["bad"] += 1
        if len(self.errors) < LOGGED:
            self.errors.append(error)
            log.warning("left out: %s", error)

    def _read(self, source: SourceConfig, found: Inputs) -> Iterator[Document]:
        """Yield the documents of a source; errors are counted, and state the key to type.

        A file of an installed package that cannot be read is left out, whatever `on_error` is, since it is
        not the user's to mend.
        """
        refused = self._skip if found.get("packages") else self.report
        typed = rf"pass '++data.sources.{self.config.sources.index(source)}.columns=\1'"

        def report(error: DataError) -> None:
            refused(DataError(re.sub(r"set columns: (\{.*?\}) for this source", typed, str(error))))
            self.counts["documents"] += 1

        return documents(source, found, report, answered=not self.config.written_by_target(source))

    def _prompted(self, source: SourceConfig) -> bool:
        """Return True if this source's documents become pairs of prompt and response."""
        last_only = self.config.labels == "last_answer" or self.config.prompt_tokens is not None
        return last_only or self.config.written_by_target(source)

    def _add(self, writer: PreparedWriter, source: int, items: Iterable[Made]) -> None:
        for document, ids_T, mask_T in items:
            if len(ids_T) < self.config.min_doc_tokens:
                self.counts["short"] += 1
                continue
            if not mask_T[1:].any():
                self.counts["unlabelled"] += 1
                continue
            self.counts["kept"] += 1
            val = self.held_out.add(document, source, len(writer.starts))
            writer.add(ids_T, mask_T, name=document.name, kind=document.kind, source=source, val=val)

    def _embedded(self, item: Made | PromptDocument) -> bool:
        """Return True if the target has embeddings for all tokens of a document; else report an error."""
        if isinstance(item, PromptDocument):
            document, parts = item.document, [item.ids_T, *([] if item.answer_T is None else [item.answer_T])]
        else:
            document, parts = item[0], [item[1]]
        ids_T = np.concatenate(parts)
        wrong_T = ids_T[(ids_T < 0) | (ids_T >= self.known_ids)]
        if not len(wrong_T):
            return True
        token = int(wrong_T[0])
        shown = f" ({self.tokenizer.decode([token])!r})" if 0 <= token < len(self.tokenizer) else ""
        self.report(
            DataError(
                f"document {document.name} holds token id {token}{shown}, outside the vocabulary of "
                f"{self.known_ids} tokens that the target has embeddings for; take the tokenizer files and "
                "the chat template that came with the target's weights, or leave such documents out with "
                "data.on_error=skip"
            )
        )
        return False

    def _encoder(self) -> Encoder:
        """Return what tokenises the running text of all sources, and much of their conversations."""
        config = self.config
        return Encoder(self.tokenizer, workers=config.tokenise_workers, append_eos=config.append_eos)

    def _chat(self, source: SourceConfig) -> Chat:
        """Return what a process of the encoder does with each conversation of a source."""
        return partial(rendered_ahead, self.config, self.limit, self.config.written_by_target(source))

    def _tokens(
        self, batch: list[Document], made: Iterator[Any], index: int, source: SourceConfig
    ) -> Iterator[Made]:
        """Yield ids and mask of each document that is not skipped; `made` is what the encoder gives."""
        self.counts["documents"] += len(batch)
        items: list[Made | PromptDocument] = []
        for document in batch:
            if document.text is not None:
                ids_T = next(made).astype(np.int64)
                self._keep_text(document, ids_T, index)
                items += self._cut(document, ids_T, source)
            elif document.messages is not None:
                ready = next(made) or ()
                try:
                    items += self._conversation(document, source, ready)
                except DataError as error:
                    self.report(error)
            else:
                assert document.ids_T is not None and document.mask_T is not None
                if document.mask_T[1:].all():
                    self._keep_text(document, document.ids_T, index)
                items.append((document, document.ids_T, document.mask_T))
        for document, ids_T, mask_T in self._with_answers(items, source):
            try:
                kept = self._limited(document, ids_T, mask_T)
            except DataError as error:
                self.report(error)
                continue
            if kept is not None:
                yield document, *kept

    def _keep_text(self, document: Document, ids_T: np.ndarray, source: int) -> None:
        """Remember training text, into which synthetic sources write their tasks."""
        if self.texts is None or self.held_out.has(document, source):
            return
        marks = [self.tokenizer.bos_token_id, self.tokenizer.eos_token_id]
        self.texts.add(document.kind, ids_T[~np.isin(ids_T, marks)])

    def _cut(
        self, document: Document, ids_T: np.ndarray, source: SourceConfig
    ) -> list[Made | PromptDocument]:
        """Yield running text with every token a label, or prompts with the text that follows each."""
        if not source.prompts:
            self.counts["text only"] += 1
            return []
        if self.config.prompt_tokens is None:
            return [(document, ids_T, np.ones(len(ids_T), bool))]
        made = list(
            cut_text(
                document,
                ids_T,
                self.config,
                count=source.prompts,
                limit=self.limit,
                bos=self.tokenizer.bos_token_id,
            )
        )
        self.counts["short"] += not made
        return [*made]

    def _conversation(
        self, document: Document, source: SourceConfig, ready: Iterable[Any]
    ) -> list[Made | PromptDocument]:
        written = self.config.written_by_target(source)
        found = self.conversations.of(document, written=written, ready=ready)
        if found is None:
            return []
        return [found if isinstance(found, PromptDocument) else (document, *found)]

    def _with_answers(self, items: Sequence[Made | PromptDocument], source: SourceConfig) -> Iterator[Made]:
        """Yield prompts with their responses, recorded or generated now; other documents unchanged."""
        items = [item for item in items if self._embedded(item)]
        prompts = [item for item in items if isinstance(item, PromptDocument)]
        asks = self.config.written_by_target(source)
        written: Iterator[list[int] | None] = iter(())
        if prompts and asks:
            if self.generate is None:
                raise DataError(
                    "data.answers=target needs the target to write answers; run: longtrain prepare"
                )
            written = respond(
                [prompt.ids_T.tolist() for prompt in prompts],
                self.generate,
                self.answers,
                batch=self.config.answer_batch,
                batch_tokens=self.config.answer_batch_tokens,
                answer_tokens=self.config.answer_tokens,
            )
        for item in items:
            if not isinstance(item, PromptDocument):
                yield item
                continue
            answer = next(written) if asks else item.answer_T
            if answer is None:
                continue  # another part generates it
            answer_T = np.asarray(answer, np.int64)
            if not self.tokenizer.decode(answer_T.tolist(), skip_special_tokens=True).strip():
                self.counts["empty"] += 1
                continue
            made = item.answered(answer_T)
            if item.document.messages is not None:
                self.conversations.count(len(made[1]), int(made[2].sum()))
            yield made

    def _limited(self, document: Document, ids_T: np.ndarray, mask_T: np.ndarray) -> Tokens | None:
        """Apply the length limit to a document's tokens; None if it is skipped."""
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

    def _follow(
        self, stream: Iterable[Any], source: SourceConfig, *, total: int | None = None
    ) -> Iterator[Any]:
        """Yield the stream and show its progress, unless generated answers show their own."""
        if self.config.written_by_target(source):
            return iter(stream)
        return follow(stream, f"{source.reader} {source.where}", total=source.rows or total)

    def _synthetic(self, source: SourceConfig) -> Iterator[Made | PromptDocument]:
        """Yield a synthetic source's documents."""
        for item in synthetic_documents(
            source, self.texts.streams() if self.texts else {}, self.tokenizer, self.config, limit=self.limit
        ):
            self.counts["documents"] += 1
            yield item


def _refuse(error: DataError) -> None:
    """Stop at the first document that cannot be read, with an error that names `data.on_error=skip`."""
    skip = "; or pass data.on_error=skip, which leaves such documents out"
    raise DataError(f"{error}{'' if 'data.on_error' in str(error) else skip}") from error

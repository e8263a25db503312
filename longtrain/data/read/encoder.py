"""Tokenises documents: a few in this process, many in several, a bounded number in memory at a time.

Shapes: T tokens of one text.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from longtrain.data.read.adapters import Document
from longtrain.data.read.processes import ProcessEnded, Processes, Received
from longtrain.errors import ConfigError, DataError, first_line, is_failure
from longtrain.log import get_logger

log = get_logger(__name__)

SLICE_CHARS = 250_000
"""Characters that the tokenizer gets at once: what it keeps of them in memory is far larger than they are."""
MOST_WORKERS = 16
"""Most processes that are started where none were asked for; reading the files then takes as long."""
PARALLEL_CHARS = 8_000_000
"""Characters from which several processes pay: to start one takes as long as to tokenise a few million."""
AHEAD_BATCHES = 16
"""Most batches that are read ahead to see whether there are so many characters."""

T = TypeVar("T")
Chat = Callable[[Any, Document], Any]
"""What a process does with the tokenizer and a conversation; it and its result can be pickled."""
Each = Callable[[Any, list[Document]], Iterator[Any]]
"""Makes an item of each of some texts and conversations, of which it tokenises what it needs; it and the
items can be pickled."""
Encoded = tuple[list[Document], Iterator[Any]]
"""Documents, and what was made of those with a text (token ids, int32) or turns (see `Encoder.batches`)."""

sharing = 1
"""Number of processes that share this work and its memory, in one of an `Encoder`'s processes."""


def usual_workers(sharing: int = 1) -> int:
    """Return the number of processes for much text: one a core, at most `MOST_WORKERS`; 0 for one core.

    Args:
        sharing: number of callers that share the machine's cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if cores < 2 * sharing else min(cores // sharing, MOST_WORKERS)


class Encoder:
    """Tokenises the texts of any number of sources: in this process, or in several once that pays.

    Batches are read ahead until all texts so far have `PARALLEL_CHARS` characters; if they never do, no
    process is started. The ids do not depend on the number of processes. Leaving the context ends them.

    Args:
        tokenizer: the target's; with processes it must be possible to pickle it.
        workers: processes from the first text on; 0: none; None: `usual_workers()` for much text.
        sharing: number of such objects in other processes, this one counted, that share the machine's cores.
        streams: number of streams whose batches are taken in turn; what is read ahead is all of theirs.
        append_eos: end each text with the end-of-sequence token.

    Raises:
        ConfigError: there is no such token.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        workers: int | None = None,
        sharing: int = 1,
        streams: int = 1,
        append_eos: bool = False,
    ) -> None:
        if append_eos and tokenizer.eos_token_id is None:
            raise ConfigError(
                "data.append_eos=true, but the tokenizer has no end-of-sequence token; set it to false"
            )
        self.tokenizer = tokenizer
        self._end = np.asarray([tokenizer.eos_token_id] if append_eos else [], np.int32)
        self._workers = usual_workers(sharing) if workers is None else workers
        self._from_chars = PARALLEL_CHARS if workers is None else 0
        self._most_slices = max(1, 2 * self._workers // streams)
        self._chars = 0
        """Characters of the texts that were read so far."""
        self._processes: Processes | None = None

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        used = self._workers if self._processes else 1
        if self._processes is not None:
            if kind is not None:  # an error, or Ctrl-C: nobody wants what they are doing
                self._processes.kill()
            self._processes.close()
        if self._chars:
            log.info("read characters=%d, tokenising processes=%d", self._chars, used)
        self._processes = None

    def batches(
        self, stream: Iterable[list[Document]], chat: Chat | None = None, each: Each | None = None
    ) -> Iterator[Encoded]:
        """Yield batches of documents in their order, each with the token ids of its texts.

        A bounded number of batches is in memory: `AHEAD_BATCHES` before the processes are started, and then
        as many as give each process two slices of text, those of all streams together.

        Args:
            stream: documents; those without a text are passed on.
            chat: applied to each conversation by the processes; its result is an item among those of texts,
                None as long as there are no processes. Without `chat` a conversation has no item.
            each: makes the items of texts and conversations instead, wherever the others would be tokenised.

        Raises:
            DataError: the tokenizer fails, or a process was killed.
        """
        for batch, made in self._encoded(iter(stream), _Work(chat, each)):
            yield batch, (np.append(one, self._end) if isinstance(one, np.ndarray) else one for one in made)

    def _encoded(self, stream: Iterator[list[Document]], work: _Work) -> Iterator[Encoded]:
        """Yield batches with the token ids of their texts; a little text is tokenised in this process."""
        ahead: deque[list[Document]] = deque()
        while not self._workers or self._chars + sum(work.chars(one) for one in ahead) < self._from_chars:
            batch = next(stream, None)
            if batch is not None:
                ahead.append(batch)
            while ahead and (
                batch is None or not self._workers or len(ahead) > AHEAD_BATCHES or not work.chars(ahead[0])
            ):
                first = ahead.popleft()
                self._chars += work.chars(first)
                yield first, work.here(self.tokenizer, work.items(first))
            if batch is None:
                return
        yield from self._encoded_in_processes(_drained(ahead, stream), work)

    def _encoded_in_processes(self, stream: Iterator[list[Document]], work: _Work) -> Iterator[Encoded]:
        """Yield batches with the token ids of their texts, whose slices several processes tokenise.

        Whoever takes them does not wait for more to be read if the next is ready, or has no text.
        """
        waiting: deque[tuple[list[Document], list[Future[list[Any]]]]] = deque()
        n_slices = 0
        for batch in stream:
            self._chars += work.chars(batch)
            futures = [self._submit(items, work) for items in _slices(work.items(batch))]
            waiting.append((batch, futures))
            n_slices += max(1, len(futures))
            ready = all(future.done() for future in waiting[0][1])
            while waiting and (ready or n_slices > self._most_slices or not waiting[0][1]):
                ready = False
                batch, futures = waiting.popleft()
                n_slices -= max(1, len(futures))
                yield batch, self._taken(futures)
        while waiting:
            batch, futures = waiting.popleft()
            yield batch, self._taken(futures)

    def _submit(self, items: list[Document], work: _Work) -> Future[list[Any]]:
        """Have one of the processes tokenise documents; the first calls start them."""
        if self._processes is None:
            log.info("tokenising processes=%d", self._workers)
            self._processes = Processes(self.tokenizer, self._workers, _begin)
        return self._processes.submit(_work, items, work)

    def _taken(self, futures: list[Future[list[Any]]]) -> Iterator[Any]:
        """Wait for a batch's tokens."""
        try:
            return iter([one for future in futures for one in future.result()])
        except ProcessEnded as error:
            raise DataError(
                f"tokenising {error}; run with fewer than {self._workers} such processes: "
                f"++data.tokenise_workers={self._workers // 2}"
            ) from error


@dataclass(frozen=True)
class _Work:
    """What is made of documents: see `Encoder.batches`."""

    chat: Chat | None = None
    each: Each | None = None

    def items(self, batch: list[Document]) -> list[Document]:
        """Return the documents of a batch that have an item: texts, and conversations if they are used."""
        chats = self.chat is not None or self.each is not None
        return [one for one in batch if one.text is not None or (chats and one.messages is not None)]

    def chars(self, batch: list[Document]) -> int:
        """Return the number of characters of a batch's documents that have an item."""
        return sum(map(_size, self.items(batch)))

    def here(self, tokenizer: Any, items: list[Document]) -> Iterator[Any]:
        """Return the items of this process, without `chat`; of `each` when they are asked for."""
        return replace(self, chat=None).made(tokenizer, items)

    def made(self, tokenizer: Any, items: list[Document]) -> Iterator[Any]:
        """Return the items in their order."""
        if self.each is not None:
            return self.each(tokenizer, items)
        ids = iter(encode(tokenizer, [item.text for item in items if item.text is not None]))
        return (self._one(tokenizer, item, ids) for item in items)

    def _one(self, tokenizer: Any, item: Document, ids: Iterator[np.ndarray]) -> Any:
        if item.text is not None:
            return next(ids)
        return None if self.chat is None else self.chat(tokenizer, item)


def encode(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the token ids of each text, int32_T.

    Raises:
        DataError: the tokenizer fails.
    """
    found: list[np.ndarray] = []
    for some in _slices(texts, len):
        try:
            encoded = tokenizer(
                some, return_attention_mask=False, return_token_type_ids=False, verbose=False
            )["input_ids"]
        except BaseException as error:
            if not is_failure(error):
                raise
            raise DataError(
                f"the target's tokenizer fails on the text ({first_line(error)}); its files (tokenizer.json) "
                "are damaged or do not belong together: get the target folder again"
            ) from error
        found += [np.asarray(ids, np.int32) for ids in encoded]
    return found


_tokenizer: Any = None
"""The tokenizer of a worker process."""


def _begin(tokenizer: Received, workers: int) -> None:
    """Begin a worker process, whose tokenizer starts no threads of its own."""
    global _tokenizer, sharing
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer, sharing = tokenizer.value(), workers


def _work(items: list[Document], work: _Work) -> list[Any]:
    return list(work.made(_tokenizer, items))


def _size(document: Document) -> int:
    """Return the number of characters of a document's text or turns."""
    return len(document.text or "") + sum(len(turn["content"]) for turn in document.messages or ())


def _drained(ahead: deque[list[Document]], stream: Iterator[list[Document]]) -> Iterator[list[Document]]:
    """Yield the batches that were read ahead, which are not kept, and those that follow."""
    while ahead:
        yield ahead.popleft()
    yield from stream


def _slices(items: Sequence[T], size: Callable[[Any], int] = _size) -> Iterator[list[T]]:
    """Yield texts or documents in lists of at most `SLICE_CHARS` characters, or of one longer item."""
    some: list[T] = []
    chars = 0
    for item in items:
        if some and chars + size(item) > SLICE_CHARS:
            yield some
            some, chars = [], 0
        some.append(item)
        chars += size(item)
    if some:
        yield some

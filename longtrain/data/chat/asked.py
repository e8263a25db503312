"""Conversations that a target is to answer: instructions, chats, and documents with a question.

Shapes: T tokens of one prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from longtrain.data.chat import mask as masks
from longtrain.data.chat.prompts import cut_text, random_of
from longtrain.data.chat.windows import Window, cut_window, windows
from longtrain.data.config import DataConfig, SourceConfig
from longtrain.data.read.adapters import Document, Message
from longtrain.data.read.encoder import SLICE_CHARS, Encoder, encode
from longtrain.data.read.files import refuse
from longtrain.data.read.sources import batches, documents, inputs
from longtrain.errors import ConfigError, DataError

SLACK = 32
"""Tokens left free beside a document's piece: text that is cut and tokenised again may take a few more."""


@dataclass(frozen=True)
class Unanswered:
    """A conversation that ends with a user's turn.

    Args:
        name: name of the document that it was made from.
        kind: text kind.
        messages: its turns.
        ids_T: its tokens in the target's chat template, up to the start of the answer.
        key: hash of the tokens, of the questions that follow, and of what else determines an answer.
        more: questions that the user asks after the answer, each after the one before is answered.
        more_tokens: most tokens that these questions take in the chat template.
    """

    name: str
    kind: str
    messages: tuple[Message, ...]
    ids_T: np.ndarray
    key: str
    more: tuple[str, ...] = ()
    more_tokens: int = 0


@dataclass(frozen=True)
class WeightedQuestions:
    """Different questions on one kind of text, and the weight of each in the draw of the next one."""

    texts: tuple[str, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, forms: Mapping[str, Sequence[str]], weights: Mapping[str, float]) -> WeightedQuestions:
        """Give a form of question its weight, 1 by default, in equal parts to its questions."""
        shares: dict[str, float] = {}
        for form, texts in forms.items():
            for one in texts if weights.get(form, 1) else ():
                shares[one] = shares.get(one, 0) + weights.get(form, 1) / len(texts)
        return cls(tuple(shares), tuple(shares.values()))

    def draw(self, rng: np.random.Generator, count: int) -> list[str]:
        """Draw up to `count` different questions."""
        share = np.asarray(self.weights) / sum(self.weights)
        at = rng.choice(len(self.texts), min(count, len(self.texts)), replace=False, p=share)
        return [self.texts[index] for index in at.tolist()]


class Made(NamedTuple):
    """What one document gave.

    Args:
        prompts: its prompts.
        counts: numbers of prompts left out, and of characters tokenised, as in `Asking.counts`.
        error: why there are no more of them; None: these are all.
    """

    prompts: list[Unanswered]
    counts: Counter[str]
    error: DataError | None


@dataclass(frozen=True)
class DocumentPrompts:
    """Makes the prompts of a document: a function of it and of these values, in whatever process.

    Args:
        config: the mixture, whose `prompt_tokens` bound the pieces of running text.
        room: most tokens of a prompt; longer ones are left out.
        questions: text kind -> questions on text of this kind; `text` serves all other kinds.
        around: text kind -> tokens of its longest question without a piece of text.
        salt: what determines an answer besides the prompt; hashed into each key.
        turns: fewest and most questions on a piece, one after the other; fewer if the context is full.
        answer_tokens: most tokens of an answer.
        pieces: most pieces of a document.
    """

    config: DataConfig
    room: int
    questions: Mapping[str, WeightedQuestions]
    around: Mapping[str, int]
    salt: Mapping[str, Any]
    turns: tuple[int, int]
    answer_tokens: int
    pieces: int

    def __call__(self, tokenizer: Any, documents: list[Document]) -> Iterator[Made]:
        """Yield what each document gives; of a long one only the windows of its pieces are tokenised.

        Raises:
            DataError: the tokenizer fails.
        """
        chosen = [self._windows(one) for one in documents]
        texts = [
            [window.of(one.text) for window in own] or [one.text] if one.text is not None else []
            for one, own in zip(documents, chosen, strict=True)
        ]
        ids = iter(encode(tokenizer, [text for some in texts for text in some]))
        for one, own, some in zip(documents, chosen, texts, strict=True):
            made = Made([], Counter(characters=sum(map(len, some))), None)
            yield self._made(tokenizer, one, own, [next(ids) for _ in some], made)

    def _made(
        self, tokenizer: Any, document: Document, own: list[Window], ids: list[np.ndarray], made: Made
    ) -> Made:
        """Return a document's prompts, from the tokens of its windows, or of its whole text."""
        if document.text is None:
            prompts = self._conversation(tokenizer, document, made.counts)
        else:
            cut = self._cut(tokenizer, document, document.text, own, ids, made.counts)
            prompts = self._about(tokenizer, document, cut, made.counts)
        try:
            for asked in prompts:
                made.prompts.append(asked)
        except DataError as error:
            return made._replace(error=error)
        return made

    def _conversation(self, tokenizer: Any, document: Document, counts: Counter[str]) -> Iterator[Unanswered]:
        """Yield a conversation up to its last answer."""
        turns = [{key: turn[key] for key in ("role", "content")} for turn in document.messages or ()]
        while turns and turns[-1]["role"] == "assistant":
            turns.pop()
        if not turns or turns[-1]["role"] != "user":
            counts["unasked"] += 1
            return
        yield from self._fitting(tokenizer, (document.name, document.kind), turns, counts)

    def _asked(self, document: Document) -> str:
        """Return the kind whose questions a document gets."""
        return document.kind if self.questions.get(document.kind) else "text"

    def _limit(self, document: Document) -> int:
        """Return the most tokens of a piece of running text, which fits beside any question."""
        return self.room - self.around[self._asked(document)] - SLACK

    def _windows(self, document: Document) -> list[Window]:
        """Return the windows of a long document; none: it is tokenised whole, or is a conversation."""
        if document.text is None:
            return []
        return windows(document, self.config, count=self.pieces, limit=self._limit(document))

    def _cut(
        self,
        tokenizer: Any,
        document: Document,
        text: str,
        own: list[Window],
        ids: list[np.ndarray],
        counts: Counter[str],
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the names and tokens of a text's pieces."""
        limit, bos = self._limit(document), tokenizer.bos_token_id
        if not own:
            cut = cut_text(document, ids[0], self.config, count=self.pieces, limit=limit, bos=bos)
            yield from ((piece.document.name, piece.ids_T) for piece in cut)
            return

        def larger(window: str) -> np.ndarray:
            counts["characters"] += len(window)
            return encode(tokenizer, [window])[0]

        shortest = self.config.prompt_tokens[0] if self.config.prompt_tokens else 1
        for window, ids_T in zip(own, ids, strict=True):
            piece_T = cut_window(window, ids_T, text, larger, shortest=shortest, bos=bos)
            if piece_T is not None:
                yield window.name, piece_T

    def _about(
        self,
        tokenizer: Any,
        document: Document,
        cut: Iterator[tuple[str, np.ndarray]],
        counts: Counter[str],
    ) -> Iterator[Unanswered]:
        """Yield pieces of running text, each with a question."""
        asked = self._asked(document)
        own, each = self.questions[asked], self.around[asked] + SLACK
        empty = True
        for name, ids_T in cut:
            text = tokenizer.decode(ids_T.tolist(), skip_special_tokens=True).strip()
            if not text:  # of white space alone
                continue
            empty = False
            rng = random_of(self.config.seed, name)
            question, *more = own.draw(rng, int(rng.integers(self.turns[0], self.turns[1] + 1)))
            first = [_user(f"{text}\n\n{question}")]
            yield from self._fitting(tokenizer, (name, document.kind), first, counts, more, each)
        counts["short"] += empty

    def _fitting(
        self,
        tokenizer: Any,
        names: tuple[str, str],
        messages: list[Message],
        counts: Counter[str],
        more: Sequence[str] = (),
        each: int = 0,
    ) -> Iterator[Unanswered]:
        """Yield a conversation, unless it is longer than the room, with as many more questions as fit.

        Args:
            tokenizer: the target's.
            names: its name and text kind.
            messages: its turns.
            counts: counts what is left out.
            more: further questions.
            each: most tokens of one of them.
        """
        ids_T = masks.render_prompt(tokenizer, messages, name=names[0])
        if len(ids_T) > self.room:
            counts["long"] += 1
            return
        if more:
            more = tuple(more[: (self.room - len(ids_T)) // (each + self.answer_tokens)])
        salt = json.dumps({**self.salt, "more": more} if more else dict(self.salt), sort_keys=True)
        key = hashlib.sha256(salt.encode() + ids_T.astype("<i8").tobytes()).hexdigest()
        ids_T = ids_T.astype(np.int32)
        yield Unanswered(*names, tuple(messages), ids_T, key, tuple(more), len(more) * each)


@dataclass
class Asking:
    """Makes prompts of a mixture's documents.

    A conversation is asked up to its last answer. Running text is cut at random places (`windows` for long
    text, `cut_text` for other), and a question on it follows. Both are functions of the seed and the
    document's name, so that the processes that tokenise make the prompts too. A prompt is asked once.

    Args:
        config: the mixture; sources for validation are left out.
        tokenizer: the target's.
        room: most tokens of a prompt; longer ones are left out.
        document_tokens: shortest and longest piece of running text, in tokens.
        questions: text kind -> questions on text of this kind; `text` serves all other kinds.
        salt: what determines an answer besides the prompt; hashed into each key.
        sharing: number of processes of the job on this machine, for `Encoder`.
        turns: fewest and most questions on a piece, one after the other; fewer if the context is full.
        answer_tokens: most tokens of an answer.
        stopping: asked before each document; True ends the prompts.
        counts: numbers of documents read, of characters tokenised to cut them, of prompts, and of those left
            out.
    """

    config: DataConfig
    tokenizer: Any
    room: int
    document_tokens: tuple[int, int]
    questions: Mapping[str, WeightedQuestions]
    salt: Mapping[str, Any]
    sharing: int = 1
    turns: tuple[int, int] = (1, 1)
    answer_tokens: int = 0
    stopping: Callable[[], bool] = lambda: False
    counts: Counter[str] = field(default_factory=Counter)

    def prompts(self) -> Iterator[Unanswered]:
        """Yield the prompts in the same order in each run: one of each source in turn, as long as it has any.

        Whoever stops early has therefore asked about every source.

        Raises:
            ConfigError: no source can be asked.
            DataError: a source or document cannot be read, or the chat template refuses it.
        """
        masks.check_template(self.tokenizer, "prefix")
        sources = [
            source
            for source in self.config.sources
            if source.where and source.reader not in ("synthetic", "tokenised") and source.split != "val"
        ]
        if not sources:
            raise ConfigError(
                f"data '{self.config.name}' has no source of text or conversations with a path to ask the "
                "target about; pass e.g. data=conversations data.conversations=PATH"
            )
        writer = self._writer()
        seen: set[bytes] = set()
        workers = self.config.tokenise_workers
        sharing, streams = self.sharing, len(sources)
        with Encoder(self.tokenizer, workers=workers, sharing=sharing, streams=streams) as encoder:
            for asked in _in_turn([self._of_source(source, writer, encoder) for source in sources]):
                if (key := bytes.fromhex(asked.key)[:16]) in seen:
                    self.counts["twice"] += 1
                    continue
                seen.add(key)
                self.counts["prompts"] += 1
                yield asked

    def _writer(self) -> DocumentPrompts:
        """Return what makes the prompts of a document; the questions are rendered once, here."""
        around = {
            kind: max(
                len(masks.render_prompt(self.tokenizer, [_user(f"\n\n{one}")], name=f"ask.{kind}"))
                for one in own.texts
            )
            for kind, own in self.questions.items()
        }
        return DocumentPrompts(
            replace(self.config, prompt_tokens=self.document_tokens, answer_tokens=1),
            self.room,
            self.questions,
            around,
            self.salt,
            self.turns,
            self.answer_tokens,
            pieces=1,
        )

    def _of_source(
        self, source: SourceConfig, writer: DocumentPrompts, encoder: Encoder
    ) -> Iterator[Unanswered]:
        """Yield the prompts of one source in the order of its documents.

        Batches are small, so that the first prompts do not wait for much text to be tokenised.
        """
        found = inputs(source, hashed=False)
        stream = batches(documents(source, found, self._report(found), answered=False), SLICE_CHARS)
        own = replace(writer, pieces=max(1, source.prompts))
        for batch, made in encoder.batches(stream, each=own):
            for document in batch:
                if self.stopping():
                    return
                self.counts["documents"] += 1
                if document.text is None and document.messages is None:
                    continue
                prompts, counts, error = next(made)
                self.counts.update(counts)
                yield from prompts
                if error is not None:
                    raise error

    def _report(self, found: Mapping[str, Any]) -> Any:
        """Return the function that is called with the error of a file or row that cannot be read."""

        def skip(error: DataError) -> None:
            self.counts["bad"] += 1

        return skip if found.get("packages") or self.config.on_error == "skip" else refuse


def _in_turn(streams: Sequence[Iterator[Unanswered]]) -> Iterator[Unanswered]:
    """Yield one item of each stream in turn; a stream that has ended is left out."""
    left = deque(streams)
    while left:
        stream = left.popleft()
        for one in islice(stream, 1):
            yield one
            left.append(stream)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}

"""Generates retrieval tasks inside real text: needles, variable chains, tables, quoting and copying.

Every document is a chat over one context with many questions, so that one forward pass trains many
retrievals. Everything works on token ids (text and phrases are tokenised once); a document is a pure function
of its random generator.

Shapes: T tokens of one document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from longtrain.data.chat.mask import render
from longtrain.data.chat.prompts import PromptDocument
from longtrain.data.config import DataConfig, SourceConfig
from longtrain.data.read.adapters import Document
from longtrain.data.read.sources import held_out
from longtrain.data.retrieval.material import ChatIds, DocumentBuilder, Ids, Role, RoleDocument, TextStream
from longtrain.data.retrieval.phrases import MARGIN
from longtrain.data.retrieval.questions import (
    CUE,
    QUESTION_TASKS,
    RetrievalQuestion,
    RetrievalQuestionWriter,
    most_tokens,
)
from longtrain.data.retrieval.wording import TaskWords, wording_of
from longtrain.errors import ConfigError, DataError

OPTIONS = {"doc_tokens", "tasks"}
"""Options that a synthetic source may have."""
TASKS = {"retrieval": (*QUESTION_TASKS, "copy"), "questions": QUESTION_TASKS}
"""Kind of synthetic source -> its tasks."""


class RetrievalWriter(RetrievalQuestionWriter):
    """Writes retrieval documents of an exact length around text of its streams; arguments: see `Phrases`."""

    tasks = TASKS["retrieval"]

    def write(self, task: str, n_tokens: int, rng: np.random.Generator) -> RoleDocument:
        """Return a document of one of `tasks` with exactly `n_tokens` tokens (at least 192).

        It has as many questions as fit well.

        Raises:
            ConfigError: `n_tokens` is too small.
        """
        if n_tokens < 192:
            raise ConfigError(f"a retrieval document of {n_tokens} tokens is too short; allowed: 192 or more")
        return getattr(self, f"_{task}")(n_tokens, rng)

    def needle_prompt(
        self,
        n_tokens: int,
        n_keys: int,
        rng: np.random.Generator,
        *,
        depth: float | None = None,
    ) -> tuple[list[int], str]:
        """Return a prompt of exactly `n_tokens` tokens that asks for the value of one key, and that value.

        Args:
            n_tokens: prompt length, chat marks included.
            n_keys: number of hidden needles with distinct keys, placed uniformly over the text's breaks.
            rng: source of all randomness.
            depth: share of the text before the needle that is asked for, 0 to 1; None: random.
        """
        keys = self._keys(n_keys, rng, self.keys_listed)
        numbers = self._draw(7, n_keys, rng)
        values = self._spell(numbers, 7)
        asked = int(rng.integers(n_keys))
        words = self.wording.hidden(single=self.wording.singular == 1)
        begin = self._begin(words, key=keys[asked])
        tail = np.concatenate([self.fill(words.ask, key=keys[asked]), self.assistant, begin])
        doc = DocumentBuilder()
        needles = self._needle_runs(keys, [[value] for value in values])
        at = None if depth is None else (asked, depth)
        self._context(doc, words.intro, needles, n_tokens - len(tail), rng, at=at)
        doc.add(Role.PROMPT, tail)
        return np.concatenate(doc.runs).tolist(), str(numbers[asked])

    def _begin(self, words: TaskWords, **parts: Ids) -> Ids:
        """Return the given start of the assistant's answer; empty if the wording gives none."""
        return self.fill(words.answer if self.wording.always_begun else "", **parts)

    # Needles: keys with one to four seven-digit values.

    def _needles(self, n_tokens: int, rng: np.random.Generator) -> RoleDocument:
        most = max(1, min(48, n_tokens // 110))
        n_keys = int(rng.integers(1, (min(8, most) if rng.random() < 0.4 else most) + 1))
        keys = self._keys(n_keys, rng, self.keys_made_up if rng.random() < 0.3 else self.keys_listed)
        n_values = rng.integers(1, 5, n_keys) if rng.random() < 0.2 else np.ones(n_keys, dtype=int)
        numbers = iter(self._numbers(7, int(n_values.sum()), rng))
        values = [[next(numbers) for _ in range(n)] for n in n_values]
        singular = rng.random() < self.wording.singular
        turns = DocumentBuilder()
        for at in rng.permutation(n_keys):
            single, opening = singular and len(values[at]) == 1, turns.n == 0
            turn = DocumentBuilder()
            ask = self._later(self.wording.hidden(single=single).ask, opening=opening)
            self._ask(turn, self.fill(ask, key=keys[at]), opening=opening)
            self._answer(turn, keys[at], values[at], single=single)
            if not opening and turns.n + turn.n > 0.45 * n_tokens:
                break
            turns.extend(turn)
        needles = self._needle_runs(keys, values)
        intro = self.wording.hidden(single=len(needles) == 1).intro
        fixed = len(self.user) + len(self.phrase(intro)) + turns.n
        if fixed + most_tokens(needles) + MARGIN > n_tokens:
            return self._needles(n_tokens, rng) if len(needles) > 1 else self._copy(n_tokens, rng)
        doc = DocumentBuilder()
        self._context(doc, intro, needles, n_tokens - turns.n, rng)
        doc.extend(turns)
        return doc.document("needles")

    # Variable chains, tables, quoting, copying.

    def _chains(self, n_tokens: int, rng: np.random.Generator) -> RoleDocument:
        lines: list[tuple[Ids, Ids]] = []
        turns, words = DocumentBuilder(), self.wording.chains
        for value in self._numbers(5, int(rng.integers(1, max(2, min(7, n_tokens // 200)))), rng):
            names = [self._name(rng) for _ in range(int(rng.integers(2, 5)))]
            chain = self._chain_runs(names, value)
            opening = turns.n == 0
            turn = DocumentBuilder()
            ask = self.fill(self._later(words.ask, opening=opening), value=value)
            self._ask(turn, ask, opening=opening)
            turn.add(Role.ANSWER, self.fill(words.answer, value=value, count=self.phrase(str(len(names)))))
            for i, name in enumerate(names):
                turn.add(Role.VALUE, *([self.phrase(",")] if i else []), name)
            turn.add(Role.ANSWER, self.phrase("."), self.end)
            hidden = sum(len(line) for _, line in lines + chain)
            if not opening and turns.n + turn.n + hidden > 0.7 * n_tokens:
                break
            lines += chain
            turns.extend(turn)
        fixed = len(self.user) + len(self.phrase(words.intro)) + turns.n
        if fixed + most_tokens(lines) + MARGIN > n_tokens:
            return self._table(n_tokens, rng)
        doc = DocumentBuilder()
        self._context(doc, words.intro, lines, n_tokens - turns.n, rng, in_order=True)
        doc.extend(turns)
        return doc.document("chains")

    def _table(self, n_tokens: int, rng: np.random.Generator) -> RoleDocument:
        width = int(rng.integers(3, 8))
        sep, newline, dot = (self.phrase(text) for text in (": ", "\n", "."))
        words, space = self.wording.table, self.phrase(" " if self.wording.always_begun else "")
        intro = self.phrase(words.intro)
        digits = max(len(number) for number in self._numbers(width, 1, rng))
        line = 2 * digits + len(sep) + len(newline)
        key = np.zeros(digits, dtype=np.int32)
        said = len(self.fill(words.ask, key=key)) + len(self._begin(words, key=key)) + len(space)
        turn = said + digits + len(dot) + len(self.user) + len(self.assistant) + len(self.end)
        room = n_tokens - len(intro) - turn
        n_lines = max(1, min(int(room * rng.uniform(0.2, 0.7)) // line, 400, 10 ** (width - 1)))
        keys, values = self._numbers(width, n_lines, rng), self._numbers(width, n_lines, rng)
        body = DocumentBuilder()
        body.add(Role.PROMPT, intro)
        for key, value in zip(keys, values, strict=True):
            body.add(Role.PROMPT, key, sep, value, newline)
        n_turns = max(1, min((n_tokens - body.n - len(self.user)) // turn, 2 * n_lines))
        for i, at in enumerate(rng.integers(n_lines, size=n_turns)):
            self._ask(body, self.fill(words.ask, key=keys[at]), opening=i == 0)
            body.add(Role.ANSWER, self._begin(words, key=keys[at]), space)
            body.add(Role.VALUE, values[at])
            body.add(Role.ANSWER, dot, self.end)
        return self._filled(body, n_tokens, rng).document("table")

    def _quote(self, n_tokens: int, rng: np.random.Generator) -> RoleDocument:
        cue, length = CUE, int(rng.integers(24, 65))
        words, newline = self.wording.quote, self.phrase("\n")
        intro, blank = self.phrase(words.intro), np.zeros(CUE, dtype=np.int32)
        said = len(self.fill(words.ask.removeprefix("\n"), cue=blank)) + len(self._begin(words, cue=blank))
        turn = said + length + len(self.user) + len(self.assistant) + len(self.end)
        n_turns = min(int(rng.integers(1, 9)), (n_tokens - 2 * cue - len(intro)) // (2 * turn))
        if n_turns < 1:
            return self._copy(n_tokens, rng)
        n_text = n_tokens - len(intro) - len(newline) - n_turns * turn
        text, breaks = self._text(self._stream(rng), n_text, rng)
        last = n_text - cue - length
        starts = breaks[breaks <= last] if (breaks <= last).any() else np.arange(last + 1)
        doc = DocumentBuilder()
        doc.add(Role.PROMPT, self.user, intro)
        doc.add(Role.TEXT, text)
        for i, at in enumerate(rng.choice(starts, n_turns)):
            ask, passage = self._later(words.ask, opening=i == 0), text[at : at + cue]
            self._ask(doc, self.fill(ask, cue=passage), opening=i == 0)
            doc.add(Role.ANSWER, self._begin(words, cue=passage))
            doc.add(Role.ANSWER, text[at + cue : at + cue + length], self.end)
        return doc.document("quote")

    def _copy(self, n_tokens: int, rng: np.random.Generator) -> RoleDocument:
        intro = self.phrase(self.wording.copy)
        n = (n_tokens - len(intro) - len(self.user) - len(self.assistant) - len(self.end)) // 2
        text, _ = self._text(self._stream(rng), n, rng)
        if rng.random() < 0.5:
            text = rng.permutation(text)
        body = DocumentBuilder()
        body.add(Role.PROMPT, intro, text, self.assistant)
        body.add(Role.ANSWER, text, self.end)
        return self._filled(body, n_tokens, rng).document("copy")


def synthetic_documents(
    source: SourceConfig,
    texts: Mapping[str, np.ndarray],
    tokenizer: Any,
    config: DataConfig,
    *,
    limit: int | None = None,
) -> Iterator[tuple[Document, np.ndarray, np.ndarray] | PromptDocument]:
    """Yield a synthetic source's documents, each a function of the config's seed and its index.

    Args:
        source: `synthetic: retrieval` (many questions per document; all tokens except questions and hidden
            sentences are labels) or `synthetic: questions` (one question at the end of a prompt); `rows` is
            the number of documents; options are `doc_tokens: [shortest, longest]` (of a document or prompt;
            lengths are log-uniform; default `prompt_tokens`) and `tasks: [NAME, ...]`.
        texts: text kind -> token ids of training documents, end to end (a memory map will do).
        tokenizer: the target's.
        config: seed, `prompt_tokens`, `question`, `answer_tokens`.
        limit: largest number of tokens of a prompt and its answer; None: no limit.

    Raises:
        ConfigError: see `check_synthetic`; or there is no text to hide sentences in.
        DataError: the chat template's turn marks cannot be separated from the turns.
    """
    tasks = _tasks(source)
    if not texts:
        raise ConfigError(
            f"synthetic: {source.where} has no text to hide facts in; give a source of running text, e.g. "
            f"data.books=PATH"
        )
    token_text = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    streams = [TextStream(ids_T, token_text, kind) for kind, ids_T in texts.items()]
    writer = _writer(tokenizer, streams)
    shortest, longest = _lengths(source, config)
    if source.where == "questions" and limit is not None:
        longest = max(shortest, min(longest, limit - config.answer_tokens))
    for number in range(source.rows or 0):
        rng = np.random.default_rng([config.seed, number])
        n_tokens = int(np.exp(rng.uniform(np.log(shortest), np.log(longest))))
        task = tasks[int(rng.integers(len(tasks)))]
        name, val = f"{source.where}#{number}", held_out(source)
        if source.where == "questions":
            yield _prompt(
                writer.question(task, n_tokens, rng), Document(name, source.kind or task, val=val), config
            )
            continue
        made = writer.write(task, n_tokens, rng)
        about = Document(name, source.kind or made.kind, val=bool(val))
        yield about, made.ids_T.astype(np.int64), made.roles_T != Role.PROMPT


def check_synthetic(source: SourceConfig, tokenizer: Any, config: DataConfig) -> None:
    """Refuse a synthetic source that cannot be generated, before any text is tokenised.

    Args:
        source: see `synthetic_documents`.
        tokenizer: the target's.
        config: the data config, for the lengths of prompts.

    Raises:
        ConfigError: an unknown name, option or task, no `rows`, or prompts too short for a task.
        DataError: there is no chat template, or its turn marks cannot be separated from the turns.
    """
    tasks, (shortest, _) = _tasks(source), _lengths(source, config)
    writer = _writer(tokenizer, [TextStream(np.zeros(64, np.int64), [""], "text")])
    least = {task: writer.least_tokens(task) for task in tasks} if source.where == "questions" else {}
    longest_task = max(least, key=lambda task: least[task], default="")
    if longest_task and shortest < least[longest_task]:
        key = "data.sources.options.doc_tokens" if source.options.get("doc_tokens") else "data.prompt_tokens"
        raise ConfigError(
            f"{key} begins at {shortest}, too short for a question of the task '{longest_task}'; allowed "
            f"with this target's tokenizer: {least[longest_task]} or more, e.g. "
            f"{key}=[{least[longest_task]},{2 * least[longest_task]}]"
        )


def _tasks(source: SourceConfig) -> tuple[str, ...]:
    """Check a synthetic source's values, and return its tasks."""
    if source.where not in TASKS or not source.rows or set(source.options) - OPTIONS:
        raise ConfigError(
            f"synthetic: {source.where} rows: {source.rows} options: {sorted(source.options)}; allowed: "
            f"synthetic: {' or '.join(TASKS)}, rows: COUNT, options {', '.join(sorted(OPTIONS))}"
        )
    known = TASKS[source.where]
    tasks = tuple(source.options.get("tasks") or known)
    if unknown := sorted(set(tasks) - set(known)):
        raise ConfigError(f"synthetic: {source.where} tasks: '{unknown[0]}'; known: {', '.join(known)}")
    return tasks


def _lengths(source: SourceConfig, config: DataConfig) -> tuple[int, int]:
    """Return the shortest and longest document length of a synthetic source, in tokens."""
    shortest, longest = source.options.get("doc_tokens") or config.prompt_tokens or (512, 4096)
    return shortest, longest


def _writer(tokenizer: Any, streams: list[TextStream]) -> RetrievalWriter:
    return RetrievalWriter(
        lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
        turn_marks(tokenizer),
        streams,
        separator=-1,
        wording=wording_of(tokenizer),
    )


def _prompt(made: RetrievalQuestion, about: Document, config: DataConfig) -> PromptDocument:
    """Return a question as a prompt with its expected answer."""
    ids_T = np.concatenate([made.context_T, made.question_T]).astype(np.int64)
    begin = len(made.context_T) if config.question == "response" else len(ids_T)
    return PromptDocument(about, ids_T, begin, made.answer_T[: config.answer_tokens].astype(np.int64))


def turn_marks(tokenizer: Any) -> ChatIds:
    """Return the chat template's tokens before the user's turn, around the assistant's, and at the start.

    Raises:
        DataError: the template changes one-token turns, so that the marks cannot be found.
    """
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    ids = render(tokenizer, turns, how="all", name="turn marks").ids_T.tolist()
    user, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in "xy")
    if len(user) != 1 or len(answer) != 1 or ids.count(user[0]) != 1 or ids.count(answer[0]) != 1:
        raise DataError(
            "the chat template's turn marks cannot be told from the turns; leave out synthetic sources"
        )
    at, to = ids.index(user[0]), ids.index(answer[0])
    end = ids[to + 1 :]
    twice = render(tokenizer, [*turns, *turns], how="all", name="turn marks").ids_T.tolist()
    later = _between(twice, answer[0], user[0])
    if later is not None and later[: len(end)] == end and len(later) > len(end):
        opening = later[len(end) :]  # omits a system message that the template puts before the first turn
        if ids[at - len(opening) : at] == opening:
            start = ids[: at - len(opening)]
            return ChatIds(tuple(opening), tuple(ids[at + 1 : to]), tuple(end), tuple(start))
    start = ids[: 1 if ids[0] == tokenizer.bos_token_id and at > 1 else 0]
    return ChatIds(tuple(ids[len(start) : at]), tuple(ids[at + 1 : to]), tuple(end), tuple(start))


def _between(ids: list[int], after: int, before: int) -> list[int] | None:
    """Return the ids between the first `after` and the next `before`; None if they are not found."""
    if after not in ids or before not in ids[ids.index(after) :]:
        return None
    first = ids.index(after)
    return ids[first + 1 : ids.index(before, first)]

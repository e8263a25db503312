"""The `synthetic` sources: questions about facts written into the text of the other sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from longtrain.data.read.adapters import Document
from longtrain.data.config import DataConfig, SourceConfig
from longtrain.data.chat.mask import render
from longtrain.data.chat.prompts import Prompt
from longtrain.data.retrieval.synthetic import (
    QUESTION_TASKS,
    ChatIds,
    Question,
    RetrievalWriter,
    Role,
    TextStream,
)
from longtrain.errors import ConfigError, DataError

TASKS = {"retrieval": RetrievalWriter.tasks, "questions": QUESTION_TASKS}
OPTIONS = {"doc_tokens", "tasks"}


def synthetic(
    source: SourceConfig,
    texts: Mapping[str, list[np.ndarray]],
    tokenizer: Any,
    config: DataConfig,
    *,
    limit: int | None = None,
) -> Iterator[tuple[Document, np.ndarray, np.ndarray] | Prompt]:
    """A synthetic source's documents, each a function of the config's seed and its number.

    Args:
        source: `synthetic: retrieval` (many questions a document; all but questions and hidden facts are
            labels) or `synthetic: questions` (one at the end of a prompt); `rows` documents; options
            `doc_tokens: [shortest, longest]` (a question's prompt; lengths are log-uniform; default
            `prompt_tokens`) and `tasks: [NAME, ...]`.
        texts: training documents' ids by text kind.
        tokenizer: the target's.
        config: seed, `prompt_tokens`, `question`, `answer_tokens`.
        limit: most tokens of a prompt and its answer; None: no limit.

    Raises:
        ConfigError: another name, no `rows`, an unknown option or task, or no text to write into.
        DataError: a chat template whose turn marks cannot be told from the turns.
    """
    if source.where not in TASKS or not source.rows or set(source.options) - OPTIONS:
        raise ConfigError(
            f"synthetic: {source.where} rows: {source.rows} options: {sorted(source.options)}; allowed: "
            f"synthetic: {' or '.join(TASKS)}, rows: COUNT, options {', '.join(sorted(OPTIONS))}"
        )
    tasks = tuple(source.options.get("tasks") or TASKS[source.where])
    unknown = sorted(set(tasks) - set(TASKS[source.where]))
    if unknown:
        raise ConfigError(
            f"synthetic: {source.where} tasks: '{unknown[0]}'; known: {', '.join(TASKS[source.where])}"
        )
    if not texts:
        raise ConfigError(
            f"synthetic: {source.where} has no text to hide facts in; give a source of running text, e.g. "
            f"data.books=PATH"
        )
    token_text = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    streams = [TextStream(np.concatenate(parts), token_text, kind) for kind, parts in texts.items()]
    writer = RetrievalWriter(
        lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
        turn_marks(tokenizer),
        streams,
        separator=-1,
    )
    shortest, longest = source.options.get("doc_tokens") or config.prompt_tokens or (512, 4096)
    if source.where == "questions" and limit is not None:
        longest = max(shortest, min(longest, limit - config.answer_tokens))
    for number in range(source.rows):
        rng = np.random.default_rng([config.seed, number])
        n_tokens = int(np.exp(rng.uniform(np.log(shortest), np.log(longest))))
        task = tasks[int(rng.integers(len(tasks)))]
        name, val = f"{source.where}#{number}", {"auto": None, "train": False, "val": True}[source.split]
        if source.where == "questions":
            yield _prompt(
                writer.question(task, n_tokens, rng), Document(name, source.kind or task, val=val), config
            )
            continue
        made = writer.write(task, n_tokens, rng)
        about = Document(name, source.kind or made.kind, val=bool(val))
        yield about, made.ids_T.astype(np.int64), made.roles_T != Role.PROMPT


def _prompt(made: Question, about: Document, config: DataConfig) -> Prompt:
    """A question as a prompt with its expected answer."""
    ids_T = np.concatenate([made.context_T, made.question_T]).astype(np.int64)
    begin = len(made.context_T) if config.question == "response" else len(ids_T)
    return Prompt(about, ids_T, begin, made.answer_T[: config.answer_tokens].astype(np.int64))


def turn_marks(tokenizer: Any) -> ChatIds:
    """What the chat template puts before the user's turn, before the assistant's, after it, and before all.

    Raises:
        DataError: the template does not leave one-token turns alone.
    """
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    ids = render(tokenizer, turns, how="all", name="turn marks").ids_T.tolist()
    user, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in "xy")
    if len(user) != 1 or len(answer) != 1 or ids.count(user[0]) != 1 or ids.count(answer[0]) != 1:
        raise DataError(
            "the chat template's turn marks cannot be told from the turns; leave out synthetic sources"
        )
    at, to = ids.index(user[0]), ids.index(answer[0])
    start = 1 if ids[0] == tokenizer.bos_token_id and at > 1 else 0
    return ChatIds(
        user=tuple(ids[start:at]),
        assistant=tuple(ids[at + 1 : to]),
        end=tuple(ids[to + 1 :]),
        start=tuple(ids[:start]),
    )

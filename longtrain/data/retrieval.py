"""The `synthetic: retrieval` source: questions about facts written into the text of the other sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from longtrain.data.config import SourceConfig
from longtrain.data.mask import render
from longtrain.data.prepared import Writer
from longtrain.data.synthetic import ChatIds, RetrievalWriter, Role, TextStream
from longtrain.errors import ConfigError, DataError

OPTIONS = {"doc_tokens", "tasks"}


def written(
    source: SourceConfig, writer: Writer, tokenizer: Any, *, seed: int
) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """Retrieval documents as (name, kind, ids, mask); all but the questions and hidden facts are labels.

    Args:
        source: `rows` documents; options `doc_tokens: [shortest, longest]` and `tasks: [NAME, ...]`.
        writer: holds the other sources' training documents.
        tokenizer: the target's.
        seed: documents are a function of it.

    Raises:
        ConfigError: another name than `retrieval`, no `rows`, or an unknown option.
        DataError: no text to write into, or a tokenizer that does not keep digits apart.
    """
    if source.where != "retrieval" or not source.rows or set(source.options) - OPTIONS:
        raise ConfigError(
            f"synthetic: {source.where} rows: {source.rows} options: {sorted(source.options)}; allowed: "
            f"synthetic: retrieval, rows: COUNT, options {', '.join(sorted(OPTIONS))}"
        )
    shortest, longest = source.options.get("doc_tokens", (512, 4096))
    writer.ids.file.flush()
    ids = np.memmap(writer.ids.path, writer.ids.dtype, mode="r", offset=128, shape=(writer.ids.length,))
    token_text = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    streams = []
    for kind_index, kind in enumerate(writer.kind_names):
        docs = [i for i, k in enumerate(writer.kinds) if k == kind_index and not writer.val[i]]
        docs = [i for i in docs if writer.labels[i] == writer.lengths[i] - 1]
        if docs:
            parts = [ids[writer.starts[i] : writer.starts[i] + writer.lengths[i]] for i in docs]
            streams.append(TextStream(np.concatenate(parts), token_text, kind))
    retrieval = RetrievalWriter(
        lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
        turn_marks(tokenizer),
        streams,
    )
    tasks = tuple(source.options.get("tasks") or retrieval.tasks)
    for number in range(source.rows):
        rng = np.random.default_rng([seed, number])
        n_tokens = int(np.exp(rng.uniform(np.log(shortest), np.log(longest))))
        document = retrieval.write(tasks[int(rng.integers(len(tasks)))], n_tokens, rng)
        mask_T = document.roles_T != Role.PROMPT
        yield f"retrieval#{number}", document.kind, document.ids_T.astype(np.int64), mask_T


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

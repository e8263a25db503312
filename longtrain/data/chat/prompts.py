"""Makes prompts with responses: cut from running text, or answered by the target.

Shapes: T tokens of one prompt or document.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from longtrain.data.config import DataConfig
from longtrain.data.read.adapters import Document
from longtrain.errors import ConfigError, DataError
from longtrain.journals import Journal, read_journal
from longtrain.progress import follow
from longtrain.settings import TokenId, from_file

Generate = Callable[[list[list[int]]], list[list[int]]]
"""Prompts as token ids -> answers as token ids, in the same order."""


@dataclass(frozen=True)
class PromptDocument:
    """A prompt, and the response recorded for it in the corpus.

    Args:
        document: the document it was made from, for its name and kind.
        ids_T: token ids of the prompt, int64.
        begin: index of the first label: `len(ids_T)`, or the start of the question if evictors are not to
            see the question.
        answer_T: the recorded response with its end marker, int64; None: the target generates it.
    """

    document: Document
    ids_T: np.ndarray
    begin: int
    answer_T: np.ndarray | None = None

    def answered(self, answer_T: np.ndarray) -> tuple[Document, np.ndarray, np.ndarray]:
        """Return the document, ids and label mask with that response appended."""
        ids_T = np.concatenate([self.ids_T, answer_T]).astype(np.int64)
        mask_T = np.zeros(len(ids_T), bool)
        mask_T[self.begin :] = True
        return self.document, ids_T, mask_T


def random_of(seed: int, name: str) -> np.random.Generator:
    """Return a generator of random numbers that are a function of a seed and a name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.default_rng(list(digest[:8]))


def log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    """Draw a whole number from `low` to `high`, 1 or more, whose logarithm is uniform."""
    return min(high, int(np.exp(rng.uniform(np.log(low), np.log(high + 1)))))


def cut_text(
    document: Document,
    ids_T: np.ndarray,
    config: DataConfig,
    *,
    count: int = 1,
    limit: int | None = None,
    bos: int | None = None,
) -> Iterator[PromptDocument]:
    """Cut running text at random points into prompts, each with the text that follows as its response.

    A document within the limit is cut once, at a uniform point. From a longer one, or if `count` is above 1,
    stretches of log-uniform length are taken at random places. The result is a function of the seed and the
    document's name, and does not depend on who writes the responses.

    Args:
        document: the document, whose name seeds the random points.
        ids_T: all its tokens.
        config: `prompt_tokens` bounds the prompts, `answer_tokens` the responses.
        count: number of prompts; fewer if the document is too short.
        limit: largest number of tokens of a prompt with its response; None: no limit.
        bos: the beginning-of-sequence token, put at the start of every prompt; None: there is none.
    """
    if config.prompt_tokens is None:
        return
    head_T = ids_T[: int(len(ids_T) > 0 and ids_T[0] == bos)]
    body_T = ids_T[len(head_T) :]
    low, high = (tokens - len(head_T) for tokens in config.prompt_tokens)
    if limit is not None:
        high = min(high, limit - config.answer_tokens - len(head_T))
    rest = max(1, min(config.answer_tokens, len(body_T) // 4))
    high = min(high, len(body_T) - rest)
    if high < max(low, 1):
        return
    whole = count == 1 and len(body_T) <= config.prompt_tokens[1] + config.answer_tokens
    for number in range(min(count, max(1, len(body_T) // (low + rest)))):
        name = f"{document.name}@{number}" if count > 1 else document.name
        rng = random_of(config.seed, f"{document.name}:{number}")
        if whole:
            n, start = int(rng.integers(low, high + 1)), 0
        else:
            n = log_uniform(rng, max(low, 1), high)
            start = int(rng.integers(len(body_T) - rest - n + 1))
        end = start + n
        yield PromptDocument(
            replace(document, name=name, group=document.group or document.name),
            np.concatenate([head_T, body_T[start:end]]),
            n + len(head_T),
            body_T[end : end + config.answer_tokens],
        )


def check_room(config: DataConfig, limit: int | None) -> None:
    """Refuse a length limit that is too small for the shortest prompt and its answer.

    Raises:
        ConfigError: the limit is below `answer_tokens` and the shortest prompt.
    """
    shortest = config.prompt_tokens[0] if config.prompt_tokens else 1
    if limit is not None and limit < config.answer_tokens + shortest:
        raise ConfigError(
            f"{limit} tokens a document (data.max_doc_tokens, or the target's context) have no room for "
            f"data.answer_tokens={config.answer_tokens} behind a prompt of {shortest}; raise the first or "
            f"lower the second"
        )


Part = tuple[int, int]
"""(index from 0, number of parts): processes that generate answers together split them by their keys."""


@dataclass(frozen=True)
class _Answer:
    """One line of an answers file."""

    key: str
    ids: list[TokenId]


class Answers:
    """A file of generated answers, one JSON line each: `{"key": ..., "ids": [...]}`.

    Lines are flushed to the disk before the next batch begins, so a stopped run resumes where it was. Files
    that other parts wrote beside it are read too.

    Args:
        path: the file; created when the first answer is written.
        settings: everything an answer depends on besides its prompt (model, sampling, length); hashed into
            each key.
        part: write only this part's answers, into a separate file beside `path`.

    Raises:
        ConfigError: another run is writing the file.
        DataError: a line is damaged.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, part: Part | None = None) -> None:
        self.path = path if part is None else path.with_suffix(f".{part[0]}-of-{part[1]}{path.suffix}")
        self.part = part
        self.elsewhere: set[str] = set()
        """Requested keys that belong to other parts and have no answer yet."""
        self._salt = json.dumps(settings, sort_keys=True).encode()
        self.done: dict[str, list[int]] = {}
        self._journal = Journal(self.path) if self.path.exists() else None
        parts = path.parent.glob(f"{glob.escape(path.stem)}.*-of-*{path.suffix}")
        for file in sorted({path, *parts}):
            self._read(file)

    def _read(self, path: Path) -> None:
        advice = "delete that line and run again"
        for number, values in read_journal(path, advice=advice) if path.exists() else ():
            try:
                row = from_file(_Answer, values)
            except ValueError as error:
                raise DataError(f"{path} line {number} is damaged ({error}); {advice}") from None
            self.done[row.key] = row.ids

    def mine(self, key: str) -> bool:
        """Return True if this process generates the answer of that key."""
        return self.part is None or int(key[:8], 16) % self.part[1] == self.part[0]

    def key(self, prompt: Sequence[int]) -> str:
        """Return the key of a prompt's answer: a hash of the prompt and the settings."""
        return hashlib.sha256(self._salt + json.dumps([int(token) for token in prompt]).encode()).hexdigest()

    def add(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        """Append answers and wait until they are on the disk."""
        self._journal = self._journal or Journal(self.path)
        for prompt, answer in zip(prompts, answers, strict=True):
            key, ids = self.key(prompt), [int(token) for token in answer]
            self.done[key] = ids
            self._journal.append({"key": key, "ids": ids})


def respond(
    prompts: Sequence[list[int]],
    generate: Generate,
    answers: Answers,
    *,
    batch: int = 8,
    batch_tokens: int | None = None,
    answer_tokens: int = 0,
) -> Iterator[list[int] | None]:
    """Yield the target's answer to each prompt, in order, generating only those not yet in `answers`.

    None stands for an answer that belongs to another part and does not exist yet.

    Args:
        prompts: token ids.
        generate: generates answers to a batch of prompts.
        answers: the existing answers; new ones are added batch by batch.
        batch: prompts per call; prompts of similar length are batched, the longest first.
        batch_tokens: largest number of tokens of a call, padding and answers included; a longer prompt is
            answered alone.
        answer_tokens: tokens of the longest answer.
    """
    missing = {answers.key(prompt): prompt for prompt in prompts}
    absent = {key: prompt for key, prompt in missing.items() if key not in answers.done}
    answers.elsewhere |= {key for key in absent if not answers.mine(key)}
    todo = sorted((prompt for key, prompt in absent.items() if answers.mine(key)), key=len)[::-1]
    groups = list(_groups(todo, batch, batch_tokens, answer_tokens))
    for group in follow(groups, "answers", total=len(groups), unit="batches"):
        answers.add(group, generate(group))
    for prompt in prompts:
        yield answers.done.get(answers.key(prompt))


def _groups(
    prompts: list[list[int]], batch: int, batch_tokens: int | None, answer_tokens: int
) -> Iterator[list[list[int]]]:
    """Yield batches of prompts, the longest first."""
    at = 0
    while at < len(prompts):
        longest = len(prompts[at]) + answer_tokens
        room = batch if batch_tokens is None else min(batch, max(1, batch_tokens // longest))
        yield prompts[at : at + room]
        at += room

"""Answers written by the target itself, kept as they come: a run that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from longtrain.errors import DataError
from longtrain.log import get_logger

log = get_logger(__name__)

Generate = Callable[[list[list[int]]], list[list[int]]]
"""Prompts as token ids -> answers as token ids, in the same order."""
Watch = Callable[[list[list[list[int]]], int], Iterable[list[list[int]]]]
"""Groups of prompts and their number -> the same groups."""


class Answers:
    """A file of answers, one JSON line each: `{"key": ..., "ids": [...]}`.

    A line is on disk before the next batch is begun; a last line that was cut short by a crash is dropped.

    Args:
        path: created when the first answer is written.
        settings: what an answer depends on besides its prompt (writer, sampling, length); part of each key.

    Raises:
        DataError: a line other than the last is damaged.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self._salt = json.dumps(settings, sort_keys=True).encode()
        self.done: dict[str, list[int]] = {}
        if path.exists():
            self._read()

    def key(self, prompt: Sequence[int]) -> str:
        """The name of a prompt's answer: a hash of prompt and settings."""
        return hashlib.sha256(self._salt + json.dumps([int(token) for token in prompt]).encode()).hexdigest()

    def add(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        """Append answers and wait until they are on disk."""
        lines = []
        for prompt, answer in zip(prompts, answers, strict=True):
            key, ids = self.key(prompt), [int(token) for token in answer]
            self.done[key] = ids
            lines.append(json.dumps({"key": key, "ids": ids}) + "\n")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> None:
        good = 0
        data = self.path.read_bytes()
        for number, line in enumerate(data.splitlines(keepends=True), 1):
            try:
                row = json.loads(line)
                whole = line.endswith(b"\n")
                key, ids = row["key"], [int(token) for token in row["ids"]]
            except (ValueError, KeyError, TypeError) as error:
                if good + len(line) < len(data):
                    raise DataError(
                        f"{self.path}:{number} is damaged ({error}); delete that line and run again"
                    ) from error
                whole = False
            if not whole:
                break
            self.done[key] = ids
            good += len(line)
        if good < len(data):
            log.warning("answers=%s a last line cut short was dropped, bytes=%d", self.path, len(data) - good)
            with self.path.open("r+b") as file:
                file.truncate(good)
                os.fsync(file.fileno())


def respond(
    prompts: Sequence[list[int]],
    generate: Generate,
    answers: Answers,
    *,
    batch: int = 8,
    batch_tokens: int | None = None,
    answer_tokens: int = 0,
    watch: Watch | None = None,
) -> Iterator[list[int]]:
    """The target's answer to each prompt, in order; only those not yet in `answers` are generated.

    Args:
        prompts: token ids.
        generate: writes answers.
        answers: those there are; new ones are added batch by batch.
        batch: prompts a call; prompts of like length go together, the longest first.
        batch_tokens: most tokens of a call, each prompt counted as the longest of them with its answer; a
            longer prompt is answered alone.
        answer_tokens: longest answer.
        watch: wraps the groups still to be answered, given their number, so that progress can be shown.

    Raises:
        DataError: `generate` gave another number of answers.
    """
    missing = {answers.key(prompt): prompt for prompt in prompts}
    todo = sorted((prompt for key, prompt in missing.items() if key not in answers.done), key=len)[::-1]
    groups = list(_groups(todo, batch, batch_tokens, answer_tokens))
    for group in watch(groups, len(groups)) if watch and groups else groups:
        written = generate(group)
        if len(written) != len(group):
            raise DataError(
                f"{len(group)} prompts were given to the target, {len(written)} answers came back"
            )
        answers.add(group, written)
    for prompt in prompts:
        yield answers.done[answers.key(prompt)]


def _groups(
    prompts: list[list[int]], batch: int, batch_tokens: int | None, answer_tokens: int
) -> Iterator[list[list[int]]]:
    """Prompts, longest first, in groups that are answered together."""
    at = 0
    while at < len(prompts):
        longest = len(prompts[at]) + answer_tokens
        room = batch if batch_tokens is None else min(batch, max(1, batch_tokens // longest))
        yield prompts[at : at + room]
        at += room

"""Files of the job `answers`: JSON lines of answered conversations, and the state that a stopped run resumes.

Each part of the work writes its own file of answers, which is a journal: its lines have checksums, and are
conversations for `data.conversations`. The state beside it lists the prompts whose answers were blank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from longtrain.data.chat.asked import Unanswered
from longtrain.data.read.adapters import Message
from longtrain.errors import ConfigError, DataError
from longtrain.files import read_sealed, sealed, write_files
from longtrain.journals import Journal, read_journal

AGAIN = "delete the file, and run again: its answers are written anew"

BEHIND = 1000
"""Most rows that wait to be written."""


class AnswerFiles:
    """The files of one part of the answers.

    Args:
        folder: the run's folder of answers; `rows` in it has the answers of all parts, `state` the rest.
        settings: what determines an answer besides its prompt; another run's answers are refused.
        part: number of the part, and of how many.

    Raises:
        ConfigError: the folder holds answers of other settings, or another process writes this part.
        DataError: a file is damaged.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, part: tuple[int, int]) -> None:
        name = f"part-{part[0]}-of-{part[1]}"
        self.rows, self._settings = folder / "rows", folder / "state" / "settings.json"
        self._state = folder / "state" / f"{name}.json"
        self._check(dict(settings))
        self._journal = Journal(self.rows / f"{name}.jsonl")
        self._blank: list[str] = list((_sealed(self._state) or {"blank": []})["blank"])
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._writing: deque[Future[None]] = deque()
        self.done: set[str] = {*self._keys(), *self._blank}
        """Keys of all finished answers, blank ones and those of other parts included."""

    def _check(self, settings: dict[str, Any]) -> None:
        """Refuse a folder of other settings; record these in a new one."""
        before = _sealed(self._settings)
        if before is None:
            write_files(self._settings.parent, {self._settings.name: sealed(settings)})
            return
        changed = [key for key, value in settings.items() if before.get(key) != value]
        if changed:
            key = changed[0]
            raise ConfigError(
                f"{self.rows} holds answers with {key}={before.get(key)}, and this run has "
                f"{key}={settings[key]}; pass name=OTHER for a folder of its own, or the former value"
            )

    def _keys(self) -> Iterator[str]:
        for path in sorted(self.rows.glob("part-*.jsonl")):
            for _, row in read_journal(path, advice=AGAIN):
                yield str(row["key"])

    def skip(self, asked: Unanswered) -> None:
        """Record an answer without any text, which is not asked for again; as late as `add` does.

        Raises:
            LongtrainError: an earlier one could not be written.
        """
        self.done.add(asked.key)
        self._blank.append(asked.key)
        content = sealed({"blank": self._blank})
        self._write(partial(write_files, self._state.parent, {self._state.name: content}))

    def add(self, asked: Unanswered, messages: Sequence[Message], *, tokens: int, finish: str) -> None:
        """Append an answered conversation, in a thread of its own: whoever writes does not wait for the disk.

        Args:
            asked: its first prompt.
            messages: all turns.
            tokens: number of tokens of its answers.
            finish: `length` if an answer was cut, else `stop_id`.

        Raises:
            LongtrainError: an earlier one could not be written.
        """
        self.done.add(asked.key)
        row = {
            "messages": list(messages),
            "name": asked.name,
            "kind": asked.kind,
            "tokens": tokens,
            "finish": finish,
            "key": asked.key,
        }
        self._write(partial(self._journal.append, row))

    def _write(self, work: Callable[[], None]) -> None:
        """Do `work` in the thread, after all that came before it; wait where the disk is far behind."""
        while self._writing and (self._writing[0].done() or len(self._writing) >= BEHIND):
            self._writing.popleft().result()
        self._writing.append(self._writer.submit(work))

    def close(self) -> None:
        """Wait until all is written, close the part's file, and remove it if it is empty.

        Raises:
            LongtrainError: an answer could not be written.
        """
        self._writer.shutdown(wait=True)
        self._journal.close()
        if not self._journal.path.stat().st_size:
            self._journal.path.unlink()
        for one in self._writing:
            one.result()


def _sealed(path: Path) -> dict[str, Any] | None:
    """Read a file written with `sealed`; None if there is none."""
    try:
        return read_sealed(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged ({error}); {AGAIN}") from error

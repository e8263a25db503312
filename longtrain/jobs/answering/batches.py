"""Writes answers in batches that stay full: finished ones make room for the next prompts at intervals.

The engine decodes a batch until its last sequence has ended, so one long answer would leave the other places
empty. Here a call of the engine writes a limited number of tokens, a turn. Finished answers then leave the
batch, and the others go on in the next turn with their text so far as part of the prompt, beside new prompts.
Random draws depend on seed, prompt and position alone, so turns change nothing in the distribution.

What a turn does depends only on its batch, which is recorded before it begins. A stopped run therefore
repeats that turn, and writes the same answers as one that was not stopped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from longtrain.data.chat.asked import Unanswered
from longtrain.jobs.answering.files import AnswerFiles
from longtrain.log import get_logger

log = get_logger(__name__)

WINDOW_BATCHES = 16
"""Most prompts that are sorted by length at a time, in batches: neighbours then need little padding.

The first window is one batch, and each of the next is twice as long. Writing then begins soon, and a run that
is stopped early has answered more than the longest prompts of a large window."""
TURNS = 4
"""Turns of the longest answer, as long as prompts are short."""
PROMPT_SHARE = 4
"""A turn has at least this part of the longest prompt's tokens: every turn reads the prompts again, which
costs much less a token than writing does."""
SHORTEST_TURN = 32
"""Fewest tokens of a turn, for which the engine records CUDA graphs."""


class Write(Protocol):
    """Continues prompts by at most that many tokens, each with the random draws of its id."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], tokens: int, sequence_ids: Sequence[int]
    ) -> tuple[list[list[int]], list[bool]]:
        """Return the new tokens of each prompt, and True where the last of them is an end token."""


@dataclass
class Started:
    """An answer that is being written."""

    asked: Unanswered
    tokens: list[int]

    @property
    def length(self) -> int:
        """Number of tokens of prompt and answer so far."""
        return len(self.asked.ids_T) + len(self.tokens)


@dataclass
class AnswerBatches:
    """Answers all prompts of a part.

    Args:
        files: where answers and state are written.
        write: the engine.
        text: decodes an answer's tokens.
        answer_tokens: most tokens of an answer.
        batch: most prompts in a call of the engine.
        batch_tokens: most tokens of a call, padding and new tokens included; a longer prompt is answered
            alone.
        advance: called after each turn with (what, number of answers finished in it).
    """

    files: AnswerFiles
    write: Write
    text: Callable[[list[int]], str]
    answer_tokens: int
    batch: int
    batch_tokens: int
    advance: Callable[[str, int], None] = lambda what, done: None
    live: list[Started] = field(default_factory=list)
    n_windows: int = 0
    n_tokens: int = 0
    n_answers: int = 0
    n_cut: int = 0
    n_empty: int = 0
    seconds: float = 0.0

    def run(self, prompts: Iterator[Unanswered], stopping: Callable[[], bool] = lambda: False) -> bool:
        """Answer the prompts that have no answer yet.

        Args:
            prompts: all prompts of the part, in the same order in each run.
            stopping: asked before each turn; True ends the run, to be resumed.

        Returns:
            True if nothing is left.
        """
        queue = self._resume(prompts)
        while True:
            if stopping():
                return False
            chosen, turn = self._next(queue, prompts)
            self.files.begin([(one.asked.key, one.tokens) for one in self.live])
            if not chosen:
                return True
            self._turn(chosen, turn)

    def _resume(self, prompts: Iterator[Unanswered]) -> deque[Unanswered]:
        """Find the unfinished answers' prompts again; returns the prompts that were read and not begun."""
        tokens, found = self.files.started, dict[str, Unanswered]()
        queue: deque[Unanswered] = deque()
        while len(found) < len(tokens) and (window := self._window(prompts)):
            for asked in window:
                if asked.key in tokens:
                    found[asked.key] = asked
                else:
                    queue.append(asked)
        self.live = [Started(found[key], ids) for key, ids in tokens.items() if key in found]
        if lost := len(tokens) - len(found):
            log.warning("unfinished answers=%d dropped: their prompts are no longer in the data", lost)
        return deque(asked for asked in queue if asked.key not in self.files.done)

    def _window(self, prompts: Iterator[Unanswered]) -> list[Unanswered]:
        """Read the next prompts, sorted by length, the longest first."""
        window = list(islice(prompts, min(2**self.n_windows, WINDOW_BATCHES) * self.batch))
        self.n_windows += 1
        return sorted(window, key=lambda asked: (-len(asked.ids_T), asked.key))

    def _next(self, queue: deque[Unanswered], prompts: Iterator[Unanswered]) -> tuple[list[Started], int]:
        """Fill the batch, and return the answers that the next turn writes and its number of tokens."""
        while len(self.live) < self.batch:
            if not queue:
                window = self._window(prompts)
                if not window:
                    break
                queue.extend(asked for asked in window if asked.key not in self.files.done)
                continue
            self.live.append(Started(queue.popleft(), []))
        n = min(self.batch, max(1, len(self.live)))
        while True:
            chosen = self.live[:n]
            longest = max((one.length for one in chosen), default=0)
            turn = max(SHORTEST_TURN, -(-self.answer_tokens // TURNS), longest // PROMPT_SHARE)
            turn = min(turn, max((self.answer_tokens - len(one.tokens) for one in chosen), default=0))
            if n == 1 or len(chosen) * (longest + turn) <= self.batch_tokens:
                return chosen, turn
            n = n // 2

    def _turn(self, chosen: list[Started], turn: int) -> None:
        """Write the next tokens of some answers, and store those that are finished."""
        started_s = time.perf_counter()
        contexts = [[*one.asked.ids_T.tolist(), *one.tokens] for one in chosen]
        ids = [int(one.asked.key[:15], 16) for one in chosen]
        news, ended = self.write(contexts, turn, ids)
        finished = set[str]()
        for one, new, over in zip(chosen, news, ended, strict=True):
            left = self.answer_tokens - len(one.tokens)
            whole = over and len(new) <= left
            one.tokens.extend(new[:left])
            self.n_tokens += min(left, len(new))
            if whole or len(one.tokens) == self.answer_tokens:
                finished.add(one.asked.key)
                self._store(one, whole=whole)
        self.live = [one for one in self.live if one.asked.key not in finished]
        self.seconds += time.perf_counter() - started_s
        self.advance(f"answers, {self.n_tokens / max(self.seconds, 1e-9):.0f} tokens/s", len(finished))

    def _store(self, one: Started, *, whole: bool) -> None:
        """Append an answer to the file, unless it is blank."""
        text = self.text(one.tokens[:-1] if whole else one.tokens)
        if not text.strip():
            self.n_empty += 1
            self.files.skip(one.asked)
            return
        self.n_answers += 1
        self.n_cut += not whole
        finish = "stop_id" if whole else "length"
        self.files.add(one.asked, text, tokens=len(one.tokens), finish=finish)

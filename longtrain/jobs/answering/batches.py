"""Writes answers in places that stay full: where a conversation ends, the next begins while others go on.

A conversation keeps its place, and the KV entries in it, from question to question. Its next prompt is
rendered whole by the chat template; what is new in it is all that the target reads (`Places.begin`).

Random draws depend on seed, prompt and position alone. An answer is therefore the same whatever is beside it
and whenever it begins, up to the rounding of a forward. A stopped run begins its unfinished conversations
anew.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from longtrain.data.chat.asked import Unanswered
from longtrain.data.read.adapters import Message
from longtrain.jobs.answering.files import AnswerFiles
from longtrain.jobs.answering.places import PREFILL_TOKENS, Places
from longtrain.log import get_logger
from longtrain.progress import Pace

log = get_logger(__name__)

JOINING = 16
"""Prompts are read together for at most this part of the places, which are empty until all are free."""
NEXT_STEPS = 8
"""The next questions of conversations are read together, at the steps that are multiples of this. What
happens in a run thus does not depend on the speed of the host."""
RENDER_STEPS = 2
"""Fewest steps that a place waits for its next question, which another thread renders."""


@dataclass
class Conversation:
    """A conversation that is being written.

    Args:
        asked: its first prompt.
        messages: its turns so far.
        ids: tokens of the present prompt.
        answer: tokens of the answer to it.
        n_tokens: tokens of the answers before.
        cut: True if an answer was cut.
    """

    asked: Unanswered
    messages: list[Message]
    ids: list[int]
    answer: list[int] = field(default_factory=list)
    n_tokens: int = 0
    cut: bool = False

    @property
    def draws(self) -> int:
        """Id of the present answer in random draws."""
        asked = sum(turn["role"] == "user" for turn in self.messages[len(self.asked.messages) :])
        key = hashlib.sha256(f"{self.asked.key}:{asked}".encode()).hexdigest() if asked else self.asked.key
        return int(key[:15], 16)

    def common(self, ids: Sequence[int]) -> int:
        """Number of first tokens that a longer prompt shares with what is in the cache."""
        held = [*self.ids, *self.answer[:-1]]
        if ids[: len(held)] == held:
            return len(held)
        pairs = zip(held, ids, strict=False)
        return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(held), len(ids)))


@dataclass
class AnswerBatches:
    """Answers all prompts of a part.

    Args:
        files: where answers are written.
        make: makes places: at most the first number, each with room for the second number of tokens.
        text: decodes an answer's tokens.
        render: (messages, tokens of the earlier prompt, name) -> tokens of a conversation's next prompt.
        ends: token ids that end an answer.
        answer_tokens: most tokens of an answer.
        batch: most places.
        advance: called after each answer with (what, 1).
    """

    files: AnswerFiles
    make: Callable[[int, int], Places]
    text: Callable[[list[int]], str]
    render: Callable[[list[Message], list[int], str], list[int]]
    ends: frozenset[int]
    answer_tokens: int
    batch: int
    advance: Callable[[str, int], None] = lambda what, done: None
    live: dict[int, Conversation] = field(default_factory=dict)
    places: Places | None = None
    n_tokens: int = 0
    n_answers: int = 0
    n_cut: int = 0
    n_empty: int = 0
    seconds: float = 0.0
    """Seconds since the run began."""
    waited_s: float = 0.0
    """Seconds spent waiting for prompts, of `seconds`."""
    spent: Counter[str] = field(default_factory=Counter)
    """Counts of the places used so far: prefilled tokens, prefills, steps, tokens that they could have
    drawn, and seconds of prefills."""
    _pace: Pace | None = None
    """The tokens of the last minute."""
    _full: list[tuple[float, int]] = field(default_factory=list)
    """Seconds and tokens as the first token came, and as no prompt was left for a place that gets free."""
    _queue: deque[Unanswered] = field(default_factory=deque)
    _longer: list[Unanswered] = field(default_factory=list)
    """Prompts that the present places are too small for."""
    _group: list[Unanswered] = field(default_factory=list)
    """The next prompts that are read together."""
    _next: deque[tuple[int, int, Message, Future[list[int]]]] = field(default_factory=deque)
    """Step at which a place goes on, its number, and its next question, which is being rendered."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second since the run began."""
        return self.n_tokens / max(self.seconds, 1e-9)

    @property
    def steady_tokens_per_s(self) -> float:
        """Tokens a second from the first token until no prompt was left for a place that gets free."""
        if not self._full:
            return 0.0
        began, first = self._full[0]
        seconds, tokens = self._full[1] if len(self._full) > 1 else (self.seconds, self.n_tokens)
        if tokens == first:  # all prompts had begun by then
            seconds, tokens = self.seconds, self.n_tokens
        return (tokens - first) / max(seconds - began, 1e-9)

    def times(self) -> str:
        """Say what was read and written, how full the places were, and where the time went."""
        self._close()
        spent = self.spent
        prefill_s = spent["prefill_us"] / 1e6
        return (
            f"prefilled tokens={spent['prefilled']} prefills={spent['prefills']} seconds={prefill_s:.1f}; "
            f"decoding steps={spent['steps']} full={100 * self.n_tokens / max(spent['room'], 1):.0f}% "
            f"seconds={self.seconds - prefill_s - self.waited_s:.1f}; "
            f"waited for prompts seconds={self.waited_s:.1f}"
        )

    def _close(self) -> None:
        """Count what the present places have done, and let go of them."""
        if (one := self.places) is not None:
            self.spent.update(prefilled=one.prefilled, prefills=one.prefills, steps=one.steps)
            self.spent["room"] += one.steps * one.n
            self.spent["prefill_us"] += round(1e6 * one.prefill_s)
        self.places = None

    def run(self, prompts: Iterator[Unanswered], stopping: Callable[[], bool] = lambda: False) -> bool:
        """Answer the prompts that have no answer yet.

        Args:
            prompts: all prompts of the part, in the same order in each run.
            stopping: asked before each step; True ends the run, to be resumed.

        Returns:
            True if nothing is left.
        """
        started_s = time.perf_counter()
        self._pace = Pace(self.n_tokens, started_s)
        with ThreadPoolExecutor(1) as renderer:
            while not stopping():
                self._begin(prompts)
                if not self.live:
                    return not stopping()
                assert self.places is not None
                arrived = self.places.step()
                self.n_tokens += len(arrived)
                for place, token in arrived:
                    answer = self.live[place].answer
                    answer.append(token)
                    if token in self.ends or len(answer) == self.answer_tokens:
                        self._answered(place, renderer)
                self._go_on()
                now_s = time.perf_counter()
                self.seconds = now_s - started_s
                self._pace.mark(self.n_tokens, now_s)
                if self.n_tokens and not self._full:
                    self._full.append((self.seconds, self.n_tokens))
        log.info("stopped; unfinished conversations=%d are begun anew", len(self.live))
        return False

    def needs(self, asked: Unanswered) -> int:
        """Most tokens of a conversation with all its questions and answers."""
        return len(asked.ids_T) + asked.more_tokens + (1 + len(asked.more)) * self.answer_tokens

    def _begin(self, prompts: Iterator[Unanswered]) -> None:
        """Fill free places with the next prompts, as long as there are enough for all of a group."""
        while self.places is None or len(self.live) < self.places.n:
            self._fill(prompts)
            if not self._group:
                return
            longest = max(map(self.needs, self._group))
            if self.places is None or longest > self.places.slots:
                if self.live:
                    return
                self._close()  # its memory is free before the next takes it
                longest = max(map(self.needs, (*self._group, *self._queue)))
                self.places = self.make(min(self.batch, len(self._group) + len(self._queue)), longest)
                self._queue.extendleft(reversed(self._group))
                self._group = []
                continue
            free = [place for place in range(self.places.n) if place not in self.live]
            if len(free) < len(self._group):
                return
            begun = [Conversation(one, [*one.messages], one.ids_T.tolist()) for one in self._group]
            free = free[: len(begun)]
            ids, draws = [one.ids for one in begun], [one.draws for one in begun]
            self.places.begin(free, ids, draws, most=self.answer_tokens)
            self.live.update(zip(free, begun, strict=True))
            self._group = []

    def _fill(self, prompts: Iterator[Unanswered]) -> None:
        """Choose the next group, of prompts of similar length: a batch is sorted, longest first.

        Prompts that need larger places wait until there is a batch of them, since all places are then made
        anew, or until the others end.
        """
        while not self._group and not self._queue:
            started_s = time.perf_counter()
            unanswered = (asked for asked in prompts if asked.key not in self.files.done)
            left = window = list(islice(unanswered, self.batch))
            self.waited_s += time.perf_counter() - started_s
            if self.places is not None:
                slots = self.places.slots
                self._longer += [asked for asked in left if self.needs(asked) > slots]
                left = [asked for asked in left if self.needs(asked) <= slots]
            if len(self._longer) >= self.batch or not window:
                left, self._longer = left + self._longer, []
            self._queue.extend(sorted(left, key=lambda asked: (-len(asked.ids_T), asked.key)))
            if not window and not left:
                if len(self._full) == 1:
                    self._full.append((self.seconds, self.n_tokens))
                return
        most = max(1, (self.places.n if self.places else 1) // JOINING)
        while self._queue and len(self._group) < most:
            if self._group and (len(self._group) + 1) * len(self._group[0].ids_T) > PREFILL_TOKENS:
                return
            self._group.append(self._queue.popleft())

    def _answered(self, place: int, renderer: ThreadPoolExecutor) -> None:
        """Ask the next question after an answer has ended, or store the conversation."""
        one = self.live[place]
        over = one.answer[-1] in self.ends
        text = self.text(one.answer[:-1] if over else one.answer)
        if not text.strip():
            self.n_empty += 1
            self._end(place)
            return
        turn = len(one.messages) - len(one.asked.messages)
        one.messages.append({"role": "assistant", "content": text})
        one.n_tokens += len(one.answer)
        one.cut |= not over
        self.n_answers += 1
        self.n_cut += not over
        last = self._pace.per_s() if self._pace is not None else 0.0
        self.advance(f"answers, tokens/s={self.tokens_per_s:.0f} last_minute={last:.0f}", 1)
        if turn // 2 == len(one.asked.more):
            self._end(place)
            return
        assert self.places is not None
        self.places.stop(place, kept=len(one.ids) + len(one.answer) - 1)
        question: Message = {"role": "user", "content": one.asked.more[turn // 2]}
        coming = renderer.submit(self.render, [*one.messages, question], one.ids, one.asked.name)
        due = -(-(self.places.steps + RENDER_STEPS) // NEXT_STEPS) * NEXT_STEPS
        self._next.append((due, place, question, coming))

    def _go_on(self) -> None:
        """Let places go on whose next question is due; without any other work that is at once."""
        assert self.places is not None
        due: dict[int, tuple[Conversation, int]] = {}
        while self._next and (self._next[0][0] <= self.places.steps or not self.places.busy):
            _, place, question, coming = self._next.popleft()
            one, ids = self.live[place], coming.result()
            if len(ids) + self.answer_tokens > self.needs(one.asked):
                self._end(place)
                continue
            due[place] = one, min(one.common(ids), len(ids) - 1)
            one.messages.append(question)
            one.ids, one.answer = ids, []
        if due:
            texts, draws = [one.ids for one, _ in due.values()], [one.draws for one, _ in due.values()]
            cached = [common for _, common in due.values()]
            self.places.begin([*due], texts, draws, most=self.answer_tokens, cached=cached)

    def _end(self, place: int) -> None:
        """Store a conversation up to its last answer, and free its place."""
        assert self.places is not None
        one = self.live.pop(place)
        self.places.stop(place)
        while one.messages[-1]["role"] == "user" and len(one.messages) > len(one.asked.messages):
            one.messages.pop()
        if len(one.messages) == len(one.asked.messages):
            self.files.skip(one.asked)
        else:
            finish = "length" if one.cut else "stop_id"
            self.files.add(one.asked, one.messages, tokens=one.n_tokens, finish=finish)

"""Marks what was generated: no judgement is asked for twice, several at a time, each kept as it comes."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from longtrain.evaluation.judge.client import (
    Client,
    JudgeError,
    JudgeSettings,
    NotAskedError,
    RefusedError,
    Reply,
)
from longtrain.evaluation.judge.rubrics import JudgeQuestion, Rubric
from longtrain.evaluation.task import Task
from longtrain.log import get_logger

if TYPE_CHECKING:
    from longtrain.evaluation.harness.ledger import Ledger
    from longtrain.evaluation.records import Record
    from longtrain.evaluation.suite import Advance, Suite
    from longtrain.evaluation.task import Example

log = get_logger(__name__)

Json = dict[str, Any]

UNREADABLE = "no mark in the reply"
EMPTY = "empty reply"
COURSE = ("host", "tries")
"""Values of a judgement that may differ in a second run; they go to the ledger and the timings alone."""

UNJUDGED = (
    "not judged: pass suite.judge.url=http://HOST/v1 suite.judge.model=NAME; what was generated is kept"
)
"""Note of a result without a judge."""


class JudgeMarker:
    """Marks records by a judge model.

    A question is asked up to `tries` times until the reply holds a mark; one that never does is unjudged, and
    nothing is put in the place of its mark. A later run asks for it again, as often; the result says how many
    marks took more replies than `tries`. Equal answers of two systems are judged once.

    Args:
        judge: where the judge is and how it is asked.
        rubric: what it is asked and how replies are read.
    """

    def __init__(self, judge: JudgeSettings, rubric: Rubric) -> None:
        self.judge, self.rubric, self.tries = judge, rubric, judge.tries
        self._seen: dict[str, Json] = {}

    def settings(self) -> Json:
        """JSON values that marks follow from."""
        return {**self.judge.settings(), **self.rubric.settings(), "tries": self.tries}

    def course(self) -> Json:
        """How the judgements were had: where, and how many took several tries."""
        judgements = self._seen.values()
        return {
            "hosts": sorted({one["host"] for one in judgements}),
            "judgements": len(judgements),
            "asked_again": sum(one["tries"] > 1 for one in judgements),
        }

    def count(self, records: Sequence[Record]) -> int:
        """Judgements that these records take at most."""
        return sum(len(record.turns) for record in records)

    def mark(
        self,
        records: Sequence[Record],
        suite: Suite,
        ledger: Callable[[str, Json], Ledger],
        advance: Advance,
    ) -> list[Record]:
        """See `longtrain.evaluation.suite.Marker`.

        Raises:
            JudgeError: the judge cannot be used; what it said until then is kept.
            DataError: a question cannot be put, e.g. for want of a reference answer.
        """
        examples = _examples(suite)
        asked = [
            self.rubric.questions(examples[record.task, record.example], record.texts) for record in records
        ]
        follows = {**self.judge.settings(), "prompts_sha256": self.rubric.prompts.sha256}
        mark = hashlib.sha256(json.dumps(follows, sort_keys=True).encode()).hexdigest()[:8]
        book = ledger(f"judge {self.judge.model} {mark}", follows)  # one of each judge, side by side
        try:
            self._judge([question for some in asked for question in some], book, advance)
            for question in {question.key: question for some in asked for question in some}.values():
                self._seen[question.key] = _kept(book, question)[-1]
        finally:
            book.close()
        return [
            self._marked(record, examples[record.task, record.example], some)
            for record, some in zip(records, asked, strict=True)
        ]

    def _judge(self, questions: Sequence[JudgeQuestion], book: Ledger, advance: Advance) -> None:
        """Ask what has no mark in the book and was not asked by this run."""
        times = Counter(question.key for question in questions)
        what = f"judge {self.judge.model}"
        wanted = {question.key: question for question in questions if self._unmarked(book, question)}
        if ready := sum(count for key, count in times.items() if key not in wanted):
            advance(what, ready)
        if not wanted:
            return
        client = Client(self.judge)
        failure: JudgeError | None = None
        try:
            for question, result in self._ask_all(client, list(wanted.values()), book):
                if isinstance(result, JudgeError):
                    failure = failure or result
                    client.stop()  # what is under way is waited for, it may still bring a judgement
                elif isinstance(result, Exception):
                    if not isinstance(result, NotAskedError):
                        raise result
                else:
                    _keep(book, question, result)
                    advance(what, times[question.key])
        finally:
            client.stop()
        client.close()
        there = sum(key in book.done for key in times)
        if failure is not None and there == len(times):  # what was asked had an answer before, without a mark
            log.warning("%s; what earlier runs could not have judged stays unjudged", failure)
        elif failure is not None:
            raise JudgeError(
                f"{failure}; {there} of {len(times)} judgements are kept, the same command goes on from there"
            ) from failure

    def _ask_all(
        self, client: Client, questions: Sequence[JudgeQuestion], book: Ledger
    ) -> Iterator[tuple[JudgeQuestion, Json | Exception]]:
        """Judgements or what went wrong, as they come.

        The threads are daemons: whoever is interrupted and leaves the loop waits for no reply.
        """
        waiting: SimpleQueue[tuple[JudgeQuestion, int]] = SimpleQueue()
        done: SimpleQueue[tuple[JudgeQuestion, Json | Exception]] = SimpleQueue()
        for question in questions:
            before = _kept(book, question)
            waiting.put((question, before[-1]["tries"] if before else 0))

        def work() -> None:
            while True:
                try:
                    question, tried = waiting.get_nowait()
                except Empty:
                    return
                try:
                    done.put((question, self._ask(client, question, tried)))
                except Exception as error:
                    done.put((question, error))

        for _ in range(min(self.judge.concurrency, len(questions))):
            threading.Thread(target=work, name="judge", daemon=True).start()
        for _ in questions:
            yield done.get()

    def _ask(self, client: Client, question: JudgeQuestion, tried: int) -> Json:
        """The judgement of one question: its mark, or why there is none.

        `tries` in it counts replies as the rubric does, those of earlier runs included; a refusal is none.
        """
        reply, reason, spent = Reply(""), "", 0
        while spent < self.tries:
            try:
                reply = client.ask(question.messages)
            except RefusedError as refusal:
                reply, reason = Reply(""), f"refused: {refusal}"
                break
            mark = self.rubric.parse(reply.text)
            if mark is not None:
                return self._judgement(question, reply, tried + spent + 1, mark=mark)
            spent += self.rubric.tries_of(reply.text)
            reason = UNREADABLE if reply.text.strip() else EMPTY
            if reply.finish == "length":
                reason += " (cut off at suite.judge.max_tokens)"
        log.info("judge: %s after %d tries, left unjudged", reason, tried + spent)
        return self._judgement(question, reply, tried + spent, reason=reason)

    def _judgement(
        self, question: JudgeQuestion, reply: Reply, tries: int, *, mark: Json | None = None, reason: str = ""
    ) -> Json:
        return {
            "about": question.about,
            "mark": mark,
            "unjudged": reason or None,
            "reply": reply.text,
            "tries": tries,
            "answered_as": reply.model,
            "host": self.judge.host,
        }

    def _unmarked(self, book: Ledger, question: JudgeQuestion) -> bool:
        kept = _kept(book, question)
        return not kept or (kept[-1]["mark"] is None and question.key not in self._seen)

    def _marked(self, record: Record, example: Example, questions: Sequence[JudgeQuestion]) -> Record:
        judgements = []
        for question in questions:
            seen = self._seen[question.key]
            late = seen["mark"] is not None and seen["tries"] > self.tries
            judgements.append(
                {key: value for key, value in seen.items() if key not in COURSE} | {"late": late}
            )
        marks = [judgement["mark"] for judgement in judgements]
        score = self.rubric.score(example, record.texts, marks)
        return record.marked(score, {"judgements": judgements})


def marker_from(settings: JudgeSettings, rubric: Callable[[], Rubric]) -> JudgeMarker | None:
    """The marker that `suite.judge` asks for; None, and the rubric is not made, where it names no address."""
    return None if settings.url is None else JudgeMarker(settings, rubric())


def marks_of(record: Record) -> list[Json | None]:
    """The marks of a record's questions; nothing if it was not given to a judge."""
    return [judgement["mark"] for judgement in (record.marks or {}).get("judgements", ())]


def judge_facts(marker: JudgeMarker, records: Sequence[Record]) -> Json:
    """Who judged these records: the model, its prompts, and what stayed unjudged."""
    judgements = [one for record in records for one in (record.marks or {}).get("judgements", ())]
    reasons = Counter(_short(one["unjudged"]) for one in judgements if one["mark"] is None)
    return {
        **marker.settings(),
        "prompts": marker.rubric.prompts.facts(),
        "answered_as": sorted({one["answered_as"] for one in judgements} - {""}),
        "judgements": len(judgements),
        "unjudged": sum(reasons.values()),
        "unjudged_reasons": dict(sorted(reasons.items())),
        "first_unjudged": next((quoted(one["reply"]) for one in judgements if one["mark"] is None), None),
        "late": sum(one["late"] for one in judgements),
    }


def quoted(reply: str) -> str:
    """A reply on one line, not too long."""
    line = " ".join(reply.split())
    return line if len(line) <= 160 else f"{line[:157]}..."


def _kept(book: Ledger, question: JudgeQuestion) -> list[Json]:
    """The judgements of a question in the book, one of each run that asked."""
    names = (_name(question, number) for number in itertools.count(1))
    return [book.done[name] for name in itertools.takewhile(book.done.__contains__, names)]


def _keep(book: Ledger, question: JudgeQuestion, judgement: Json) -> None:
    """Put a judgement behind those of earlier runs; the last one's equal is not put."""
    kept = _kept(book, question)
    if not kept or kept[-1] != judgement:
        book.put(_name(question, len(kept) + 1), judgement)


def _name(question: JudgeQuestion, number: int) -> str:
    return question.key if number == 1 else f"{question.key}.{number}"


def _examples(suite: Suite) -> dict[tuple[str, str], Example]:
    tasks = [task for task in suite.tasks if isinstance(task, Task)]
    return {(task.name, example.id): example for task in tasks for example in task.examples()}


def _short(reason: str) -> str:
    """A reason without the numbers in which servers' messages differ."""
    return reason.split(": status", 1)[0] if reason.startswith("refused") else reason

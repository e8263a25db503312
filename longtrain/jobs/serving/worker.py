"""The one thread that decodes, and the queue in front of it.

Shapes: T scored tokens, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from longtrain.decoding.engine import Engine, Generation
from longtrain.decoding.roles import Parts
from longtrain.evaluation.perplexity import foretold, read_contexts
from longtrain.jobs.generate import TextWriter

if TYPE_CHECKING:
    from longtrain.decoding.control import ShapeChoice
    from longtrain.decoding.roles import TreeShape
    from longtrain.targets.model import Target

Result = TypeVar("Result")


class FullError(Exception):
    """As many requests wait as may."""


class GoneError(Exception):
    """The client closed its connection, so nobody reads the answer."""


class Scored(NamedTuple):
    """A token, the log of its probability at temperature 1 (None: it opens the text), the likeliest."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


class Queue:
    """Runs one piece of work at a time, in the order of arrival, always in the same thread.

    Args:
        most: requests that may wait or run.
    """

    def __init__(self, most: int) -> None:
        self.most, self.here = most, 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    async def run(self, work: Callable[[Event], Result], gone: Callable[[], Awaitable[bool]]) -> Result:
        """Do the work when its turn comes.

        Args:
            work: is called in the engine's thread with an event that is set once the client has gone, and
                raises `GoneError` when it sees that.
            gone: says whether the client has closed its connection.

        Raises:
            FullError: too many requests wait.
            GoneError: the client went away first.
        """
        if self.here >= self.most:
            raise FullError
        self.here += 1
        left = Event()
        task = asyncio.wrap_future(self._thread.submit(_unless, left, work))
        try:
            while not (await asyncio.wait({task}, timeout=0.1))[0]:
                if not left.is_set() and await gone():
                    left.set()
            return task.result()
        finally:
            left.set()  # a request whose handler was cancelled ends at its next cycle
            self.here -= 1


def _unless(left: Event, work: Callable[[Event], Result]) -> Result:
    if left.is_set():
        raise GoneError
    return work(left)


class Worker:
    """Answers requests with one system; its engine stays, and with it the CUDA graphs.

    Args:
        target: the frozen model.
        parts: what drafts, evicts, selects or holds the target's cache.
        shape: what is drafted; None without a draft.
    """

    def __init__(self, target: Target, parts: Parts, shape: TreeShape | ShapeChoice | None) -> None:
        self.target, self.parts, self.shape = target, parts, shape
        self.engine = Engine(target, parts)

    def complete(
        self, prompts: Sequence[Sequence[int]], left: Event, send: Callable[[str], None] | None, **asked: Any
    ) -> Generation:
        """Continue prompts.

        Args:
            prompts: token ids of each.
            left: set once nobody waits for the answer.
            send: takes the first prompt's text piece by piece, as soon as each is certain.
            asked: of `Engine.generate`.

        Raises:
            GoneError: nobody waits any more.
            ConfigError, DataError: as `Engine.generate` says.
        """
        ends = () if asked["ignore_eos"] else self.target.info.eos_ids
        writer = _Sender(self.target, colour=False, stop=asked["stop"], ends=ends)
        writer.send = send

        def grown(sequence: int, tokens: list[int], drafted: list[bool]) -> None:
            if left.is_set():
                raise GoneError
            if send is not None and sequence == 0:
                writer(sequence, tokens, drafted)

        generation = self.engine.generate(prompts, shape=self.shape, stream=grown, **asked)
        if send is not None and generation.texts:
            writer.close(generation.texts[0])
        return generation

    @torch.no_grad()
    def score(self, context: Sequence[int], tokens: Sequence[int], *, top: int, whole: bool) -> list[Scored]:
        """Log-probabilities of the tokens after a context.

        Args:
            context: token ids, one at least.
            tokens: the tokens to score; may be none.
            top: how many of the likeliest tokens to list at each place.
            whole: on the full cache, and not on what the system keeps or reads of the context.
        """
        parts, found = Parts() if whole else self.parts, list[Scored]()
        if not tokens:
            return found
        read = read_contexts(self.target, parts, [context], scored=[tokens])
        for _, at, logits_TV in foretold(self.target, read, [tokens], selector=parts.selector):
            here_T = torch.tensor(tokens[at : at + len(logits_TV)], device=logits_TV.device)
            log_TV = logits_TV.log_softmax(-1)
            own = log_TV.gather(1, here_T[:, None])[:, 0].tolist()
            values, ids = (best.tolist() for best in log_TV.topk(top))
            tops = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
            found += map(Scored, here_T.tolist(), own, tops)
        return found


class _Sender(TextWriter):
    """Sends text instead of printing it."""

    send: Callable[[str], None] | None = None

    def show(self, shown: Sequence[tuple[str, bool]]) -> None:
        """Send characters that are certain."""
        if shown and self.send is not None:
            self.send("".join(char for char, _ in shown))

"""The single decoding thread and the queue of requests in front of it.

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
from longtrain.evaluation.perplexity import predicted_logits, read_contexts
from longtrain.jobs.generate import TextWriter

if TYPE_CHECKING:
    from longtrain.decoding.control import ShapeChoice
    from longtrain.decoding.roles import TreeShape
    from longtrain.targets.model import Target

Result = TypeVar("Result")


class FullError(Exception):
    """The queue is full."""


class GoneError(Exception):
    """The client closed its connection, so the answer is not needed."""


class Scored(NamedTuple):
    """A token, its log-probability at temperature 1 (None for the first token), and the most
    likely tokens.
    """

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


class Queue:
    """Runs one piece of work at a time, in order of arrival, always in the same thread.

    Args:
        most: maximum number of requests that wait or run.
    """

    def __init__(self, most: int) -> None:
        self.most, self.here = most, 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    async def run(self, work: Callable[[Event], Result], gone: Callable[[], Awaitable[bool]]) -> Result:
        """Do the work when its turn comes.

        Args:
            work: called in the engine's thread with an event that is set when the client disconnects; it then
                raises `GoneError`.
            gone: returns True once the client has closed its connection.

        Raises:
            FullError: too many requests are waiting.
            GoneError: the client disconnected first.
        """
        if self.here >= self.most:
            raise FullError
        self.here += 1
        left = Event()

        def turn() -> Result:
            if left.is_set():
                raise GoneError
            return work(left)

        task = asyncio.wrap_future(self._thread.submit(turn))
        try:
            while not (await asyncio.wait({task}, timeout=0.1))[0]:
                if not left.is_set() and await gone():
                    left.set()
            return task.result()
        finally:
            left.set()  # a request whose handler was cancelled ends at its next cycle
            self.here -= 1


class Worker:
    """Runs requests with one system. Its engine is reused, and with it the CUDA graphs.

    Args:
        target: the frozen model.
        parts: draft, evictor, selector or cache of the system.
        shape: the shape of the drafted tree; None without a draft.
    """

    def __init__(self, target: Target, parts: Parts, shape: TreeShape | ShapeChoice | None) -> None:
        self.target, self.parts, self.shape = target, parts, shape
        self.engine = Engine(target, parts)

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        left: Event,
        send: Callable[[str], None] | None = None,
        **asked: Any,
    ) -> Generation:
        """Continue prompts.

        Args:
            prompts: token ids of each prompt.
            left: set when the client has disconnected.
            send: receives the first prompt's new text in pieces, each as soon as it is final.
            asked: arguments of `Engine.generate`.

        Raises:
            GoneError: `left` was set.
            ConfigError, DataError: as from `Engine.generate`.
        """
        ends = () if asked["ignore_eos"] else self.target.info.eos_ids
        writer = send and TextWriter(self.target, colour=False, stop=asked["stop"], ends=ends, write=send)

        def grown(sequence: int, tokens: list[int], drafted: list[bool]) -> None:
            if left.is_set():
                raise GoneError
            if writer and sequence == 0:
                writer(sequence, tokens, drafted)

        made = self.engine.generate(prompts, shape=self.shape, stream=grown, **asked)
        if writer and made.texts:
            writer.close(made.texts[0])
        return made

    @torch.no_grad()
    def score(self, context: Sequence[int], tokens: Sequence[int], *, top: int, whole: bool) -> list[Scored]:
        """Compute the log-probabilities of the tokens after a context.

        Args:
            context: token ids, one or more.
            tokens: the tokens to score; may be empty.
            top: number of most likely tokens to list at each position.
            whole: read the context on the full cache, not with the system's own evictor, selector or cache.
        """
        parts, found = Parts() if whole else self.parts, list[Scored]()
        if not tokens:
            return found
        read = read_contexts(self.target, parts, [context], scored=[tokens])
        for _, at, logits_TV in predicted_logits(self.target, read, [tokens], selector=parts.selector):
            here_T = torch.tensor(tokens[at : at + len(logits_TV)], device=logits_TV.device)
            log_TV = logits_TV.log_softmax(-1)
            own = log_TV.gather(1, here_T[:, None])[:, 0].tolist()
            values, ids = (best.tolist() for best in log_TV.topk(top))
            tops = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
            found += map(Scored, here_T.tolist(), own, tops)
        return found

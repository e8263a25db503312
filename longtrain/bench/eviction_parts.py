"""Where a policy's added time goes: its scores, the choice of rows and the compaction, each timed alone.

One prompt is prefilled, then every part is run again and again on its cache. LookaheadKV's scores are the
second pass of the lookahead rows over the cache; SnapKV's are read off the prefill's last queries. Alone, a
part waits for the host to launch it; behind a prefill the host is ahead: each is timed behind other work too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from longtrain.bench import timing
from longtrain.bench.eviction_ttft import FULL, Prompts, Settings, parts_of
from longtrain.cache.evicted import compact
from longtrain.decoding.evict import PromptRun
from longtrain.log import get_logger
from longtrain.targets.step import Rows, Want

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)

COLUMNS = {
    "prompt": "prompt_tokens",
    "method": "method",
    "scores ms": "scores.ms.median",
    "queued": "scores.queued_ms.median",
    "choice ms": "selection.ms.median",
    "choice queued": "selection.queued_ms.median",
    "compaction ms": "compaction.ms.median",
    "compaction queued": "compaction.queued_ms.median",
    "failed": "failed",
}

QUEUE_WRITES = 300
"""Writes of scratch memory (tens of milliseconds) behind which a part is queued, as behind a prefill."""

PARTED = ("lookaheadkv", "snapkv")
"""Methods whose scores need no forward of the whole target of their own."""


def measure(target: Target, settings: Settings) -> Iterator[dict[str, Any]]:
    """One entry a length and method, as they are ready; what does not fit in memory says so."""
    prompts = Prompts(target.info.vocab_size, settings.seed)
    for length in settings.lengths:
        for name in (name for name in PARTED if name in settings.methods):
            row: dict[str, Any] = {"prompt_tokens": length, "method": name, "budget": settings.budget}
            try:
                row |= _measure(target, name, prompts.next(length), settings)
            except torch.OutOfMemoryError as error:
                row["failed"] = f"out of memory: {str(error).partition('.')[0]}"
            timing.release(target.device)
            yield row


@torch.no_grad()
def _measure(target: Target, name: str, prompt: list[int], settings: Settings) -> dict[str, Any]:
    parts = parts_of(target, name, settings)
    assert name != FULL and parts is not None
    evictor: Any = parts.evictor  # a scorer: it takes scores that are there already
    run = prefilled(target, prompt, evictor)
    scores = evictor.scores(run)
    keep = evictor.select(run, scores=scores)
    if keep is None:
        return {"failed": f"a prompt of {len(prompt)} tokens fits the budget of {settings.budget}"}
    work: dict[str, Callable[[], object]] = {
        "scores": lambda: evictor.scores(run),
        "selection": lambda: evictor.select(run, scores=scores),
        "compaction": lambda: compact(run.cache, keep, run.lengths, room=1),
    }
    found: dict[str, Any] = {}
    for part, one in work.items():
        for _ in range(settings.warmup):
            one()
        found[part] = timing.summary([timing.run(one, target.device) for _ in range(settings.repeats)])
        found[part]["queued_ms"] = None
        if target.device.type == "cuda":
            how = {"warmup": 0, "repeats": max(3, settings.repeats // 2), "writes": QUEUE_WRITES}
            found[part]["queued_ms"] = timing.short(lambda _, one=one: one(), target.device, **how)  # type: ignore[misc]
    return found


def prefilled(target: Target, prompt: list[int], evictor: Any) -> PromptRun:
    """A prompt as an evictor sees it right after its prefill."""
    n = len(prompt)
    tokens_BS = torch.tensor([prompt], device=target.device)
    n_B = torch.tensor([n], device=target.device)
    pos_BS = torch.arange(n, device=target.device)[None]
    watch = evictor.watch((n,))
    cache = target.new_cache(1, n + 1 + evictor.extra_rows(n), 1)
    step = target.forward(Rows(pos_BS, tokens_BS, n_B=n_B), cache, want=Want(logits="last"), watch=watch)
    cache.commit(None, n_B)
    assert step.logits_BTV is not None
    return PromptRun(target, cache, (n,), tokens_BS, n_B, step.logits_BTV[:, -1].argmax(-1), watch, 1)

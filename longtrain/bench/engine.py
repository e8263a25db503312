"""Tokens a second of plain and speculative decoding by one engine, in one process, on the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longtrain.bench.report import gib, spread
from longtrain.decoding.engine import Engine, Generation
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.log import get_logger

if TYPE_CHECKING:
    from longtrain.target.model import Target

log = get_logger(__name__)

COLUMNS = {
    "prompt tokens": "prompt_tokens",
    "batch": "batch",
    "plain tok/s": "plain.tokens_per_s.median",
    "draft tok/s": "draft.tokens_per_s.median",
    "speed": "ratio",
    "tau": "draft.tau",
    "same text": "same",
    "prefill s": "plain.prefill_s.median",
    "cache GiB": "plain.cache_gib",
    "draft GiB": "draft.draft_gib",
}


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Args:
        max_new_tokens: generated tokens a prompt; no token id ends a text.
        sampling: the same for both.
        shape: what is drafted.
        warmup: runs not counted.
        repeats: runs counted.
    """

    max_new_tokens: int
    sampling: Sampling
    shape: TreeShape
    warmup: int = 1
    repeats: int = 5


def measure(
    target: Target, parts: Parts | None, prompts: Sequence[Sequence[int]], settings: Settings
) -> dict[str, Any]:
    """Decode one batch of prompts plainly and, where `parts` brings a draft, with it.

    Args:
        target: the model.
        parts: what an artifact brings; None: plain decoding alone.
        prompts: token ids of equal length.
        settings: see `Settings`.
    """
    limits = Limits()
    row: dict[str, Any] = {"prompt_tokens": len(prompts[0]), "batch": len(prompts)}

    def run(engine: Engine, shape: TreeShape) -> Callable[[], Generation]:
        return lambda: engine.generate(
            prompts,
            max_new_tokens=settings.max_new_tokens,
            sampling=settings.sampling,
            shape=shape,
            ignore_eos=True,
        )

    row["plain"], plain = _timed(run(Engine(target, limits=limits), TreeShape(())), settings)
    log.info("prompt_tokens=%d batch=%d plain=%s", row["prompt_tokens"], row["batch"], row["plain"])
    if parts is not None and parts.draft is not None:
        row["draft"], drafted = _timed(run(Engine(target, parts, limits=limits), settings.shape), settings)
        row["draft"]["tau"] = drafted.stats.tau
        row["draft"]["acceptance_rate"] = drafted.stats.acceptance_rate
        row["same"] = sum(a == b for a, b in zip(plain.tokens, drafted.tokens, strict=True)) / len(prompts)
        row["ratio"] = row["draft"]["tokens_per_s"]["median"] / row["plain"]["tokens_per_s"]["median"]
        log.info("prompt_tokens=%d batch=%d draft=%s", row["prompt_tokens"], row["batch"], row["draft"])
    return row


def _timed(work: Callable[[], Generation], settings: Settings) -> tuple[dict[str, Any], Generation]:
    """Speeds of the counted runs, and the last run's output."""
    for _ in range(settings.warmup):
        work()
    runs = [work() for _ in range(settings.repeats)]
    stats = [run.stats for run in runs]
    figures = {
        "tokens_per_s": spread([one.tokens_per_s for one in stats]),
        "prefill_s": spread([one.prefill_s for one in stats]),
        "cache_gib": gib(stats[-1].cache_bytes),
        "draft_gib": gib(stats[-1].draft_bytes),
        "target_forwards": stats[-1].target_forwards,
    }
    return figures, runs[-1]

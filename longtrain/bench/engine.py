"""Tokens a second of the engine: plain and speculative, against Hugging Face's loop and the roofline.

All ways decode the same prompts in one process, over the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from longtrain.bench import steps
from longtrain.bench.report import gib, spread
from longtrain.costs import roofline
from longtrain.costs.hardware import gpu_called
from longtrain.costs.model import Sizes
from longtrain.decoding.control import ShapeChoice
from longtrain.decoding.engine import PLAIN, Engine, Generation
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError
from longtrain.log import get_logger
from longtrain.targets.stock import decode_stock

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)

COLUMNS = {
    "prompt tokens": "prompt_tokens",
    "batch": "batch",
    "plain tok/s": "plain.tokens_per_s.median",
    "least ms": "roofline_ms",
    "of roofline": "roofline_share",
    "HF tok/s": "hugging_face.tokens_per_s.median",
    "not captured tok/s": "uncaptured.tokens_per_s.median",
    "draft tok/s": "draft.tokens_per_s.median",
    "speed": "ratio",
    "same cache tok/s": "same_cache.tokens_per_s.median",
    "speed over it": "same_cache_ratio",
    "tau": "draft.tau",
    "same text": "same",
    "prefill s": "plain.prefill_s.median",
    "cache GiB": "plain.cache_gib",
    "draft GiB": "draft.draft_gib",
}
STEP_COLUMNS = {
    "prompt tokens": "prompt_tokens",
    "batch": "batch",
    "shape": "shape",
    "cycle ms": "cycle_ms",
    "idle ms": "idle_ms.median",
    "draft ms": "propose_ms.median",
    "attention ms": "attention_ms.median",
    "linear ms": "linear_ms",
    "accept ms": "accept_ms.median",
    "commit ms": "commit_ms.median",
}
BASELINES = ("hugging_face", "uncaptured")


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Args:
        max_new_tokens: generated tokens a prompt; no token id ends a text.
        sampling: the same for all ways; Hugging Face's loop is greedy.
        shape: what is drafted; a menu: as much as pays, cycle by cycle. Cycles of a menu are not taken apart.
        warmup: runs not counted.
        repeats: runs counted.
        baselines: further ways to decode plainly: names of `BASELINES`.
        cycles: cycles that are taken apart, plainly and with the draft; 0: none.

    Raises:
        ConfigError: no such baseline.
    """

    max_new_tokens: int
    sampling: Sampling
    shape: TreeShape | ShapeChoice
    warmup: int = 1
    repeats: int = 5
    baselines: Sequence[str] = ()
    cycles: int = 0

    def __post_init__(self) -> None:
        for name in self.baselines:
            if name not in BASELINES:
                raise ConfigError(f"suite.baselines names '{name}'; known: {', '.join(BASELINES)}")


def measure(
    target: Target, parts: Parts | None, prompts: Sequence[Sequence[int]], settings: Settings
) -> dict[str, Any]:
    """Decode one batch of prompts plainly, by the baselines and, where `parts` brings a draft, with it.

    Parts with a cache or an evictor of their own also decode plainly with those: that, and not the whole
    cache in 16 bits, is whose text the draft must give.

    Args:
        target: the model.
        parts: what an artifact brings; None: plain decoding alone.
        prompts: token ids of equal length.
        settings: see `Settings`.
    """
    row: dict[str, Any] = {"prompt_tokens": len(prompts[0]), "batch": len(prompts)}

    def run(engine: Engine, shape: TreeShape | ShapeChoice) -> Callable[[], Generation]:
        return lambda: engine.generate(
            prompts,
            max_new_tokens=settings.max_new_tokens,
            sampling=settings.sampling,
            shape=shape,
            ignore_eos=True,
        )

    row["plain"], plain = _timed(run(Engine(target), PLAIN), settings)
    row |= _roofline(target, row)
    log.info("prompt_tokens=%d batch=%d plain=%s", row["prompt_tokens"], row["batch"], row["plain"])
    if "uncaptured" in settings.baselines:
        row["uncaptured"], _ = _timed(run(Engine(target, capture=False), PLAIN), settings)
    if "hugging_face" in settings.baselines:
        row["hugging_face"] = _stock(target, prompts, settings)
    ways: list[tuple[Parts | None, TreeShape]] = [(None, PLAIN)]
    if parts is not None and parts.draft is not None:
        if parts.cache is not None or parts.evictor is not None:
            undrafted = replace(parts, draft=None)
            row["same_cache"], plain = _timed(run(Engine(target, undrafted), PLAIN), settings)
            ways.append((undrafted, PLAIN))
        engine = Engine(target, parts)
        row["draft"], drafted = _timed(run(engine, settings.shape), settings)
        if isinstance(settings.shape, TreeShape):
            ways.append((parts, settings.shape))
        else:
            row["draft"]["costs"] = engine.costs.table()
        row["draft"]["cycles"] = [
            {"shape": list(widths), "cycles": count} for widths, count in drafted.stats.shapes.items()
        ]
        row["draft"]["tau"] = drafted.stats.tau
        row["draft"]["acceptance_rate"] = drafted.stats.acceptance_rate
        row["same"] = sum(a == b for a, b in zip(plain.tokens, drafted.tokens, strict=True)) / len(prompts)
        row["ratio"] = _speed(row, "draft") / _speed(row, "plain")
        if "same_cache" in row:
            row["same_cache_ratio"] = _speed(row, "draft") / _speed(row, "same_cache")
        log.info("prompt_tokens=%d batch=%d draft=%s", row["prompt_tokens"], row["batch"], row["draft"])
    if settings.cycles:
        row["steps"] = [
            steps.measure(target, one, prompts, steps.Settings(shape, settings.sampling, settings.cycles))
            for one, shape in ways
        ]
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


def _speed(row: dict[str, Any], way: str) -> float:
    """Tokens a second of one way."""
    return float(row[way]["tokens_per_s"]["median"])


def _stock(target: Target, prompts: Sequence[Sequence[int]], settings: Settings) -> dict[str, Any]:
    """Hugging Face's own loop."""
    runs = [
        decode_stock(target, prompts, max_new_tokens=settings.max_new_tokens)
        for _ in range(settings.warmup + settings.repeats)
    ][settings.warmup :]
    tokens = len(prompts) * (settings.max_new_tokens - 1)
    return {
        "tokens_per_s": spread([tokens / one.decode_s for one in runs]),
        "prefill_s": spread([one.prefill_s for one in runs]),
    }


def _roofline(target: Target, row: dict[str, Any]) -> dict[str, Any]:
    """The least time of a plain step on this GPU and its share of the time taken; nothing elsewhere."""
    gpu = gpu_called(torch.cuda.get_device_name(target.device)) if target.device.type == "cuda" else None
    if gpu is None:
        return {}
    parts = roofline.step(Sizes.of(target.info), batch=row["batch"], context=row["prompt_tokens"])
    least_ms = roofline.figures(parts, gpu)["ms"]
    taken_ms = 1e3 * row["batch"] / _speed(row, "plain")
    return {"gpu": gpu.name, "roofline_ms": least_ms, "roofline_share": least_ms / taken_ms}

"""Tokens a second with a draft and without one: the same engine, prompts and process, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from longtrain.decoding.engine import Engine
from longtrain.decoding.limits import Limits
from longtrain.decoding.stats import Stats
from longtrain.evaluation.acceptance import PLAIN, Advance, Protocol, Variant

if TYPE_CHECKING:
    from longtrain.target.model import Target

WARMUP_TOKENS = 16


def measure_speed(
    target: Target,
    variants: Sequence[Variant],
    protocol: Protocol,
    *,
    batch: int = 1,
    prompts: int = 3,
    advance: Advance = lambda what, done: None,
) -> list[dict[str, Any]]:
    """Time plain decoding and every variant at every length, in turn on each batch of prompts.

    Args:
        target: the frozen model.
        variants: what to time beside plain decoding.
        protocol: lengths, points and settings.
        batch: prompts decoded together.
        prompts: how many are timed at each length, after one short run that is not counted.
        advance: told of progress.

    Returns:
        One row a length: figures by name (`plain` first) and each variant's ratio to plain decoding.
    """
    ways = [PLAIN, *variants]
    rows = []
    for length in protocol.lengths:
        texts = protocol.prompts(length)[:prompts]
        batches = [texts[first : first + batch] for first in range(0, len(texts), batch)]
        for way in ways:
            _timed(target, way, batches[0], replace(protocol, max_new_tokens=WARMUP_TOKENS))
        stats = {way.name: Stats() for way in ways}
        peak = dict.fromkeys(stats, 0)
        for some in batches:
            for way in ways:
                found, held = _timed(target, way, some, protocol)
                stats[way.name] += found
                peak[way.name] = max(peak[way.name], held)
                advance(f"speed of {way.name} @ {length}", len(some))
        figures = {
            name: _figures(one, stats[PLAIN.name], n_prefills=len(batches), peak=peak[name])
            for name, one in stats.items()
        }
        rows.append({"length": length, "batch": batch, "figures": figures})
    return rows


def _figures(one: Stats, plain: Stats, *, n_prefills: int, peak: int) -> dict[str, Any]:
    return {
        "tokens_per_s": one.tokens_per_s,
        "end_to_end_tokens_per_s": one.end_to_end_tokens_per_s,
        "ratio": one.tokens_per_s / plain.tokens_per_s,
        "end_to_end_ratio": one.end_to_end_tokens_per_s / plain.end_to_end_tokens_per_s,
        "ms_per_cycle": 1e3 * one.decode_s / max(1, one.target_forwards - n_prefills),
        "prefill_s": one.prefill_s,
        "decode_s": one.decode_s,
        "tokens": one.decode_tokens,
        "peak_device_bytes": peak or None,
    }


def _timed(target: Target, way: Variant, prompts: list[list[int]], protocol: Protocol) -> tuple[Stats, int]:
    """Stats of one call, and the most device memory held during it."""
    on_gpu = target.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(target.device)
        torch.cuda.reset_peak_memory_stats(target.device)
    limits = Limits(len(prompts), len(prompts[0]) + protocol.max_new_tokens, way.shape.n_nodes)
    generation = Engine(target, way.parts, limits=limits).generate(
        prompts,
        max_new_tokens=protocol.max_new_tokens,
        sampling=protocol.sampling,
        shape=way.shape,
        ignore_eos=protocol.ignore_eos,
    )
    return generation.stats, torch.cuda.max_memory_allocated(target.device) if on_gpu else 0

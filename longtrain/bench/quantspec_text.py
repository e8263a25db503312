"""Speculation with a real target on real text: acceptance, speed and memory by context and drafted tokens.

Prompts are decoded one at a time. Every draft stands beside plain decoding of the full 16-bit cache and,
where it brings a cache of its own, beside plain decoding of that cache, whose text it must repeat.
Source: QuantSpec Tables 3 and 6, Figs. 4 and 9.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from longtrain.bench.report import gib, shorter
from longtrain.bench.timing import release
from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.roles import Law, Parts, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.decoding.stats import Stats
from longtrain.log import get_logger

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)

FULL = "out of memory"
"""Why a row has no figures: memory is a result, any other error ends the run."""

Prompts = Mapping[int, Sequence[Sequence[int]]]
"""Tokens of context -> prompts of that length."""


@dataclass(frozen=True)
class System:
    """A draft to be measured.

    Args:
        name: unique.
        attach: makes its parts for a target.
        drafted: tokens a cycle, each of them measured.
    """

    name: str
    attach: Callable[[Target], Parts]
    drafted: tuple[int, ...]


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Args:
        max_new_tokens: generated tokens a prompt; no token id ends a text.
        sampling: processors and seed.
        law: how drafted tokens are chosen.
    """

    max_new_tokens: int = 90
    sampling: Sampling = field(default_factory=Sampling)
    law: Law = Law.POINT


@dataclass(frozen=True)
class _Run:
    texts: list[list[int]]
    stats: Stats


def run(
    target: Target,
    systems: Sequence[System],
    prompts: Prompts,
    settings: Settings,
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Measure plain decoding and all systems at every length.

    Args:
        target: the model.
        systems: what drafts.
        prompts: by length.
        settings: see `Settings`.
        keep: told the rows so far after every new one.

    Raises:
        LongtrainError: a setting is wrong, or a system does not serve the target.
    """
    rows: list[dict[str, Any]] = []
    runs: dict[tuple[str, int], _Run] = {}

    def add(name: str, engine: Engine | None, length: int, shape: TreeShape, **row: Any) -> None:
        row = {"system": name, "prompt_tokens": length, "drafted": shape.depth, **row}
        if engine is not None:
            found, done = _measured(target, engine, prompts[length], shape, settings)
            row |= found
            if done is not None and not shape.widths:
                runs[name, length] = done
            if done is not None:
                row |= _beside(done, runs, name, length)
        rows.append(row)
        shown = ("acceptance_rate", "tokens_per_s", "speed", "failed")
        about = " ".join(f"{key}={shorter(row[key])}" for key in shown if key in row)
        log.info("%s drafted=%d prompt_tokens=%d %s", name, shape.depth, length, about)
        keep(rows)

    whole = Engine(target)
    for length in prompts:
        add("plain", whole, length, PLAIN)
    del whole
    for system in systems:
        if target.device.type == "cuda":
            release(target.device)
        try:
            engine = Engine(target, system.attach(target))
        except torch.OutOfMemoryError:
            add(system.name, None, min(prompts), PLAIN, failed=FULL)
            continue
        for length in prompts:
            if engine.parts.cache is not None or engine.parts.evictor is not None:
                add(system.name, engine, length, PLAIN)
            for count in system.drafted:
                add(system.name, engine, length, TreeShape((1,) * count, settings.law))
        del engine
    return rows


def _measured(
    target: Target,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    shape: TreeShape,
    settings: Settings,
) -> tuple[dict[str, Any], _Run | None]:
    """Figures over all prompts, after one that is not counted; or that memory ran out."""

    def decode(prompt: Sequence[int], index: int) -> tuple[list[int], Stats]:
        done = engine.generate(
            [prompt],
            max_new_tokens=settings.max_new_tokens,
            sampling=settings.sampling,
            shape=shape,
            ignore_eos=True,
            sequence_ids=[index],
        )
        return done.tokens[0], done.stats

    cuda = target.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(target.device)
    try:
        decode(prompts[0], 0)
        texts, stats = [], Stats()
        for index, prompt in enumerate(prompts):
            text, one = decode(prompt, index)
            texts.append(text)
            stats += one
        failed = False
    except torch.OutOfMemoryError:
        failed = True
    memory = {"peak_gib": gib(torch.cuda.max_memory_allocated(target.device))} if cuda else {}
    if failed:
        return {"failed": FULL, **memory}, None
    found: dict[str, Any] = {
        "prompts": len(prompts),
        "tokens_per_s": stats.tokens_per_s,
        "end_to_end_tokens_per_s": stats.end_to_end_tokens_per_s,
        "cache_gib": gib(stats.cache_bytes),
        "draft_gib": gib(stats.draft_bytes),
        **memory,
    }
    if shape.widths:
        found |= {
            "acceptance_rate": stats.acceptance_rate,
            "tokens_per_cycle": stats.tau,
            "by_depth": [
                {"depth": depth + 1, "accepted": accepted, "tried": tried}
                for depth, (accepted, tried) in enumerate(stats.by_depth())
            ],
        }
    return found, _Run(texts, stats)


def _beside(done: _Run, runs: Mapping[tuple[str, int], _Run], name: str, length: int) -> dict[str, Any]:
    """Speeds over plain decoding, of the full cache and of the same one, and the share of equal texts.

    Texts are compared with those of plain decoding on the same cache.
    """
    found: dict[str, Any] = {}
    plain, own = runs.get(("plain", length)), runs.get((name, length))
    if plain is not None:
        found["speed"] = done.stats.tokens_per_s / plain.stats.tokens_per_s
    if own is not None and own is not plain:
        found["same_cache_speed"] = done.stats.tokens_per_s / own.stats.tokens_per_s
    base = own or plain
    if base is not None and base is not done:
        pairs = [*zip(base.texts, done.texts, strict=True)]
        found["same_texts"] = sum(a == b for a, b in pairs) / len(pairs)
    return found

"""Time to first token with and without eviction, by the engine as users run it.

A run is `Engine.generate`: prompt ids in, prefill, the policy's scores and choice, compaction of the cache,
the first answer token on the host, everything on the device done. Every run of a method is paired with a run
of the full cache on the same prompt right before it, in one process; no two pairs share a prompt. Differences
are taken pair by pair, so a clock that drifts meets both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from longtrain import methods
from longtrain.bench import timing
from longtrain.decoding.engine import PLAIN, Engine, Generation
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts
from longtrain.log import get_logger
from longtrain.methods import policies

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)

COLUMNS = {
    "prompt": "prompt_tokens",
    "method": "method",
    "pairs": "pairs",
    "first token ms": "ms.median",
    "added ms": "extra_ms.median",
    "p10": "extra_ms.p10",
    "p90": "extra_ms.p90",
    "overhead %": "overhead_percent",
    "theory ms": "theory_ms",
    "theory %": "theory_percent",
    "cache MB before": "cache_mb_before",
    "cache MB after": "cache_mb_after",
    "peak GiB": "peak_gib",
    "failed": "failed",
}

FULL = "full"
"""The method that evicts nothing."""


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Args:
        lengths: prompt tokens.
        methods: `lookaheadkv` and names of policies; the full cache is measured at any rate.
        options: method -> options of its policy (SpecKV's draft, say), or keys of LookaheadKV's Config.
        budget: rows kept of each layer and KV head.
        warmup: runs of each method and length not counted.
        repeats: most pairs of a method and length.
        least: pairs run at any rate.
        seconds: of a length; no round of pairs starts later.
        seed: of prompts and of LookaheadKV's module.
    """

    lengths: tuple[int, ...]
    methods: tuple[str, ...]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    budget: int = 128
    warmup: int = 2
    repeats: int = 20
    least: int = 3
    seconds: float = 30.0
    seed: int = 0


class Prompts:
    """Random token ids, new ones every time."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.vocab_size = vocab_size
        self._coins = torch.Generator().manual_seed(seed)

    def next(self, length: int) -> list[int]:
        """Ids of a prompt."""
        return torch.randint(self.vocab_size, (length,), generator=self._coins).tolist()


def lookahead_module(target: Target, options: Mapping[str, Any], seed: int) -> Any:
    """LookaheadKV's module and config; its LoRA's B is random too, so that its products are real work."""
    spec = methods.get("lookaheadkv")
    config = spec.config(**options)
    torch.manual_seed(seed)
    module = spec.build(config, target.info).to(target.device).eval()
    with torch.no_grad():
        for value in module.parameters():
            if not value.any():
                value.normal_(0.0, 0.02)
    return module, config


def parts_of(target: Target, name: str, settings: Settings) -> Parts | None:
    """What the engine is given for a method; None for the full cache.

    Raises:
        ConfigError: no such method, or an option it does not have.
    """
    options = dict(settings.options.get(name, {}))
    if name == FULL:
        return None
    if name != "lookaheadkv":
        evictor: Any = policies.get(name, budget=Budget(tokens=settings.budget), **options)
        return Parts(evictor=evictor, name=name)
    spec = methods.get(name)
    assert spec.attach is not None
    module, config = lookahead_module(target, options, settings.seed)
    return spec.attach(module, target, config, {"budget_tokens": settings.budget})


def measure(target: Target, settings: Settings) -> Iterator[dict[str, Any]]:
    """Entries of one length after the other, `full` first; a method that fails does not end the others."""
    engines = {name: Engine(target, parts_of(target, name, settings)) for name in (FULL, *settings.methods)}
    prompts = Prompts(target.info.vocab_size, settings.seed)
    for length in settings.lengths:
        yield from _length(target, engines, prompts, length, settings)
        timing.release(target.device)


def _length(
    target: Target, engines: Mapping[str, Engine], prompts: Prompts, length: int, settings: Settings
) -> list[dict[str, Any]]:
    runs: dict[str, list[tuple[timing.Run, timing.Run]]] = {name: [] for name in engines if name != FULL}
    failed: dict[str, str] = {}
    bytes_of: dict[str, dict[str, Any]] = {}
    full: list[timing.Run] = []

    def one(name: str, prompt: list[int]) -> timing.Run:
        found: list[Generation] = []
        clocked = timing.run(lambda: found.append(first_token(engines[name], prompt)), target.device)
        bytes_of[name] = _bytes(found[0])
        return clocked

    def guarded(name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except torch.OutOfMemoryError as error:
            failed[name] = f"out of memory: {str(error).partition('.')[0]}"
        except Exception as error:  # one method's fault must not lose the others' figures
            log.exception("method=%s prompt_tokens=%d failed", name, length)
            failed[name] = f"{type(error).__name__}: {error}"
        if name in failed:
            timing.release(target.device)

    def pair(name: str) -> None:
        prompt = prompts.next(length)
        base = one(FULL, prompt)
        runs[name].append((base, one(name, prompt)))
        full.append(base)

    def warm(name: str) -> None:
        for _ in range(settings.warmup):
            one(name, prompts.next(length))

    for name in engines:
        guarded(name, lambda name=name: warm(name))  # type: ignore[misc]
    if FULL in failed:
        return [{"prompt_tokens": length, "method": FULL, "failed": failed[FULL]}]
    if not runs:
        full = [one(FULL, prompts.next(length)) for _ in range(settings.least)]
    going, i = timing.rounds(settings.repeats, least=settings.least, seconds=settings.seconds), 0
    while any(name not in failed for name in runs) and going(i):
        for name in runs:
            if name not in failed:
                guarded(name, lambda name=name: pair(name))  # type: ignore[misc]
        i += 1
    rows = (
        [{"prompt_tokens": length, "method": FULL, **timing.summary(full), **bytes_of[FULL]}] if full else []
    )
    for name, pairs in runs.items():
        row: dict[str, Any] = {"prompt_tokens": length, "method": name, "budget": settings.budget}
        if pairs:
            base, own = [a for a, _ in pairs], [b for _, b in pairs]
            row |= {**timing.summary(own), **timing.versus(base, own), **bytes_of[name]}
            row["pairs_ms"] = [[a.wall_ms, b.wall_ms] for a, b in pairs]
        if name in failed:
            row["failed"] = failed[name]
        rows.append(row)
    return rows


def first_token(engine: Engine, prompt: list[int]) -> Generation:
    """Prefill, evict and give the first answer token."""
    return engine.generate([prompt], max_new_tokens=1, shape=PLAIN, ignore_eos=True)


def _bytes(found: Generation) -> dict[str, Any]:
    """What the cache held before and after eviction."""
    stats = found.stats
    return {
        "kept_rows": stats.kept_rows[0],
        "cache_bytes_before": stats.cache_bytes_full,
        "cache_bytes_after": stats.cache_bytes,
        "cache_mb_before": stats.cache_bytes_full / 1e6,
        "cache_mb_after": stats.cache_bytes / 1e6,
    }

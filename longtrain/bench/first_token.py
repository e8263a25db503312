"""Time to the first token of systems that evict, beside the full cache, and where the added time goes.

A run is `Engine.generate`: prompt ids in, prefill, the policy's scores and choice, compaction of the cache,
the first answer token on the host, everything on the device done. Every run of a system is paired with a run
of the full cache on the same prompt, right before it or, in every other pair, right after it, in one process;
no two pairs share a prompt. Differences are taken pair by pair, so a clock that drifts meets both sides, and
so does a device that is slower right after a run.

The parts of the added time (scores, choice of rows, compaction) are each timed alone on the cache of one
prompt. Alone, a part waits for the host to launch it; behind a prefill the host is ahead, so each is timed
behind other work too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Annotated, Any

import torch

from longtrain.bench import clock
from longtrain.bench.clock import Timing
from longtrain.bench.cycles import random_ids
from longtrain.bench.suites import Auto, Context, Row
from longtrain.cache.evicted import compact
from longtrain.decoding.engine import PLAIN, Engine, Generation
from longtrain.decoding.evict import Budget, PromptRun
from longtrain.errors import ConfigError
from longtrain.methods import policies
from longtrain.settings import Count, CountOrZero, Lengths, Seconds
from longtrain.systems import EVICTOR, FULL_CACHE, Entry, System
from longtrain.targets.model import Target
from longtrain.targets.step import Rows, Want

COLUMNS = {
    "prompt": "prompt_tokens",
    "method": "method",
    "pairs": "pairs",
    "first token ms": "ms.median",
    **clock.spread_columns("added ms", "extra_ms"),
    "overhead %": "overhead_percent",
    "theory ms": "theory_ms",
    "theory %": "theory_percent",
    "cache MB before": "cache_mb_before",
    "cache MB after": "cache_mb_after",
    "peak GiB": "peak_gib",
    "failed": "failed",
}
PART_COLUMNS = {
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
FULL = FULL_CACHE.family
KEY = "suite.cost.methods"


@dataclass(frozen=True, kw_only=True)
class FirstTokenSettings:
    """What is measured.

    Args:
        lengths: prompt tokens.
        budget_tokens: rows kept of each layer and KV head.
        warmup: runs of each system and length not counted.
        repeats: most pairs of a system and length.
        min_repeats: pairs run whatever the time.
        seconds: of a length; no further round of pairs starts after it.
    """

    lengths: Annotated[Lengths, Auto(["4k", "8k", "16k", "32k"], [256, "1k"])]
    budget_tokens: Count = 128
    warmup: CountOrZero = 2
    repeats: Count = 20
    min_repeats: Count = 3
    seconds: Seconds = 40.0


def entries_of(values: Sequence[Any], context: Context) -> list[Entry]:
    """The systems, a method that `method=` chooses with its settings.

    Raises:
        ConfigError: an entry is wrong, or needs a tokenizer, which random weights do not have.
    """
    name = context.method["name"] if context.method else None
    bare = (name, {"name": name})
    chosen = {"method": context.method, "label": name}
    found = context.entries([chosen if name and value in bare else value for value in values], KEY)
    if any(entry.policy is not None and entry.policy.name == "kvzip" for entry in found):
        raise ConfigError(
            f"{KEY} names kvzip, which asks the target in words; random weights come without a tokenizer, so "
            "it cannot be measured here"
        )
    return found


def systems_of(
    target: Target, entries: Sequence[Entry], budget: int, context: Context, draft: Callable[[], Target]
) -> list[System]:
    """The full cache and the systems.

    Args:
        target: the model.
        entries: see `entries_of`.
        budget: rows kept of each layer and KV head.
        context: see `Context`.
        draft: gives the small model, for a policy that writes with one and names none.
    """
    found = [FULL_CACHE]
    for entry in entries:
        policy = entry.policy
        options = fields(policies.policy_class(policy.name)) if policy else ()
        if policy and "draft" in [one.name for one in options] and policy.options.get("draft") is None:
            policy = replace(policy, options={**policy.options, "draft": draft()})
            entry = replace(entry, policy=policy, label=entry.called())
        roles = {"roles": {EVICTOR}, "taker": "the first token"}
        found += context.systems(target, entry, budgets=[Budget(tokens=budget)], **roles)
    return found


def measure(
    target: Target, systems: Sequence[System], settings: FirstTokenSettings, *, seed: int
) -> Iterator[Row]:
    """Rows of one length after the other, the full cache first; a system that fails ends no other."""
    engines = {system.family: Engine(target, system.parts if system.evicts else None) for system in systems}
    seeds = count(seed)
    for length in settings.lengths:
        runs = PairedRuns(
            engines,
            settings,
            {"prompt_tokens": length},
            lambda length=length: random_ids(target.info.vocab_size, 1, length, next(seeds))[0],  # type: ignore[misc]
        )
        yield from runs.rows()
        clock.release(target.device)


class PairedRuns:
    """The runs of one prompt length.

    Args:
        engines: name of a system -> what runs it; the full cache is among them.
        settings: see `FirstTokenSettings`.
        about: what all rows begin with.
        prompt: gives another prompt every time.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        settings: FirstTokenSettings,
        about: Row,
        prompt: Callable[[], list[int]],
    ) -> None:
        self.engines, self.settings, self.prompt = engines, settings, prompt
        self.device = engines[FULL].target.device
        self.found: dict[str, Row] = {name: {**about, "method": name} for name in engines}
        self.alone: list[Timing] = []
        self.pairs: dict[str, list[tuple[Timing, Timing]]] = {name: [] for name in engines if name != FULL}

    def rows(self) -> list[Row]:
        """Warm up, run pairs, and say what was found."""
        settings = self.settings
        for name in self.engines:
            with clock.may_fail(self.found[name], self.device, Exception):
                for _ in range(settings.warmup):
                    self._one(name, self.prompt())
        if "failed" in self.found[FULL]:
            return [self.found[FULL]]
        if not self.pairs:
            self.alone = [self._one(FULL, self.prompt()) for _ in range(settings.min_repeats)]
        going = clock.rounds(settings.repeats, least=settings.min_repeats, seconds=settings.seconds)
        i = 0
        while (left := [name for name in self.pairs if "failed" not in self.found[name]]) and going(i):
            for name in left:
                with clock.may_fail(self.found[name], self.device, Exception):
                    self._pair(name)
            i += 1
        full = [self.found[FULL] | clock.summary(self.alone)] if self.alone else []
        return [*full, *(self._row(name) for name in self.pairs)]

    def _row(self, name: str) -> Row:
        """What the pairs of a system say."""
        row = self.found[name] | {"budget": self.settings.budget_tokens}
        if pairs := self.pairs[name]:
            base, own = [a for a, _ in pairs], [b for _, b in pairs]
            row |= {**clock.summary(own), **clock.versus(base, own)}
            row["pairs_ms"] = [[a.wall_ms, b.wall_ms] for a, b in pairs]
        return row

    def _pair(self, name: str) -> None:
        """The full cache and a system on the same prompt, every other time the other way round."""
        prompt, order = self.prompt(), (FULL, name)
        found = {one: self._one(one, prompt) for one in order[:: 1 - 2 * (len(self.pairs[name]) % 2)]}
        self.pairs[name].append((found[FULL], found[name]))
        self.alone.append(found[FULL])

    def _one(self, name: str, prompt: list[int]) -> Timing:
        """One run; what it kept goes to the row of its system."""
        made: list[Generation] = []
        timing = clock.timed(lambda: made.append(first_token(self.engines[name], prompt)), self.device)
        stats = made[0].stats
        self.found[name] |= {
            "kept_rows": stats.kept_rows[0],
            "cache_bytes_before": stats.cache_bytes_full,
            "cache_bytes_after": stats.cache_bytes,
            "cache_mb_before": stats.cache_bytes_full / 1e6,
            "cache_mb_after": stats.cache_bytes / 1e6,
        }
        return timing


def first_token(engine: Engine, prompt: list[int]) -> Generation:
    """Prefill, evict and give the first answer token."""
    return engine.generate([prompt], max_new_tokens=1, shape=PLAIN, ignore_eos=True)


def measure_parts(
    target: Target, systems: Sequence[System], settings: FirstTokenSettings, *, seed: int
) -> Iterator[Row]:
    """One row a length and system, as they are ready; what does not fit in memory says so."""
    for length in settings.lengths:
        for place, system in enumerate(systems):
            about = {"prompt_tokens": length, "method": system.family, "budget": settings.budget_tokens}
            (prompt,) = random_ids(target.info.vocab_size, 1, length, seed + place)
            yield clock.filled(about, _parts(target, system, prompt, settings), target.device)


@torch.no_grad()
def _parts(target: Target, system: System, prompt: list[int], settings: FirstTokenSettings) -> Iterator[Row]:
    """Times of scores, choice and compaction, each alone."""
    evictor: Any = system.parts.evictor  # a scorer: it takes scores that are there already
    run = prefilled(target, prompt, evictor)
    scores = evictor.scores(run)
    keep = evictor.select(run, scores=scores)
    if keep is None:
        yield {"failed": f"a prompt of {len(prompt)} tokens fits the budget of {settings.budget_tokens}"}
        return
    work: dict[str, Callable[[], object]] = {
        "scores": lambda: evictor.scores(run),
        "selection": lambda: evictor.select(run, scores=scores),
        "compaction": lambda: compact(run.cache, keep, run.lengths, room=1),
    }
    for part, one in work.items():
        timings = clock.repeated(one, target.device, warmup=settings.warmup, repeats=settings.repeats)
        queued = None
        if target.device.type == "cuda":
            few = {"repeats": max(3, settings.repeats // 2), "writes": QUEUE_WRITES}
            queued = clock.cold(lambda _, one=one: one(), target.device, warmup=0, **few)  # type: ignore[misc]
        yield {part: {**clock.summary(timings), "queued_ms": queued}}


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

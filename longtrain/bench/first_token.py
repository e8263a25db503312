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

from longtrain import methods
from longtrain.bench import clock
from longtrain.bench.clock import Timing
from longtrain.bench.cycles import random_ids
from longtrain.bench.suites import Auto, Bench, Context, Dtype, Row, shape_keys
from longtrain.cache.evicted import compact
from longtrain.costs.hardware import GPUS, Gpu
from longtrain.costs.method import PromptShape
from longtrain.costs.model import Sizes
from longtrain.decoding.engine import PLAIN, Engine, Generation
from longtrain.decoding.evict import Budget, PromptRun
from longtrain.errors import ConfigError
from longtrain.methods import policies
from longtrain.settings import Count, CountOrZero, Lengths, Seconds, Words
from longtrain.systems import EVICTOR, FULL_CACHE, Entry, System
from longtrain.tables import of_rows
from longtrain.targets.loading import random_target
from longtrain.targets.model import Target
from longtrain.targets.shapes import SHAPES
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
ANSWER_ROOM = 64
"""Positions that a system may write tokens to behind a prompt."""
QUEUE_WRITES = 300
"""Writes of scratch memory (tens of milliseconds) behind which a part is queued, as behind a prefill."""
FULL = FULL_CACHE.family
KEY = "suite.systems"
NOTE = (
    "Token ids in, first answer token on the host and the cache compacted. `added` is paired with a run of "
    "the full cache right before or after, p10 and p90 over pairs; `overhead` is the median of the paired "
    "ratios. Theory is that of this GPU. Tokens that a policy writes are launched one by one, without CUDA "
    "graphs. Peak memory includes the weights of target and draft."
)
PARTS_NOTE = (
    "Each part alone on the cache of one prefilled prompt, by wall clock; `queued`: by CUDA events behind "
    "other work, so that the host's launches are hidden as they are behind a prefill."
)


@dataclass(frozen=True, kw_only=True)
class FirstTokenSettings:
    """The keys of `suite=first_token`.

    Args:
        shape: the random target's shape.
        draft_shape: the shape of the random draft of systems that write with one, of the same vocabulary.
        dtype: the type of the numbers of both.
        systems: entries of the grammar of `suite.systems`, compared with the full cache.
        lengths: prompt tokens.
        budget_tokens: KV entries kept of each layer and KV head.
        parts: time scores, choice and compaction alone, too.
        warmup: runs of each system and length not counted.
        repeats: most pairs of a system and length.
        min_repeats: pairs run whatever the time.
        seconds: of a length; no further round of pairs starts after it.
    """

    shape: Annotated[str, Auto("llama31_8b", "llama_micro")]
    draft_shape: Annotated[str, Auto("llama32_1b", "llama_micro")]
    dtype: Dtype
    systems: Annotated[tuple[Any, ...], Words("a list of systems, as [snapkv, {name: adakv, over: snapkv}]")]
    lengths: Annotated[Lengths, Auto(["4k", "8k", "16k", "32k"], [256, "1k"])]
    budget_tokens: Count = 128
    parts: bool = True
    warmup: CountOrZero = 2
    repeats: Count = 20
    min_repeats: Count = 3
    seconds: Seconds = 40.0

    def __post_init__(self) -> None:
        for name, key in ((self.shape, "shape"), (self.draft_shape, "draft_shape")):
            shape_keys(name, f"suite.{key}")
        if SHAPES[self.shape]["vocab_size"] != SHAPES[self.draft_shape]["vocab_size"]:
            raise ConfigError(
                f"suite.draft_shape={self.draft_shape} has another vocabulary than {self.shape}; a draft "
                "writes tokens that the target reads"
            )
        most = int(SHAPES[self.shape]["max_position_embeddings"])
        if (longest := max(self.lengths) + ANSWER_ROOM) > most:
            raise ConfigError(
                f"suite.lengths asks for {longest} positions (prompt and what follows) of shape "
                f"{self.shape}, which has {most}; choose shorter lengths"
            )


def run(settings: FirstTokenSettings, context: Context) -> Iterator[Row]:
    """First tokens of all systems, then the parts of the added time.

    Raises:
        ConfigError: a system is wrong.
    """
    entries = entries_of(settings.systems, context)
    target = context.random_target(settings.shape, dtype=settings.dtype)

    def draft() -> Target:
        return random_target(settings.draft_shape, seed=1, dtype=settings.dtype, device=context.device)

    systems = systems_of(target, entries, settings.budget_tokens, context, draft)
    for row in measure(target, systems, settings, seed=context.seed):
        yield {"section": "first token", **row, **_expected(row, entries, settings, context.gpu)}
    if settings.parts:
        cheap = {entry.called() for entry in entries if _runs_no_model(entry)}
        chosen = [system for system in systems if system.family in cheap]
        for row in measure_parts(target, chosen, settings, seed=context.seed):
            yield {"section": "parts", **row}


def theory(entry: Entry, prompt: PromptShape, gpu: Gpu) -> tuple[Mapping[str, float], str]:
    """What a system adds to the first token by arithmetic, and the key of what is measured of it."""
    if entry.method is not None:
        cost = methods.get(entry.method.name).cost
        if cost.first_token is not None:
            return cost.first_token(entry.config(), prompt, gpu), cost.as_built
    if entry.is_policy and entry.policy is not None:
        return policies.policy_class(entry.policy.name).first_token(prompt, gpu), "ms"
    return {}, "ms"


def _expected(row: Row, entries: Sequence[Entry], settings: FirstTokenSettings, gpu: Gpu | None) -> Row:
    """The time that arithmetic predicts for a row; nothing without a data sheet of the device."""
    if gpu is None or "failed" in row:
        return {}
    size, draft = (Sizes.of_keys(SHAPES[name]) for name in (settings.shape, settings.draft_shape))
    prompt = PromptShape(size, row["prompt_tokens"], settings.budget_tokens, draft)
    forward_ms = prompt.prefill.ms(gpu)
    if row["method"] == FULL:
        return {"theory_ms": forward_ms}
    predicted, key = theory(next(one for one in entries if one.called() == row["method"]), prompt, gpu)
    if key not in predicted:
        return {}
    return {"theory_ms": predicted[key], "theory_percent": 100 * predicted[key] / forward_ms}


def _runs_no_model(entry: Entry) -> bool:
    """Whether a system's scores need no forward of a whole model, by what arithmetic knows of it."""
    size = Sizes.of_keys(SHAPES["llama31_8b"])
    predicted, _ = theory(entry, PromptShape(size, 1024, draft=size), GPUS["H100"])
    return "ms" in predicted and "tflop" not in predicted


def report(rows: Sequence[Row], settings: FirstTokenSettings, context: Context) -> str:
    """A table of first tokens and one of the parts, each with a note on how to read it."""
    found = [f"# First token: {settings.shape} on {context.device_name}"]
    for section, note, columns in (("first token", NOTE, COLUMNS), ("parts", PARTS_NOTE, PART_COLUMNS)):
        if own := [row for row in rows if row["section"] == section]:
            found.append(f"{note}\n\n{of_rows(own, columns)}")
    return "\n\n".join(found)


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


BENCH = Bench(settings=FirstTokenSettings, run=run, report=report)

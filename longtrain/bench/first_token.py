"""Time to first token with KV eviction, compared with the full cache.

A run is `Engine.generate`: prefill, the policy's scores and selection, compaction of the cache, and the first
answer token on the host, with the device synchronised. Every run of a system is paired with a run of the full
cache on the same prompt in the same process, alternately before and after it; no two pairs share a prompt.
Differences are taken within pairs, so that clock drift and a device that is slower right after a run affect
both sides alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Annotated, Any

from longtrain import methods
from longtrain.bench import clock
from longtrain.bench.clock import Timing
from longtrain.bench.suites import Auto, Bench, Context, Dtype, Row, random_ids, shape_keys
from longtrain.costs.hardware import Gpu
from longtrain.costs.method import PromptShape
from longtrain.costs.model import Sizes
from longtrain.decoding.engine import PLAIN, Engine, Generation
from longtrain.decoding.evict import Budget
from longtrain.errors import ConfigError
from longtrain.methods import policies
from longtrain.settings import Count, CountOrZero, Lengths, Seconds, Words
from longtrain.systems import EVICTOR, FULL_CACHE, Entry, System
from longtrain.tables import of_rows
from longtrain.targets.loading import random_target
from longtrain.targets.model import Target
from longtrain.targets.shapes import SHAPES

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
ANSWER_ROOM = 64
"""Cache positions after the prompt, for tokens that a system generates."""
FULL = FULL_CACHE.family
KEY = "suite.systems"
NOTE = (
    "Token ids in, first answer token on the host and the cache compacted. `added` is paired with a run of "
    "the full cache right before or after, p10 and p90 over pairs; `overhead` is the median of the paired "
    "ratios. Theory is that of this GPU. Tokens that a policy writes are launched one by one, without CUDA "
    "graphs. Peak memory includes the weights of target and draft."
)


@dataclass(frozen=True, kw_only=True)
class FirstTokenSettings:
    """The keys of `suite=first_token`.

    Args:
        shape: the random target's shape.
        draft_shape: shape of the random draft model of systems that generate with one (same vocabulary).
        dtype: dtype of both models.
        systems: entries as in `suite.systems`, compared with the full cache.
        lengths: prompt lengths in tokens.
        budget_tokens: KV entries kept for each layer and KV head.
        warmup: runs of each system and length that are not counted.
        repeats: largest number of pairs of a system and length.
        min_repeats: smallest number of pairs, whatever their time.
        seconds: time limit of a length, after which no further round of pairs starts.
    """

    shape: Annotated[str, Auto("llama31_8b", "llama_micro")]
    draft_shape: Annotated[str, Auto("llama32_1b", "llama_micro")]
    dtype: Dtype
    systems: Annotated[tuple[Any, ...], Words("a list of systems, as [snapkv, {name: adakv, over: snapkv}]")]
    lengths: Annotated[Lengths, Auto(["4k", "8k", "16k", "32k"], [256, "1k"])]
    budget_tokens: Count = 128
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
    """Measure the time to first token of all systems, paired with the full cache.

    Raises:
        ConfigError: a system's entry is wrong.
    """
    entries = entries_of(settings.systems, context)
    target = context.random_target(settings.shape, dtype=settings.dtype)

    def draft() -> Target:
        return random_target(settings.draft_shape, seed=1, dtype=settings.dtype, device=context.device)

    systems = systems_of(target, entries, settings.budget_tokens, context, draft)
    for row in measure(target, systems, settings, seed=context.seed):
        yield {**row, **_expected(row, entries, settings, context.gpu)}


def theory(entry: Entry, prompt: PromptShape, gpu: Gpu) -> tuple[Mapping[str, float], str]:
    """Return the predicted times that a system adds to the first token, and the key of the one to compare."""
    if entry.method is not None:
        cost = methods.get(entry.method.name).cost
        if cost.first_token is not None:
            return cost.first_token(entry.config(), prompt, gpu), cost.as_built
    if entry.is_policy and entry.policy is not None:
        return policies.policy_class(entry.policy.name).first_token(prompt, gpu), "ms"
    return {}, "ms"


def _expected(row: Row, entries: Sequence[Entry], settings: FirstTokenSettings, gpu: Gpu | None) -> Row:
    """Return the predicted times of a row; nothing if the device has no data sheet."""
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


def report(rows: Sequence[Row], settings: FirstTokenSettings, context: Context) -> str:
    """Return the table of times to first token, with a note on how to read it."""
    return f"# First token: {settings.shape} on {context.device_name}\n\n{NOTE}\n\n{of_rows(rows, COLUMNS)}"


def entries_of(values: Sequence[Any], context: Context) -> list[Entry]:
    """Parse the systems; the method of `method=` takes its settings from the command line.

    Raises:
        ConfigError: an entry is wrong, or needs a tokenizer, which a random target does not have.
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
    """Build the full cache and the systems.

    Args:
        target: the model.
        entries: see `entries_of`.
        budget: KV entries kept for each layer and KV head.
        context: see `Context`.
        draft: loads the small model, for policies that generate with one and name none.
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
    """Yield the rows of each length, the full cache first; a failed system does not stop the others."""
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
    """Times the first token at one prompt length: each system beside the full cache, on the same prompts.

    Args:
        engines: name of a system -> its engine; the full cache is one of them.
        settings: see `FirstTokenSettings`.
        about: keys common to all rows.
        prompt: returns a new prompt at each call.
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
        """Warm up, run the pairs, and return the rows."""
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
        """Return the row of a system: spreads over its pairs of runs."""
        row = self.found[name] | {"budget": self.settings.budget_tokens}
        if pairs := self.pairs[name]:
            base, own = [a for a, _ in pairs], [b for _, b in pairs]
            row |= {**clock.summary(own), **clock.versus(base, own)}
            row["pairs_ms"] = [[a.wall_ms, b.wall_ms] for a, b in pairs]
        return row

    def _pair(self, name: str) -> None:
        """Run the full cache and a system on the same prompt, in alternating order."""
        prompt, order = self.prompt(), (FULL, name)
        found = {one: self._one(one, prompt) for one in order[:: 1 - 2 * (len(self.pairs[name]) % 2)]}
        self.pairs[name].append((found[FULL], found[name]))
        self.alone.append(found[FULL])

    def _one(self, name: str, prompt: list[int]) -> Timing:
        """Time a system's first token on a prompt; its row gets the kept entries and cache bytes."""
        made: list[Generation] = []
        timing = clock.timed(lambda: made.append(first_token(self.engines[name], prompt)), self.device)
        stats = made[0].stats
        self.found[name] |= {
            "kept_entries": stats.kept_entries[0],
            "cache_bytes_before": stats.cache_bytes_full,
            "cache_bytes_after": stats.cache_bytes,
            "cache_mb_before": stats.cache_bytes_full / 1e6,
            "cache_mb_after": stats.cache_bytes / 1e6,
        }
        return timing


def first_token(engine: Engine, prompt: list[int]) -> Generation:
    """Prefill, evict and generate the first answer token."""
    return engine.generate([prompt], max_new_tokens=1, shape=PLAIN, ignore_eos=True)


BENCH = Bench(settings=FirstTokenSettings, run=run, report=report)

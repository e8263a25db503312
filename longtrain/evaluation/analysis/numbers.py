"""Named numbers of each record, and the scores and metrics computed from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from longtrain.decoding.stats import repeated
from longtrain.evaluation.analysis.acceptance import ACCEPTANCE, ENDS, LOOPING, ends_of, tau_of
from longtrain.evaluation.analysis.statistics import (
    NOTHING,
    Bootstrap,
    Interval,
    Ratio,
    mean_of_ratios,
    paired_difference,
    paired_mean_difference,
    paired_mean_quotient,
    paired_quotient,
    pooled_ratio,
    wilson,
)
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import DIVERGENCE, Metric

Json = dict[str, Any]
Numbers = Mapping[str, float]
Share = tuple[float, float]
Pair = tuple[Numbers, Numbers]
"""The numbers of one example with two systems, or in two runs."""
DRAFTED = (
    Metric("repeated", "repeated_tokens", "output_tokens", "mean", "percent", main=True),
    Metric("τ, not repetitive", "fresh_tokens", "fresh_cycles", main=True),
    Metric(f"τ, first {ENDS} tokens", "first_tokens", "first_cycles", main=True),
    Metric(f"τ, last {ENDS} tokens", "last_tokens", "last_cycles", main=True),
)
"""Metrics of every run with a draft: how repetitive its text is, acceptance without such text, and acceptance
at the beginning and the end of long answers.
"""


def numbers_of(record: Record) -> dict[str, float]:
    """All numbers of a record from which metrics are computed, by name.

    `score`, the task's own measures, and: `one`, which is 1; of what was generated `prompt_tokens`,
    `output_tokens`, `repeated_tokens` (those in text that the answer held before), `kept_entries` (KV
    entries of the prompt in the cache, mean over turns, layers and KV heads), `cache_bytes`,
    `full_cache_bytes` and `draft_bytes` (the first answer's cache while decoding and before eviction, and
    the draft's own memory beside it); of drafts `cycle_tokens` over `cycles`, which is the acceptance
    length, and `fresh_tokens` over `fresh_cycles`, which is that of sequences that do not repeat
    themselves: loops flatter a draft; of answers of twice `ENDS` tokens or more also `first_tokens` over
    `first_cycles` and `last_tokens` over `last_cycles`, at their beginning and end.
    """
    found = {"one": 1.0, **({} if record.score is None else {"score": record.score})}
    if record.failed:
        return {}
    if record.turns:
        found |= {"prompt_tokens": record.prompt_tokens, "output_tokens": record.output_tokens}
        found["repeated_tokens"] = sum(repeated(turn.tokens) for turn in record.turns)
        found["kept_entries"] = math.fsum(turn.kept_entries for turn in record.turns) / len(record.turns)
        found["cache_bytes"] = record.turns[0].cache_bytes
        found["full_cache_bytes"] = record.turns[0].full_cache_bytes
        found["draft_bytes"] = record.turns[0].draft_bytes
    if record.cycles is not None:
        tokens, cycles = tau_of(record.rows())
        found |= {"cycle_tokens": sum(tokens), "cycles": sum(cycles)}
        if found.get("repeated_tokens", 0) <= LOOPING * max(1, record.output_tokens):
            found |= {"fresh_tokens": found["cycle_tokens"], "fresh_cycles": found["cycles"]}
        turns = zip(record.rows(), record.turns, strict=False)
        parts = [ends for row, turn in turns if (ends := ends_of(row, turn.output_tokens))]
        for name, rows in zip(("first", "last"), zip(*parts, strict=True), strict=False):
            tokens, cycles = tau_of(rows)
            found |= {f"{name}_tokens": sum(tokens), f"{name}_cycles": sum(cycles)}
    return found | dict(record.measures or {})


def repetition_notes(systems: Sequence[Json]) -> list[str]:
    """A note if drafts, or caches along the full cache's texts, were measured on text that mostly repeats
    itself.

    Args:
        systems: the entries of `results["systems"]`.
    """
    repeated, fresh = (metric.name for metric in DRAFTED[:2])
    metrics = [system["metrics"] for system in systems]
    shares = [one[repeated]["value"] for one in metrics if repeated in one]
    if not shares or max(shares) <= LOOPING:
        return []
    start = f"{100 * max(shares):.0f}% of the text repeats what its answer held before, which flatters every "
    if all(system["acceptance"] is None for system in systems):
        return [f"{start}cache; on other prompts more can change"]
    without = "" if any(fresh in one for one in metrics) else ", and no answer is without it"
    return [f"{start}draft{without}; acceptance on other prompts can be lower"]


POSITION = "position"
"""Name of the facet that gives the end position of a stretch of a sequence."""


def stretches_of(record: Record) -> list[Record]:
    """A record for each stretch of a sequence whose numbers are among the measures as
    `NAME@END`, in order.
    """
    found: dict[int, dict[str, float]] = {}
    for key, value in (record.measures or {}).items():
        name, at, end = key.partition("@")
        if at:
            found.setdefault(int(end), {})[name] = value
    return [
        replace(
            record,
            facets={POSITION: end},
            turns=(),
            cycles=None,
            score=some.pop("score", None),
            measures=some,
        )
        for end, some in sorted(found.items())
    ]


def kept_share(record: Record) -> float | None:
    """Share of the prompt's KV entries that stay in the cache, mean over turns; None if unknown.

    Of a measured task that states the bytes of the cache, the share of bytes.
    """
    if record.measures is not None and {"cache_bytes", "full_cache_bytes"} <= set(record.measures):
        return record.measures["cache_bytes"] / record.measures["full_cache_bytes"]
    if record.measures is not None and {"kept_entries", "context_tokens"} <= set(record.measures):
        return record.measures["kept_entries"] / record.measures["context_tokens"]
    return mean(turn.kept_entries / turn.prompt_tokens for turn in record.turns if turn.prompt_tokens)


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are not None, or None if there are none."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def plain(value: Any) -> Any:
    """The value as JSON would return it: tuples become lists, NumPy numbers Python's, NaN null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class ScoreScale:
    """Defines how records combine into a suite's score: a ratio of sums, then a function of that ratio.

    Args:
        share: numbers of a record -> (numerator, denominator), or None if the record has no score.
        of: the elementwise function applied to the ratio of sums.
        bounds: the smallest and the largest possible score.
    """

    share: Callable[[Numbers], Share | None]
    of: Callable[[Any], Any] = np.asarray
    bounds: tuple[float, float] = (0.0, math.inf)

    def ratio(self, some: Iterable[Numbers]) -> Ratio:
        """Numerators and denominators of records; a record without a score gets the denominator 0 and has no
        weight.
        """
        shares = [self.share(numbers) or (0.0, 0.0) for numbers in some]
        return [above for above, _ in shares], [below for _, below in shares]

    def mean(self, strata: Iterable[Iterable[Numbers]], draw: Bootstrap) -> Interval:
        """The mean of the strata's scores."""
        ratios = [self.ratio(some) for some in strata]
        return mean_of_ratios(ratios, draw, of=self.of, bounds=self.bounds)

    def difference(self, strata: Iterable[Sequence[Pair]], draw: Bootstrap) -> Interval:
        """The mean over strata of the first score minus the second, over the same examples."""
        ratios = [(self.ratio(a for a, _ in some), self.ratio(b for _, b in some)) for some in strata]
        return paired_mean_difference(ratios, draw, of=self.of, bounds=self.bounds)

    def quotient(self, strata: Iterable[Sequence[Pair]], draw: Bootstrap) -> Interval:
        """The mean over strata of the first ratio of sums over that of the second, over the same examples."""
        ratios = [(self.ratio(a for a, _ in some), self.ratio(b for _, b in some)) for some in strata]
        return paired_mean_quotient(ratios, draw)


def scale_of(scale: Mapping[str, Any]) -> ScoreScale:
    """The `ScoreScale` of a suite's scale: `maximum` times the mean, exp(Σ nats / Σ tokens), nats a token, or
    tokens a cycle.

    Args:
        scale: `name` and `maximum` of the suite's scale.
    """
    if scale["name"] == "perplexity":
        return ScoreScale(lambda one: _share(one, "nats", "tokens"), np.exp, (1.0, math.inf))
    if scale["name"] == DIVERGENCE:
        return ScoreScale(lambda one: _share(one, "divergence", "tokens"))
    if scale["name"] == ACCEPTANCE:  # plain decoding gives one token a cycle
        return ScoreScale(
            lambda one: _share(one, "cycle_tokens", "cycles") or _share(one, "one", "one", "output_tokens"),
            bounds=(1.0, math.inf),
        )
    best = 1.0 if scale["maximum"] is None else scale["maximum"]
    bounds = (0.0, math.inf if scale["maximum"] is None else best)

    def share(one: Numbers) -> Share | None:
        return (best * one["score"], 1.0) if "score" in one else None

    return ScoreScale(share, bounds=bounds)


def metrics_of(metrics: Sequence[Metric], some: Sequence[Numbers | Pair], draw: Bootstrap) -> Json:
    """Compute the interval of each metric that these records have the numbers for.

    Args:
        metrics: the metrics that the suite reports.
        some: the records' numbers, or pairs (record, full cache's record) if the full cache was run.
        draw: settings of the bootstrap.
    """
    rows = [one if isinstance(one, tuple) else (one,) for one in some]
    found = {one.name: _interval(one, rows, draw) for one in metrics}
    return {name: interval.to_json() for name, interval in found.items() if interval.n}


def change_of(metric: Metric, pairs: Sequence[Pair], draw: Bootstrap) -> Interval:
    """A metric of the first records of the pairs minus the same metric of the second ones."""
    first, second = _ratios(metric, pairs, sides=2)
    gap = paired_difference(first, second, draw)
    return gap.through(lambda nats: 100 * math.expm1(nats)) if metric.growth else gap


def _interval(metric: Metric, rows: Sequence[tuple[Numbers, ...]], draw: Bootstrap) -> Interval:
    if metric.kind in ("change", "quotient"):
        pairs = [(row[0], row[1]) for row in rows if len(row) == 2]
        if metric.kind == "change":
            return change_of(metric, pairs, draw)
        (mine, _), (whole, _) = _ratios(metric, pairs, sides=2)
        return paired_quotient(mine, whole, draw)
    ((above, below),) = _ratios(metric, rows, sides=1)
    if metric.kind == "wilson":
        return wilson(round(sum(above)), round(sum(below)))
    if metric.kind == "pooled":
        pooled = pooled_ratio((above, below), draw)
        return pooled.through(math.exp) if metric.growth else pooled
    total = math.fsum(below)
    return Interval(math.fsum(above) / total, math.nan, math.nan, len(above)) if total else NOTHING


def _ratios(metric: Metric, rows: Sequence[tuple[Numbers, ...]], *, sides: int) -> list[Ratio]:
    """Numerators and denominators of a metric for the first `sides` of each tuple, without tuples that lack
    them.
    """
    needed = {metric.above, metric.below}
    there = [row for row in rows if all(needed <= set(one) for one in row[:sides])]
    return [
        ([row[side][metric.above] for row in there], [row[side][metric.below] for row in there])
        for side in range(sides)
    ]


def _share(one: Numbers, above: str, below: str, needs: str = "one") -> Share | None:
    return (one[above], one[below]) if {above, below, needs} <= set(one) else None


def output(record: Record) -> Json:
    """A system's output for one example; keys without a value are left out.

    `cycles` is (tokens emitted by cycles, number of cycles), whose ratio is the acceptance length.
    """
    values: Json = {"texts": record.texts, "score": record.score, "output_tokens": record.output_tokens}
    if record.measures is not None:
        values["measures"] = record.measures
    if record.cycles is not None:
        numbers = numbers_of(record)
        values["cycles"] = [numbers["cycle_tokens"], numbers["cycles"]]
    return values


def numbers_of_output(values: Json) -> dict[str, float]:
    """The numbers of a stored output from which metrics are computed, named as in `numbers_of`."""
    found = {"one": 1.0, **({} if values["score"] is None else {"score": values["score"]})}
    if values["output_tokens"]:
        found["output_tokens"] = values["output_tokens"]
    if values.get("cycles") is not None:
        found["cycle_tokens"], found["cycles"] = values["cycles"]
    return found | dict(values.get("measures") or {})

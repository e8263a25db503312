"""Figures of an eviction run as plain JSON values: the same on every rerun, times apart.

Prompts are what the bootstrap resamples; every policy answers the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from longtrain.decoding.ranking import RECALLS
from longtrain.evaluation.eviction_protocol import ARTIFACT, BASELINE, Contender, Json, Protocol, label
from longtrain.evaluation.figures.statistics import (
    RESAMPLES,
    Bootstrap,
    Interval,
    paired_difference,
    paired_quotient,
    pooled_ratio,
    wilson,
)

Pieces = Mapping[tuple[str, int], Json]


@dataclass(frozen=True)
class Figures:
    """What figures are made from.

    Args:
        contenders: as they ran, the full cache first.
        protocol: as they ran.
        pieces: what came out, by name and length.
        resamples: bootstrap replicates.
    """

    contenders: Sequence[Contender]
    protocol: Protocol
    pieces: Pieces
    resamples: int = RESAMPLES

    def scores(self) -> Json:
        """Everything that is reported but times."""
        protocol = self.protocol
        return {
            "prompts": protocol.prompts,
            "tasks": list(protocol.tasks),
            "lengths": list(protocol.lengths),
            "budgets": [label(budget) for budget in protocol.budgets],
            "question": "after" if protocol.after else "prompt",
            "max_new_tokens": protocol.max_new_tokens,
            "temperature": protocol.sampling.temperature,
            "top_p": protocol.sampling.top_p,
            "top_k": protocol.sampling.top_k,
            "samples": protocol.samples,
            "seed": protocol.seed,
            "rank_prompts": protocol.rank_prompts,
            "rank_skip": protocol.rank_skip,
            "policies": [self._policy(one) for one in self.contenders],
            "differences": self._differences(),
        }

    def timings(self) -> Json:
        """Time to the first token beside the full cache's: medians over batches; the times themselves too."""
        rows = []
        for one in self.contenders:
            for length in self.protocol.lengths:
                times = self.pieces[one.name, length]["times"]
                if times["first_token_s"]:
                    overheads = [a - b for a, b in zip(times["first_token_s"], times["full_s"], strict=True)]
                    full_s = median(times["full_s"])
                    rows.append(
                        {
                            "name": one.name,
                            "length": length,
                            "first_token_s": median(times["first_token_s"]),
                            "full_s": full_s,
                            "overhead_s": median(overheads),
                            "overhead_share": median(overheads) / full_s,
                            "times": times,
                        }
                    )
        return {"batch": self.protocol.time_batch, "rows": rows}

    def _policy(self, one: Contender) -> Json:
        return {
            "name": one.name,
            "kind": one.kind,
            "made_of": one.facts,
            "lengths": [self._length(one, length) for length in self.protocol.lengths],
        }

    def _length(self, one: Contender, length: int) -> Json:
        piece = self.pieces[one.name, length]
        full = self.pieces[self.contenders[0].name, length]["budgets"][0]
        cells = [self._cell(row, full) for row in piece["budgets"]]
        return {"length": length, "budgets": cells, "ranks": _ranks(piece["ranks"])}

    def _cell(self, row: Json, full: Json) -> Json:
        answers, samples, n = row["answers"], self.protocol.samples, len(row["answers"])
        draw = Bootstrap(self.protocol.seed, self.resamples)
        quotient = paired_quotient(_right(row), _right(full), draw)
        shares = pooled_ratio(([answer["share"] for answer in answers], [samples] * n), draw)
        tasks = {
            task: [answer for answer in answers if answer["task"] == task] for task in self.protocol.tasks
        }
        return {
            "budget": row["budget"],
            "exact": self._exact(answers).to_json(),
            "of_full": quotient.to_json(),
            "share": shares.to_json(),
            "by_task": {task: self._exact(some).to_json() for task, some in tasks.items() if some},
            "kept_rows": row["kept_rows"] / n,
            "kept_share": row["kept_rows"] / row["prompt_rows"],
            "bytes_before": row["bytes_before"] / n,
            "bytes_after": row["bytes_after"] / n,
            "wrong": row["wrong"],
        }

    def _exact(self, answers: Sequence[Json]) -> Interval:
        """Share of right answers: Wilson's interval, or a bootstrap over prompts if each has several."""
        right, samples = [answer["right"] for answer in answers], self.protocol.samples
        if samples == 1:
            return wilson(sum(right), len(right))
        return pooled_ratio((right, [samples] * len(right)), Bootstrap(self.protocol.seed, self.resamples))

    def _differences(self) -> list[Json]:
        """Each artifact minus each baseline, the same prompts, at every length and budget."""
        firsts = [one for one in self.contenders if one.kind == ARTIFACT]
        others = [one for one in self.contenders if one.kind == BASELINE]
        found = []
        for a, b, length in ((a, b, n) for a in firsts for b in others for n in self.protocol.lengths):
            rows = zip(self._rows(a, length), self._rows(b, length), strict=True)
            for first, second in rows:
                gap = paired_difference(
                    (_right(first), [self.protocol.samples] * len(first["answers"])),
                    (_right(second), [self.protocol.samples] * len(second["answers"])),
                    Bootstrap(self.protocol.seed, self.resamples),
                )
                found.append(
                    {
                        "first": a.name,
                        "second": b.name,
                        "length": length,
                        "budget": first["budget"],
                        "exact": gap.to_json(),
                    }
                )
        return found

    def _rows(self, one: Contender, length: int) -> list[Json]:
        return self.pieces[one.name, length]["budgets"]


def _right(row: Json) -> list[int]:
    return [answer["right"] for answer in row["answers"]]


def _ranks(compared: Sequence[Json]) -> Json | None:
    """Means over the prompts that were compared; None where none was."""
    if not compared:
        return None
    return {
        "prompts": len(compared),
        "recall": {str(k): _mean(one["recall"][str(k)] for one in compared) for k in RECALLS},
        "tau": _mean(one["tau"] for one in compared),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    real = [value for value in values if value is not None]
    return fmean(real) if real else None

"""A benchmark as it was published, and the departures of a run from it, which decide the result's title."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longtrain.decoding.sampling import Sampling
from longtrain.evaluation.task import Example, rows_sha256

NAMED = 3
"""Maximum number of tasks that a note lists by name."""


def not_greedy(sampling: Sampling) -> list[str]:
    """A note that the run samples; empty for greedy decoding, whatever top_p and top_k are."""
    if sampling.greedy:
        return []
    parts = [f"temperature {sampling.temperature:g}"]
    parts += [f"top_p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    parts += [f"top_k {sampling.top_k}"] if sampling.top_k else []
    return [f"sampled ({', '.join(parts)}), not greedy"]


@dataclass(frozen=True)
class Published:
    """The published settings and data of a benchmark.

    Args:
        title: title of results without departures.
        tasks: task -> its number of examples, or None if not compared; empty: tasks are not compared.
        sha256: task -> the hash of its examples or a prefix of it; tasks without one are not compared.
        fingerprint: computes the hash of examples.
        lengths: prompt lengths; empty: they are not compared.
        settings: key of the group `suite` -> its official value.
        sampled: sampling settings of the run -> notes on departures from the benchmark's decoding.
    """

    title: str
    tasks: Mapping[str, int | None] = field(default_factory=dict)
    sha256: Mapping[str, str] = field(default_factory=dict)
    fingerprint: Callable[[Sequence[Example]], str] = rows_sha256
    lengths: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    sampled: Callable[[Sampling], Sequence[str]] = not_greedy

    def departures(
        self, rows: Mapping[str, Sequence[Example]], asked: Mapping[str, Any], sampling: Sampling
    ) -> list[str]:
        """List every departure that is known before anything runs; `Suite` adds prompts that were cut.

        Args:
            rows: task -> the examples of the run.
            asked: the run's settings of the suite; missing keys are not compared.
            sampling: the run's sampling settings.
        """
        found = [f"{len(rows)} of {len(self.tasks)} tasks"] if len(rows) < len(self.tasks) else []
        short = {name: self.tasks.get(name) for name in rows}
        short = {name: n for name, n in short.items() if n not in (None, len(rows[name]))}
        if short:
            have, published = sum(len(rows[name]) for name in short), sum(n or 0 for n in short.values())
            which = ", ".join(short) if len(short) <= NAMED else f"{len(short)} tasks"
            found.append(f"{have} of {published} examples of {which}")
        found += [
            f"examples of {name} that are not the published ones"
            for name, digest in self.sha256.items()
            if name in rows and name not in short and not self.fingerprint(rows[name]).startswith(digest)
        ]
        if self.lengths and (others := [n for n in asked["lengths"] if n not in self.lengths]):
            found.append(f"lengths that are not published: {', '.join(map(str, others))}")
        for key, official in self.settings.items():
            if key in asked and asked[key] != official:
                found.append(_changed(key, asked[key], official))
        return [*found, *self.sampled(sampling)]


def _changed(key: str, value: Any, official: Any) -> str:
    if key == "chat" and official:
        return "without chat template"
    shown = [one if isinstance(one, str) else json.dumps(one) for one in (value, official)]
    return f"suite.{key}={shown[0]} instead of {shown[1]}"

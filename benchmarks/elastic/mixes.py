"""Throughput of workloads (requests with given prompt and output lengths), estimated from sampled steps.

The batch is as large as the caps on device and host memory for keys and values allow. Steps are timed at some
lengths from the prompt to the last token; between them the time is interpolated linearly. Prompts are read
one after another, each in the time of one that is measured on a plain cache. No request is generated to the
end. Source: SpeContext (arXiv 2512.00722) Table 3 and Fig. 11.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from benchmarks.elastic.growth import at_length
from benchmarks.elastic.settings import ADAPTIVE, FULL, FULL_HOST, MODES, ElasticSettings
from benchmarks.elastic.steps import plain, room, sparse, timed
from longtrain.bench import clock
from longtrain.bench.suites import Row, random_ids
from longtrain.cache.elastic import Offloading
from longtrain.cache.entry_sets import ReadBudget
from longtrain.costs.hardware import GIB
from longtrain.decoding.captured import Cycles
from longtrain.decoding.prefill import prefill
from longtrain.errors import ConfigError
from longtrain.targets.model import Target

COLUMNS = {
    "prompt": "prompt",
    "output": "output",
    "system": "system",
    "requests": "batch",
    "step ms, first": "first_ms",
    "last": "last_ms",
    "prompt ms": "prefill_ms",
    "tokens/s": "tokens_per_s",
    "of full": "of_full",
    "of the row before": "of_before",
}


def measure(target: Target, budget: ReadBudget, settings: ElasticSettings) -> Iterator[Row]:
    """Yield a row for each workload and system.

    Raises:
        ConfigError: a cap is too small for one request.
    """
    for prompt, output in settings.mixes:
        read_ms = _prefill_ms(target, prompt)
        found: dict[str, float] = {}
        for system in settings.mix_systems:
            about = {"kind": "mix", "prompt": prompt, "output": output, "system": system}
            parts = _served(target, budget, settings, system, prompt, output, read_ms)
            row = clock.filled(about, parts, target.device)
            if (speed := row.get("tokens_per_s")) is not None:
                if found:
                    row["of_before"] = speed / list(found.values())[-1]
                found[system] = speed
                if FULL in found:
                    row["of_full"] = speed / found[FULL]
            yield row


def _served(
    target: Target,
    budget: ReadBudget,
    settings: ElasticSettings,
    system: str,
    prompt: int,
    output: int,
    read_ms: float,
) -> Iterator[Row]:
    """Return the throughput of a system on a workload."""
    batch = requests(target, budget, settings, system, prompt + output)
    yield {"batch": batch, "mix_gib": settings.mix_gib, "mix_host_gib": settings.mix_host_gib}
    count = settings.mix_points - 1
    lengths = [prompt + output * i // count for i in range(settings.mix_points)]
    steps = list(_steps(target, budget, settings, system, lengths, batch))
    ms = [row["step_ms"]["median"] for row in steps]
    mean_ms = sum(
        (b - a) * (x + y) / 2 for (a, b), (x, y) in zip(pairwise(lengths), pairwise(ms), strict=True)
    )
    mean_ms /= lengths[-1] - lengths[0]
    yield {
        "points": [{"tokens": length, **row} for length, row in zip(lengths, steps, strict=True)],
        "first_ms": ms[0],
        "last_ms": ms[-1],
        "mean_ms": mean_ms,
        "prefill_ms": read_ms,
        "tokens_per_s": 1e3 * batch * output / (batch * read_ms + output * mean_ms),
    }


def _steps(
    target: Target,
    budget: ReadBudget,
    settings: ElasticSettings,
    system: str,
    lengths: Sequence[int],
    batch: int,
) -> Iterator[Row]:
    """Time steps of a batch of requests at growing lengths."""
    if system == FULL:
        for length in lengths:
            yield timed(Cycles(plain(target, length, batch, settings), captured=True), settings)
            clock.release(target.device)
        return
    offloading = MODES.get(system, Offloading(memory_gib=settings.mix_gib if system == ADAPTIVE else None))
    offloading = replace(offloading, side_by_side=settings.side_by_side[0])
    decode_step, cache = sparse(
        target,
        lengths[0],
        budget,
        offloading,
        settings,
        batch=batch,
        grows=lengths[-1] - lengths[0],
        selects=system != FULL_HOST,
    )
    cycles = Cycles(decode_step, captured=True)
    for length in lengths:
        yield at_length(cycles, cache, length, settings)


def requests(target: Target, budget: ReadBudget, settings: ElasticSettings, system: str, tokens: int) -> int:
    """Return the number of requests of `tokens` tokens that fit the caps.

    Raises:
        ConfigError: not even one request fits.
    """
    info = target.info
    row = 2 * info.n_layers * info.n_kv_heads * info.head_dim * target.dtype.itemsize
    on_device, on_host = settings.mix_gib * GIB / row, settings.mix_host_gib * GIB / row
    if system == FULL:
        found = int(on_device / tokens)
    else:
        found = int(min(on_device / (budget.rows + budget.every), on_host / (tokens + room(settings))))
    if not found:
        raise ConfigError(
            f"suite.mix_gib={settings.mix_gib:g} and mix_host_gib={settings.mix_host_gib:g} hold no request "
            f"of {tokens} tokens for '{system}'; raise them"
        )
    return found


@torch.no_grad()
def _prefill_ms(target: Target, prompt: int) -> float:
    """Measure the milliseconds of reading one prompt."""
    prompts = random_ids(target.info.vocab_size, 1, prompt, seed=prompt)

    def read() -> None:
        prefill(target, target.new_cache, prompts, max_new_tokens=1, nodes=1)

    runs = clock.repeated(read, target.device, warmup=1, repeats=2)
    return min(one.device_ms or one.wall_ms for one in runs)

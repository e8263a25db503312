"""Advice of `longtrain plan` on training: memory by part, whether the run fits, and settings that
would fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import product
from typing import Any

from longtrain.costs.footprint import CONTEXT, SPARE, Spread
from longtrain.costs.hardware import GIB
from longtrain.jobs.planning.run_plan import RunPlan, Setting

CHUNK, DEVICES = 2048, (2, 4, 8)
"""The smallest chunk that is proposed, and the proposed numbers of GPUs per machine."""


def advice(plan: RunPlan) -> Setting | None:
    """The first setting, from the least change to the largest, under which every stage fits.

    Only settings whose ranks divide `trainer.sequences_per_step` are considered.
    """
    together = plan.cfg.trainer.sequences_per_step or 0
    shared = (one for one in _others(plan.given) if together % one.layout.ranks == 0)
    return next((one for one in shared if all(plan.fits(row, one) for row in plan.rows)), None)


def _others(given: Setting) -> Iterator[Setting]:
    """Alternative settings: smaller chunks, then DDP and ZeRO-2, sharded and offloaded, on more and more
    GPUs.
    """
    before = given.layout
    configs: dict[tuple[str, ...], Any] = {(): given.config}
    keys = {one.name for one in fields(given.config)}
    if "chunk_tokens" in keys and not 0 < given.config.chunk_tokens <= CHUNK:
        configs[(f"method.chunk_tokens={CHUNK}",)] = replace(given.config, chunk_tokens=CHUNK)
    devices = dict.fromkeys(n for n in (before.devices, *DEVICES) if n >= before.devices)
    stages, shards = dict.fromkeys((before.zero, 2)), dict.fromkeys((before.shard, True))
    for n, zero, shard, offload in product(devices, stages, shards, (False, True)):
        after = replace(before, devices=n, zero=zero, shard=shard, offload=offload)
        if (shard and n == 1) or (zero and after.ranks == 1) or (offload and not zero):
            continue
        for smaller, config in configs.items():
            if smaller or after != before:
                words = smaller + _words(before, after)
                yield Setting(words, after, config, _why(before, after, smaller))


def _words(before: Spread, after: Spread) -> tuple[str, ...]:
    """The command-line words that select a layout."""
    words = []
    if after.zero != before.zero or (before.ranks == 1 and after.ranks > 1):
        words.append(f"trainer=deepspeed_zero{after.zero}" if after.zero else "trainer=ddp")
    if after.devices != before.devices:
        words.append(f"trainer.devices={after.devices}")
    if after.shard and not before.shard:
        words.append("target.shard=fsdp2")
    if after.offload != before.offload:
        words.append(f"trainer.strategy.offload_optimizer={str(after.offload).lower()}")
    return tuple(words)


def _why(before: Spread, after: Spread, smaller: tuple[str, ...]) -> str:
    """The reasons why a layout needs less memory, in words."""
    reasons = [f"activations of {CHUNK} tokens at once"] if smaller else []
    if after.shard and (after.devices, after.shard) != (before.devices, before.shard):
        reasons.append(f"each of the {after.devices} GPUs of a machine holds its part of the target's layers")
    if after.zero and (after.ranks, after.zero) != (before.ranks, before.zero):
        reasons.append(f"the optimizer's state is split over {after.ranks} ranks")
    if after.offload and not before.offload:
        reasons.append("the optimizer's state is in host memory")
    return "; ".join(reasons)


def most(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The memory of the stage with the highest peak."""
    return max(rows, key=lambda row: row["peak"])["memory_bytes"]


def parts_in_words(memory: Mapping[str, Any]) -> str:
    """A rank's memory by part, in words."""
    parts = {
        "target": memory["target"],
        "layers being gathered": memory["gathered"],
        "trained weights and optimizer": memory["trained"],
        "gradients": memory["gradients"],
    }
    named = ", ".join(f"{name} {value / GIB:.3g} GiB" for name, value in parts.items() if value)
    return f"{named}, and the columns of the table; the peak is in {memory['phase']}"


def disk_in_words(left: Mapping[str, int | None]) -> str:
    """Disk space of checkpoints, data and features, in words."""
    checkpoint, together = left["checkpoint"] or 0, left["checkpoints_at_most"] or 0
    lines = [f"a checkpoint {checkpoint / GIB:.3g} GiB, {together / GIB:.3g} GiB while a third is written"]
    lines.append("data not prepared yet" if left["data"] is None else f"data {left['data'] / GIB:.3g} GiB")
    if each := left.get("features_a_token"):
        total = left["features"]
        lines.append(f"features {each} bytes a token" + ("" if total is None else f", {total / GIB:.3g} GiB"))
    return "; ".join(lines)


def verdict(plan: RunPlan, rows: list[dict[str, Any]]) -> tuple[list[str], dict[str, Any] | None]:
    """Report if all stages fit the GPU; if not, the reason and a setting under which they do.

    Returns:
        Lines for people; the proposed setting as values, or None if the given one fits or none was found.
    """
    gpu = plan.gpu
    room = f"an {gpu.name} has {gpu.memory_bytes / GIB:.4g} GiB, {CONTEXT / GIB:.2g} for CUDA and NCCL"
    tight = [row for row in rows if row["fits"] == "no"]
    if not tight:
        return [f"Every stage fits: {room}, and {SPARE:.0%} of the peak is left free."], None
    worst = max(tight, key=lambda row: row["peak"])
    hopeless = plan.held.lacks(gpu.memory_bytes, f"the run does not fit: an {gpu.name}")
    lines = [
        *([] if hopeless is None else [hopeless]),
        f"Sequences of {worst['sequence_tokens']} tokens do not fit: a rank's peak is "
        f"{worst['peak']:.4g} GiB, most of it {worst['mostly']}; {room}, and {SPARE:.0%} of the peak "
        "stays free.",
    ]
    found, other = None, advice(plan)
    if other is not None:
        peak = max(plan.memory(row, other).peak for row in plan.rows)
        lines.append(f"This fits: {' '.join(other.words)} ({peak / GIB:.4g} GiB a rank): {other.why}.")
        found = {"words": list(other.words), "peak_bytes": peak, "why": other.why}
    if least := min(row["largest_sequence_tokens"] for row in tight):
        lines.append(
            f"As it is set, sequences of up to {least} tokens fit: lower sequence_tokens in data.stages."
        )
    if found is None and not least:
        together = plan.cfg.trainer.sequences_per_step
        which = f" that can share trainer.sequences_per_step={together} evenly" if together else ""
        lines.append(
            f"Nothing fits on up to {DEVICES[-1]} GPUs of a machine{which}; choose a smaller target."
        )
    return lines, found

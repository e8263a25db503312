"""Speculation at the shape of a published model with random weights: all work is real, acceptance is given.

A cell decodes from a cache of so many tokens in captured cycles, as the engine does (`quantspec_staging`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from longtrain.bench import steps
from longtrain.bench.graphs import read_bytes_per_s
from longtrain.bench.quantspec_cells import FULL, INT8, Cell, Group, Settings, facts, name_of
from longtrain.bench.quantspec_staging import staged, steps_of
from longtrain.bench.report import gib, shorter
from longtrain.bench.timing import release
from longtrain.costs.cycle import bound_ms, bytes_read, expected_ms
from longtrain.costs.hardware import gpu_called
from longtrain.costs.model import Sizes
from longtrain.decoding.roles import Parts
from longtrain.errors import LongtrainError
from longtrain.log import get_logger

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)


def run(
    target: Target,
    groups: Sequence[Group],
    settings: Settings,
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Measure all cells.

    Args:
        target: the model.
        groups: those without a cache of their own first, so that none is held while others are measured.
        settings: see `Settings`.
        keep: told the rows so far after every cell.
    """
    rows: list[dict[str, Any]] = []
    for group in groups:
        parts = group.attach(target)
        for cell in group.cells:
            rows.append(measure(target, parts, cell, settings))
            compare(rows)
            keep(rows)
        del parts
        _free(target.device)
    return rows


def compile_all(target: Target, groups: Sequence[Group], settings: Settings, *, threads: int) -> None:
    """Run two cycles of every cell once, so that nothing is compiled while another is timed.

    A cell that cannot run is passed over: measuring it says so.

    Args:
        target: of the same shape as the one measured; a single layer will do.
        groups: see `run`.
        settings: see `Settings`.
        threads: compiling side by side.
    """
    few = replace(settings, cycles=1, warmup=2, fill="random")

    @torch.no_grad()
    def once(group: Group, cell: Cell) -> None:
        try:
            phases = staged(target, group.attach(target), cell, few)
            for _ in range(2):
                phases()
        except (torch.OutOfMemoryError, LongtrainError) as error:
            log.info("not compiled: %s: %s", name_of(cell.way), str(error).splitlines()[0])

    with ThreadPoolExecutor(max(1, threads)) as pool:
        for one in [pool.submit(once, group, cell) for group in groups for cell in group.cells]:
            one.result()
    _free(target.device)


@torch.no_grad()
def measure(target: Target, parts: Parts, cell: Cell, settings: Settings) -> dict[str, Any]:
    """Speed, memory and model of one cell; a row with `failed` where it cannot be measured.

    Args:
        target: the model.
        parts: draft and cache; in plain decoding the draft is not asked.
        cell: what to measure.
        settings: see `Settings`.
    """
    row = facts(cell)
    _free(target.device)
    try:
        row |= _measured(target, parts, cell, settings)
    except (torch.OutOfMemoryError, LongtrainError) as error:
        known = "out of memory" if isinstance(error, torch.OutOfMemoryError) else str(error)
        row["failed"] = known.splitlines()[0]
    row["weights_gib"] = gib(sum(param.nbytes for param in target.parameters()))
    _free(target.device)
    shown = ("cycle_ms", "tokens_per_cycle", "tokens_per_s", "failed")
    about = " ".join(f"{key}={shorter(row[key])}" for key in shown if key in row)
    log.info("%s prompt_tokens=%d batch=%d %s", name_of(cell.way), cell.context, cell.batch, about)
    return row


def _free(device: torch.device) -> None:
    """Give back what the last cell had, where memory is what cells are measured by."""
    if device.type == "cuda":
        release(device)


def _measured(target: Target, parts: Parts, cell: Cell, settings: Settings) -> dict[str, Any]:
    phases = staged(target, parts, cell, settings)
    if target.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(target.device)  # what was needed to fill the cache does not count
    how, draft = steps_of(cell.way, settings), phases.draft
    found: dict[str, Any] = steps.whole(phases, how)
    found |= {
        "cache_gib": gib(phases.cache.bytes()),
        "cache_bytes_per_token": phases.cache.bytes() / (cell.batch * cell.context),
        "draft_gib": gib(draft.bytes()) if draft else 0.0,
    }
    if cell.split:
        found["steps"] = steps.split(phases, how)
    if target.device.type == "cuda":  # before `_model`, which reads a large tensor to know the bandwidth
        found["peak_gib"] = gib(torch.cuda.max_memory_allocated(target.device))
    return found | _model(target, cell, found["cycle_ms"])


def _model(target: Target, cell: Cell, cycle_ms: float) -> dict[str, Any]:
    """What the cycle should take and its bound on this GPU; nothing elsewhere, or for drafts without one."""
    gpu = gpu_called(torch.cuda.get_device_name(target.device)) if target.device.type == "cuda" else None
    if gpu is None or not cell.way.forwards:
        return {}
    size, forwards = Sizes.of(target.info), list(cell.way.forwards)
    sizes = {"batch": cell.batch, "context": cell.context}
    read = read_bytes_per_s(target.device)
    expected = expected_ms(forwards, size, **sizes, bytes_per_s=read)
    bound = bound_ms(forwards, size, gpu, **sizes)
    return {
        "gpu": gpu.name,
        "read_tb_per_s": read * 1e-12,
        "read_share": 1e3 * bytes_read(forwards, size, **sizes) / read / cycle_ms,
        "expected_ms": expected,
        "expected_over_taken": expected / cycle_ms,
        "roofline_ms": bound,
        "roofline_share": bound / cycle_ms,
    }


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Speed and cache of each row over those of plain decoding of the same context and batch; in place.

    A row that decodes from the INT8 cache is compared with plain decoding from either.
    """

    def base(row: dict[str, Any], cache: str) -> dict[str, Any] | None:
        same = ("prompt_tokens", "batch")
        return next(
            (
                one
                for one in rows
                if (one["system"], one["cache"]) == ("plain", cache)
                and all(one[key] == row[key] for key in same)
                and "tokens_per_s" in one
            ),
            None,
        )

    for row in rows:
        if "tokens_per_s" not in row:
            continue
        if (plain := base(row, FULL)) is not None:
            row["speed"] = row["tokens_per_s"] / plain["tokens_per_s"]
            row["cache_share"] = row["cache_gib"] / plain["cache_gib"]
            if "expected_ms" in row and "expected_ms" in plain:
                faster = plain["expected_ms"] / row["expected_ms"]
                row["expected_speed"] = faster * row["tokens_per_cycle"] / plain["tokens_per_cycle"]
        if row["cache"] == INT8 and (plain := base(row, INT8)) is not None:
            row["int8_speed"] = row["tokens_per_s"] / plain["tokens_per_s"]

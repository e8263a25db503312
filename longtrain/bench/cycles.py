"""Speculation at the shape of a published model with random weights: all work is real, acceptance is given.

A cell decodes in captured cycles, as the engine does, from a cache of so many tokens. Plain decoding comes
first; every other row is compared with that of its context and batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from longtrain.artifact import Artifact
from longtrain.bench import clock, cycles_report, steps
from longtrain.bench.cycle_cells import (
    DRAFTED,
    FULL,
    PLAIN_NAME,
    CellGroup,
    CycleCell,
    CyclesSettings,
    groups_of,
)
from longtrain.bench.cycle_start import CycleCounts, ready
from longtrain.bench.suites import Bench, Context, Row, shape_keys
from longtrain.costs.cycle import bound_ms, bytes_read, expected_ms
from longtrain.costs.hardware import GIB, Gpu
from longtrain.costs.model import Sizes
from longtrain.decoding.phases import Phases
from longtrain.decoding.roles import Parts
from longtrain.errors import ConfigError, LongtrainError
from longtrain.log import get_logger

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)


def run(settings: CyclesSettings, context: Context) -> Iterator[Row]:
    """One row a cell, as they are ready.

    Raises:
        ConfigError: an entry of `suite.systems` is wrong, or there is less memory than may be used.
        DataError: `suite.recorded` is not a run's scores.
    """
    keys, load = shape_keys(settings.shape), partial(Artifact.load, home=context.home)
    groups = groups_of(settings, Sizes.of_keys(keys), context.seed, load)
    limit_memory(settings.memory_gib, context.device)
    read = settings.fill == "prompt"
    counts = CycleCounts(settings.cycles, settings.warmup, context.seed, context.sampling, read)
    if context.cuda:
        log.info("read_tb_per_s=%.2f", clock.read_bytes_per_s(context.device) * 1e-12)
        if settings.compile_threads:
            log.info("compiling the kernels of %d cells", sum(len(group.cells) for group in groups))
            thin = context.random_target({**keys, "num_hidden_layers": 1})
            compile_all(thin, groups, counts, settings.compile_threads)
            del thin
    return rows_of(context.random_target(settings.shape), groups, counts, context.gpu)


def rows_of(
    target: Target, groups: Sequence[CellGroup], counts: CycleCounts, gpu: Gpu | None = None
) -> Iterator[Row]:
    """One row a cell, compared with plain decoding.

    Args:
        target: the model.
        groups: what to measure.
        counts: see `CycleCounts`.
        gpu: the data sheet of its device; None: there is none.
    """
    rows: list[Row] = []
    for group in groups:
        parts = group.attach(target)
        for cell in group.cells:
            rows.append(measure_cell(target, parts, cell, counts, gpu))
            compare(rows)
            yield rows[-1]
        del parts
        _free(target.device)


def limit_memory(most_gib: float | None, device: torch.device) -> None:
    """Let this process have no more GPU memory; what needs more is then out of memory.

    Raises:
        ConfigError: there is no GPU, or it has less.
    """
    if most_gib is None:
        return
    if device.type != "cuda":
        raise ConfigError(f"suite.memory_gib={most_gib:g} on a {device.type}; it caps GPU memory, pass null")
    there = torch.cuda.get_device_properties(device).total_memory
    if most_gib * GIB > there:
        raise ConfigError(f"suite.memory_gib={most_gib:g}, and the GPU has {there / GIB:.0f} GiB; pass less")
    torch.cuda.set_per_process_memory_fraction(most_gib * GIB / there, device)


def compile_all(target: Target, groups: Sequence[CellGroup], counts: CycleCounts, threads: int) -> None:
    """Run two cycles of every cell once, so that nothing is compiled while another is timed.

    A cell that cannot run is passed over: measuring it says so.

    Args:
        target: of the same shape as the one measured; a single layer will do.
        groups: the cells.
        counts: see `CycleCounts`.
        threads: compiling side by side.
    """
    few = replace(counts, cycles=1, warmup=2, read=False)

    @torch.no_grad()
    def once(group: CellGroup, cell: CycleCell) -> None:
        try:
            phases = _ready(target, group.attach(target), cell, few)
            for _ in range(2):
                phases()
        except (torch.OutOfMemoryError, LongtrainError) as error:
            log.info("not compiled: %s: %s", cell.name, str(error).splitlines()[0])

    with ThreadPoolExecutor(max(1, threads)) as pool:
        for one in [pool.submit(once, group, cell) for group in groups for cell in group.cells]:
            one.result()
    _free(target.device)


@torch.no_grad()
def measure_cell(
    target: Target, parts: Parts, cell: CycleCell, counts: CycleCounts, gpu: Gpu | None = None
) -> Row:
    """Speed, memory and model of one cell; a row with `failed` where it cannot be measured."""
    row = cell.facts()
    _free(target.device)
    try:
        row |= _measured(target, parts, cell, counts)
        row |= _model(target, cell, row["cycle_ms"], gpu)
    except (torch.OutOfMemoryError, LongtrainError) as error:
        known = "out of memory" if isinstance(error, torch.OutOfMemoryError) else str(error)
        row["failed"] = known.splitlines()[0]
    row["weights_gib"] = clock.gib(sum(param.nbytes for param in target.parameters()))
    _free(target.device)
    return row


def _ready(target: Target, parts: Parts, cell: CycleCell, counts: CycleCounts) -> Phases:
    """The cycles of a cell, behind a prompt of random ids."""
    coins = torch.Generator().manual_seed(counts.seed + cell.context)
    prompts = torch.randint(target.info.vocab_size, (cell.batch, cell.context), generator=coins).tolist()
    return ready(target, parts, prompts, cell.shape, counts, cell.law)


def _free(device: torch.device) -> None:
    """Give back what the last cell had, where memory is what cells are measured by."""
    if device.type == "cuda":
        clock.release(device)


def _measured(target: Target, parts: Parts, cell: CycleCell, counts: CycleCounts) -> Row:
    phases = _ready(target, parts, cell, counts)
    if target.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(target.device)  # what was needed to fill the cache does not count
    found = steps.whole(phases, counts)
    found |= {
        "cache_gib": clock.gib(phases.cache.bytes()),
        "cache_bytes_per_token": phases.cache.bytes() / (cell.batch * cell.context),
        "draft_gib": clock.gib(phases.draft.bytes()) if phases.draft else 0.0,
    }
    if cell.split:
        found["steps"] = steps.split(phases, counts)
    if target.device.type == "cuda":  # before `_model`, which reads a large tensor to know the bandwidth
        found["peak_gib"] = clock.gib(torch.cuda.max_memory_allocated(target.device))
    return found


def _model(target: Target, cell: CycleCell, cycle_ms: float, gpu: Gpu | None) -> Row:
    """What the cycle should take and its bound on this GPU; nothing elsewhere, or for drafts without one."""
    if gpu is None or not cell.forwards:
        return {}
    size, forwards = Sizes.of(target.info), list(cell.forwards)
    sizes = {"batch": cell.batch, "context": cell.context}
    read = clock.read_bytes_per_s(target.device)
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


def compare(rows: Sequence[Row]) -> None:
    """Speed and cache of each row over those of plain decoding of the same context and batch; in place.

    A row that decodes from an INT8 cache is compared with plain decoding from either.
    """

    def plain(row: Row, cache: str) -> Row | None:
        wanted = (PLAIN_NAME, cache, row["prompt_tokens"], row["batch"])
        keys = ("system", "cache", "prompt_tokens", "batch")
        return next((one for one in done if tuple(one[key] for key in keys) == wanted), None)

    done = [row for row in rows if "tokens_per_s" in row]
    for row in done:
        if (base := plain(row, FULL)) is not None:
            row["speed"] = row["tokens_per_s"] / base["tokens_per_s"]
            row["cache_share"] = row["cache_gib"] / base["cache_gib"]
            if "expected_ms" in row and "expected_ms" in base:
                faster = base["expected_ms"] / row["expected_ms"]
                row["expected_speed"] = faster * row["tokens_per_cycle"] / base["tokens_per_cycle"]
        if row["cache"] != FULL and (base := plain(row, row["cache"])) is not None:
            row[f"{row['cache'].lower()}_speed"] = row["tokens_per_s"] / base["tokens_per_s"]


BENCH = Bench(
    settings=CyclesSettings,
    run=run,
    auto={
        "drafted": (DRAFTED, [2]),
        "batch_drafted": (None, None),
        "fill": ("random", "random"),
        "cycles": (64, 8),
    },
    ignore=("eval", "text", "prompts", "max_new_tokens"),
    report=lambda rows, settings, context: cycles_report.markdown(rows),
    pictures=cycles_report.pictures,
)

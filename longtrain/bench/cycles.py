"""Speculation at the shape of a published model with random weights: all work is real, acceptance is given.

A cell decodes in captured cycles, as the engine does, from a cache of so many tokens. Plain decoding comes
first; every other row is compared with that of its context and batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from longtrain import plots
from longtrain.artifact import Artifact
from longtrain.bench import clock, steps
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
from longtrain.tables import of_rows, tokens

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)

COLUMNS = {
    "what": "name",
    "prompt tokens": "prompt_tokens",
    "batch": "batch",
    "tokens a cycle": "tokens_per_cycle",
    "cycle ms": "cycle_ms",
    "model ms": "expected_ms",
    "least ms": "roofline_ms",
    "of roofline": "roofline_share",
    "of read bandwidth": "read_share",
    "idle ms": "idle_ms.median",
    "tok/s": "tokens_per_s",
    "speed": "speed",
    "model's": "expected_speed",
    "over INT8 plain": "int8_speed",
    "cache GiB": "cache_gib",
    "of full": "cache_share",
    "draft GiB": "draft_gib",
    "peak GiB": "peak_gib",
    "failed": "failed",
}
STEP_COLUMNS = {
    "what": "name",
    "prompt tokens": "prompt_tokens",
    "batch": "batch",
    "cycle ms": "cycle_ms",
    "draft ms": "steps.propose_ms.median",
    "target attention ms": "steps.attention_ms.median",
    "target linear ms": "steps.linear_ms",
    "verification ms": "steps.accept_ms.median",
    "commit ms": "steps.commit_ms.median",
    "idle ms": "idle_ms.median",
}
PHASES = {
    "draft": "propose_ms",
    "target attention": "attention_ms",
    "target linear": "linear_ms",
    "verification": "accept_ms",
    "commit": "commit_ms",
}


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


def report(rows: Sequence[Row], settings: CyclesSettings, context: Context) -> str:
    """A table of all rows, and one of the cycles that were taken apart."""
    apart = [row for row in rows if "steps" in row]
    shown = [of_rows(rows, COLUMNS), *([of_rows(apart, STEP_COLUMNS)] if apart else [])]
    return "\n\n".join(shown) + "\n"


def pictures(rows: Sequence[Row]) -> dict[str, bytes]:
    """Speed by drafted tokens, one step taken apart, and tokens a second by batch, as far as measured."""
    rows = [row for row in rows if "failed" not in row]
    chains = [row for row in rows if row["shape"] and "acceptance" in row["accepted"] and row["batch"] == 1]
    apart = [row for row in rows if "steps" in row]
    batched = [row for row in rows if row["batch"] > 1]
    made = {}
    if chains:
        made["quantspec_speed.png"] = _speed(chains)
    if apart:
        made["quantspec_steps.png"] = _steps(apart)
    if batched:
        shortest, names = min(row["prompt_tokens"] for row in batched), {row["name"] for row in batched}
        same = [row for row in rows if row["prompt_tokens"] == shortest and row["name"] in names]
        made["quantspec_batches.png"] = _batches(same, tokens(shortest))
    return made


def _lines(
    axes: Any, rows: Sequence[Row], x: str, y: str, name: Callable[[Row], str], style: str = "-"
) -> None:
    """One line a name, its points in order."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.get(y) is not None:
            found.setdefault(name(row), []).append((row[x], row[y]))
    for label, points in found.items():
        axes.plot(*zip(*sorted(points), strict=True), linestyle=style, marker="o", markersize=3, label=label)
    axes.set_xticks(sorted({row[x] for row in rows}))


def _speed(rows: Sequence[Row]) -> bytes:
    figure, (left, right) = plots.panels(2, size=(5.5, 3.8))
    _lines(left, rows, "drafted", "speed", _with_length)
    left.set_prop_cycle(None)
    _lines(
        left, rows, "drafted", "expected_speed", lambda row: f"model, {tokens(row['prompt_tokens'])}", "--"
    )
    _lines(right, rows, "drafted", "int8_speed", _with_length)
    for axes, cache in ((left, "full cache"), (right, "the same INT8 cache")):
        axes.axhline(1, color="black", linewidth=0.8)
        title = f"over plain decoding, {cache}"
        plots.label(axes, "drafted tokens a cycle", "speed", title=title, legend=False)
    return plots.png(figure, legend=True)


def _steps(rows: Sequence[Row]) -> bytes:
    figure, (axes,) = plots.panels(1, size=(11, 3.8))
    places, below = range(len(rows)), [0.0] * len(rows)
    for label, key in PHASES.items():
        values = [_median(row["steps"][key]) for row in rows]
        axes.bar(places, values, 0.6, bottom=below, label=label)
        below = [a + b for a, b in zip(below, values, strict=True)]
    names = [f"{row['name']}\n{tokens(row['prompt_tokens'])}" for row in rows]
    axes.set_xticks(list(places), names, fontsize=7)
    plots.label(axes, y="ms a cycle", legend=False)
    return plots.png(figure, legend=True)


def _batches(rows: Sequence[Row], context: str) -> bytes:
    figure, panels = plots.panels(2, size=(5.5, 3.8))
    keys = {"tokens_per_s": "tokens/s", "tokens_per_cycle": "committed tokens a cycle"}
    for axes, (key, title) in zip(panels, keys.items(), strict=True):
        _lines(axes, rows, "batch", key, lambda row: str(row["name"]))
        plots.label(axes, f"batch, {context} tokens each", title, legend=False)
        axes.set_ylim(bottom=0)
    return plots.png(figure, legend=True)


def _with_length(row: Row) -> str:
    return f"{row['system']}, {tokens(row['prompt_tokens'])}"


def _median(value: Any) -> float:
    return float(value["median"] if isinstance(value, Mapping) else value)


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
    report=report,
    pictures=pictures,
)

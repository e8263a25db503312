"""Speculative decoding at a published model's shape with random weights and simulated acceptance.

A cell decodes in captured cycles, like the engine, from a cache of a given length. Plain decoding comes
first; every other row is compared with plain decoding of the same context and batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from benchmarks import drawing, replay
from benchmarks.acceptance_model import GivenAcceptance
from benchmarks.cycles import CycleCounts, phase_columns, ready, split, whole
from benchmarks.speculation_cells import FULL, PLAIN_NAME, CycleCell, CyclesSettings, cells_of
from longtrain import plots
from longtrain.bench import clock
from longtrain.bench.suites import Bench, Context, Row, random_ids, shape_keys
from longtrain.costs import roofline
from longtrain.costs.cycle import expected_ms
from longtrain.costs.hardware import GIB
from longtrain.costs.model import Sizes
from longtrain.decoding.decode_step import DecodeStep
from longtrain.decoding.roles import Parts
from longtrain.errors import ConfigError, LongtrainError
from longtrain.log import get_logger
from longtrain.tables import of_rows, tokens, value_at

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
PARTS_OF_A_CYCLE = ("draft", "target attention", "target linear", "verification", "commit")
STEP_COLUMNS = {
    "what": "name",
    "prompt tokens": "prompt_tokens",
    "batch": "batch",
    "cycle ms": "cycle_ms",
    **phase_columns(*(f"{part} ms" for part in PARTS_OF_A_CYCLE), within="steps."),
    "idle ms": "idle_ms.median",
}


def run(settings: CyclesSettings, context: Context) -> Iterator[Row]:
    """Yield a row for each cell.

    Raises:
        ConfigError: an entry of `suite.systems` is wrong, or the GPU has less than `memory_gib`.
        DataError: `suite.recorded` is not a file of a run's results.
    """
    cells = cells_of(settings, context)
    limit_memory(settings.memory_gib, context.device)
    read = settings.fill == "prompt"
    counts = CycleCounts(settings.cycles, settings.warmup, context.seed, context.sampling, read)
    if context.cuda:
        log.info("read_tb_per_s=%.2f", replay.read_bytes_per_s(context.device) * 1e-12)
        if settings.compile_threads:
            log.info("compiling the kernels of %d cells", len(cells))
            thin = context.random_target({**shape_keys(settings.shape), "num_hidden_layers": 1})
            CellRunner(thin, replace(counts, cycles=1, warmup=2, read=False), context).compile(
                cells, settings.compile_threads
            )
            del thin
    return CellRunner(context.random_target(settings.shape), counts, context).rows(cells)


def limit_memory(most_gib: float | None, device: torch.device) -> None:
    """Limit the GPU memory of this process; allocations beyond it fail as out of memory.

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


@dataclass(frozen=True)
class CellRunner:
    """Runs the cycles of cells.

    Args:
        target: the model.
        counts: numbers of cycles, and how their inputs are made.
        context: see `Context`.
    """

    target: Target
    counts: CycleCounts
    context: Context

    def rows(self, cells: Sequence[CycleCell]) -> Iterator[Row]:
        """Yield a row for each cell, compared with plain decoding."""
        rows: list[Row] = []
        for _, group in groupby(cells, key=lambda cell: cell.parts_key):
            parts: Parts | None = None
            for cell in group:
                parts = parts or self.parts(cell)
                rows.append(self.measure(cell, parts))
                compare(rows)
                yield rows[-1]
            del parts
            clock.release(self.target.device)

    def compile(self, cells: Sequence[CycleCell], threads: int) -> None:
        """Run two cycles of every cell, so that all kernels are compiled before anything is timed.

        A model of a single layer suffices. Cells that cannot run are skipped; measuring them reports the
        error.
        """

        @torch.no_grad()
        def once(cell: CycleCell) -> None:
            try:
                decode_step = self.ready(cell, self.parts(cell))
                for _ in range(2):
                    decode_step()
            except (torch.OutOfMemoryError, LongtrainError) as error:
                log.info("not compiled: %s: %s", cell.name, str(error).splitlines()[0])

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(once, cells))
        clock.release(self.target.device)

    def parts(self, cell: CycleCell) -> Parts:
        """Return the parts of a cell's entry; an unused draft is dropped and its weights are freed."""
        if cell.entry is None:
            return Parts()
        parts = self.context.systems(self.target, cell.entry)[0].parts
        return parts if cell.drafts else replace(parts, draft=None)

    def ready(self, cell: CycleCell, parts: Parts) -> DecodeStep:
        """Return the decode step of a cell, positioned after a prompt of random ids.

        Every sequence has its own order of accepted lengths, and the counted cycles begin with the first.
        """
        counts, judge = self.counts, None
        if cell.children is not None:
            seeds = [counts.seed + 1000003 * row for row in range(cell.batch)]
            accepted = [*zip(*(cell.children.lengths(counts.cycles, seed) for seed in seeds), strict=True)]
            first = -counts.warmup % len(accepted)
            judge = GivenAcceptance(accepted[first:] + accepted[:first], cell.shape, self.target.device)
        vocab_size, seed = self.target.info.vocab_size, counts.seed + cell.context
        prompts = random_ids(vocab_size, cell.batch, cell.context, seed)
        return ready(self.target, parts, prompts, cell.shape, counts, judge)

    @torch.no_grad()
    def measure(self, cell: CycleCell, parts: Parts) -> Row:
        """Measure one cell's speed, memory and predicted time; the row has `failed` if this is impossible."""
        row = clock.filled(cell.facts(), self._metrics(cell, parts), self.target.device, LongtrainError)
        row["weights_gib"] = clock.gib(sum(param.nbytes for param in self.target.parameters()))
        return row

    def _metrics(self, cell: CycleCell, parts: Parts) -> Iterator[Row]:
        """Yield the times of a cell's cycles, as a whole and by phase, and the predicted times."""
        decode_step, cuda, device = self.ready(cell, parts), self.context.cuda, self.target.device
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)  # excludes the memory for filling the cache
        found = whole(decode_step, self.counts)
        cache_bytes = decode_step.cache.bytes()
        found |= {
            "cache_gib": clock.gib(cache_bytes),
            "cache_bytes_per_token": cache_bytes / (cell.batch * cell.context),
            "draft_gib": clock.gib(decode_step.draft.bytes()) if decode_step.draft else 0.0,
        }
        if cell.split:
            found["steps"] = split(decode_step, self.counts)
        if cuda:  # before `_model`, which allocates a large tensor to measure bandwidth
            found["peak_gib"] = clock.gib(torch.cuda.max_memory_allocated(device))
        yield {**found, **self._model(cell, found["cycle_ms"])}

    def _model(self, cell: CycleCell, cycle_ms: float) -> Row:
        """Return the cycle's predicted time and lower bound on this GPU; nothing if they are unknown."""
        gpu, size, forwards = self.context.gpu, Sizes.of(self.target.info), list(cell.forwards)
        if gpu is None or not forwards:
            return {}
        sizes = {"batch": cell.batch, "context": cell.context}
        read = replay.read_bytes_per_s(self.target.device)
        expected = expected_ms(forwards, size, **sizes, bytes_per_s=read)
        decode_step = [(forward.times, forward.phase(size, **sizes)) for forward in forwards]
        bound = sum(times * roofline.metrics(phase, gpu)["ms"] for times, phase in decode_step)
        bytes_read = sum(times * phase.whole.bytes for times, phase in decode_step)
        return {
            "gpu": gpu.name,
            "read_tb_per_s": read * 1e-12,
            "read_share": 1e3 * bytes_read / read / cycle_ms,
            "expected_ms": expected,
            "expected_over_taken": expected / cycle_ms,
            "roofline_ms": bound,
            "roofline_share": bound / cycle_ms,
        }


def compare(rows: Sequence[Row]) -> None:
    """Add each row's speed and cache size relative to plain decoding of the same context and batch, in place.

    A row with an INT8 cache is compared with plain decoding from the full and from the INT8 cache.
    """
    keys = ("cache", "prompt_tokens", "batch")
    done = [row for row in rows if "tokens_per_s" in row]
    plain = {tuple(row[key] for key in keys): row for row in done if row["system"] == PLAIN_NAME}
    for row in done:
        own, place = row["cache"], (row["prompt_tokens"], row["batch"])
        if base := plain.get((FULL, *place)):
            row["speed"] = row["tokens_per_s"] / base["tokens_per_s"]
            row["cache_share"] = row["cache_gib"] / base["cache_gib"]
            if "expected_ms" in row and "expected_ms" in base:
                faster = base["expected_ms"] / row["expected_ms"]
                row["expected_speed"] = faster * row["tokens_per_cycle"] / base["tokens_per_cycle"]
        if own != FULL and (base := plain.get((own, *place))):
            row[f"{own.lower()}_speed"] = row["tokens_per_s"] / base["tokens_per_s"]


def report(rows: Sequence[Row], settings: CyclesSettings, context: Context) -> str:
    """Return a table of all rows, and one of the cycles by phase."""
    apart = [row for row in rows if "steps" in row]
    shown = [of_rows(rows, COLUMNS), *([of_rows(apart, STEP_COLUMNS)] if apart else [])]
    return "\n\n".join(shown) + "\n"


def pictures(rows: Sequence[Row]) -> dict[str, bytes]:
    """Plot speed by drafted tokens, one step by phase, and tokens per second by batch, as far as measured."""
    rows = [row for row in rows if "failed" not in row]
    chains = [row for row in rows if row["shape"] and "acceptance" in row["accepted"] and row["batch"] == 1]
    apart = [row for row in rows if "steps" in row]
    batched = {row["name"]: row["prompt_tokens"] for row in rows if row["batch"] > 1}
    found = {}
    if chains:
        found["quantspec_speed.png"] = _speed(chains)
    if apart:
        found["quantspec_steps.png"] = _steps(apart)
    if batched:
        first = min(batched.values())
        same = [row for row in rows if row["prompt_tokens"] == first and row["name"] in batched]
        found["quantspec_batches.png"] = _batches(same, tokens(first))
    return found


def _speed(rows: Sequence[Row]) -> bytes:
    """Plot speedups over plain decoding from the full cache (measured, predicted) and from the same cache."""
    figure, (left, right) = plots.panels(2, size=(5.5, 3.8))
    named = [
        {
            **row,
            "length": tokens(row["prompt_tokens"]),
            "line": f"{row['system']}, {tokens(row['prompt_tokens'])}",
        }
        for row in rows
    ]
    drawing.lines(left, named, "drafted", "speed", "{line}")
    left.set_prop_cycle(None)
    drawing.lines(left, named, "drafted", "expected_speed", "model, {length}", linestyle="--")
    drawing.lines(right, named, "drafted", "int8_speed", "{line}")
    for axes, cache in ((left, "full cache"), (right, "the same INT8 cache")):
        axes.axhline(1, color="black", linewidth=0.8)
        title = f"over plain decoding, {cache}"
        plots.label(axes, "drafted tokens a cycle", "speed", title=title, legend=False)
    return plots.png(figure, legend=True)


def _steps(rows: Sequence[Row]) -> bytes:
    """Plot the milliseconds of each part of a cycle as stacked bars."""
    figure, (axes,) = plots.panels(1, size=(11, 3.8))
    keys = phase_columns(*PARTS_OF_A_CYCLE, within="steps.")
    layers = {part: [value_at(row, key) for row in rows] for part, key in keys.items()}
    drawing.stacks(axes, [f"{row['name']}\n{tokens(row['prompt_tokens'])}" for row in rows], layers)
    plots.label(axes, y="ms a cycle", legend=False)
    return plots.png(figure, legend=True)


def _batches(rows: Sequence[Row], context: str) -> bytes:
    """Plot tokens per second and tokens per cycle by batch."""
    figure, panels = plots.panels(2, size=(5.5, 3.8))
    keys = {"tokens_per_s": "tokens/s", "tokens_per_cycle": "committed tokens a cycle"}
    for axes, (key, title) in zip(panels, keys.items(), strict=True):
        drawing.lines(axes, rows, "batch", key, "{name}")
        plots.label(axes, f"batch, {context} tokens each", title, legend=False)
        axes.set_ylim(bottom=0)
    return plots.png(figure, legend=True)


BENCH = Bench(
    settings=CyclesSettings,
    run=run,
    report=report,
    pictures=pictures,
)

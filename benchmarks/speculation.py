"""Speculation at the shape of a published model with random weights: all work is real, acceptance is given.

A cell decodes in captured cycles, as the engine does, from a cache of so many tokens. Plain decoding comes
first; every other row is compared with that of its context and batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from benchmarks.acceptance_law import GivenAcceptance
from benchmarks.speculation_cells import FULL, PLAIN_NAME, CycleCell, CyclesSettings, cells_of
from longtrain import plots
from longtrain.bench import clock
from longtrain.bench.cycles import CycleCounts, phase_columns, random_ids, ready, split, whole
from longtrain.bench.suites import Bench, Context, Row, shape_keys
from longtrain.costs.cycle import bound_ms, bytes_read, expected_ms
from longtrain.costs.hardware import GIB
from longtrain.costs.model import Sizes
from longtrain.decoding.phases import Phases
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
    """One row a cell, as they are ready.

    Raises:
        ConfigError: an entry of `suite.systems` is wrong, or there is less memory than may be used.
        DataError: `suite.recorded` is not a run's scores.
    """
    cells = cells_of(settings, context)
    limit_memory(settings.memory_gib, context.device)
    read = settings.fill == "prompt"
    counts = CycleCounts(settings.cycles, settings.warmup, context.seed, context.sampling, read)
    if context.cuda:
        log.info("read_tb_per_s=%.2f", clock.read_bytes_per_s(context.device) * 1e-12)
        if settings.compile_threads:
            log.info("compiling the kernels of %d cells", len(cells))
            thin = context.random_target({**shape_keys(settings.shape), "num_hidden_layers": 1})
            CellRunner(thin, replace(counts, cycles=1, warmup=2, read=False), context).compile(
                cells, settings.compile_threads
            )
            del thin
    return CellRunner(context.random_target(settings.shape), counts, context).rows(cells)


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


@dataclass(frozen=True)
class CellRunner:
    """Runs the cycles of cells.

    Args:
        target: the model.
        counts: how many cycles, and behind what.
        context: see `Context`.
    """

    target: Target
    counts: CycleCounts
    context: Context

    def rows(self, cells: Sequence[CycleCell]) -> Iterator[Row]:
        """One row a cell, compared with plain decoding."""
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
        """Run two cycles of every cell once, so that nothing is compiled while another is timed.

        A single layer will do for it. A cell that cannot run is passed over: measuring it says so.
        """

        @torch.no_grad()
        def once(cell: CycleCell) -> None:
            try:
                phases = self.ready(cell, self.parts(cell))
                for _ in range(2):
                    phases()
            except (torch.OutOfMemoryError, LongtrainError) as error:
                log.info("not compiled: %s: %s", cell.name, str(error).splitlines()[0])

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(once, cells))
        clock.release(self.target.device)

    def parts(self, cell: CycleCell) -> Parts:
        """What a cell's entry brings; a draft that is not asked is left out, its weights are given back."""
        if cell.entry is None:
            return Parts()
        parts = self.context.systems(self.target, cell.entry)[0].parts
        return parts if cell.drafts else replace(parts, draft=None)

    def ready(self, cell: CycleCell, parts: Parts) -> Phases:
        """The cycles of a cell, behind a prompt of random ids.

        Every sequence has its own order of accepted numbers, and the counted cycles begin with the first.
        """
        counts, judge = self.counts, None
        if cell.law is not None:
            seeds = [counts.seed + 1000003 * row for row in range(cell.batch)]
            accepted = [*zip(*(cell.law.lengths(counts.cycles, seed) for seed in seeds), strict=True)]
            first = -counts.warmup % len(accepted)
            judge = GivenAcceptance(accepted[first:] + accepted[:first], cell.shape, self.target.device)
        vocab_size, seed = self.target.info.vocab_size, counts.seed + cell.context
        prompts = random_ids(vocab_size, cell.batch, cell.context, seed)
        return ready(self.target, parts, prompts, cell.shape, counts, judge)

    @torch.no_grad()
    def measure(self, cell: CycleCell, parts: Parts) -> Row:
        """Speed, memory and model of one cell; a row with `failed` where it cannot be measured."""
        row = clock.filled(cell.facts(), self._figures(cell, parts), self.target.device, LongtrainError)
        row["weights_gib"] = clock.gib(sum(param.nbytes for param in self.target.parameters()))
        return row

    def _figures(self, cell: CycleCell, parts: Parts) -> Iterator[Row]:
        """The cycles of a cell, whole and taken apart, and what they should take."""
        phases, cuda, device = self.ready(cell, parts), self.context.cuda, self.target.device
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)  # what was needed to fill the cache does not count
        found = whole(phases, self.counts)
        cache_bytes = phases.cache.bytes()
        found |= {
            "cache_gib": clock.gib(cache_bytes),
            "cache_bytes_per_token": cache_bytes / (cell.batch * cell.context),
            "draft_gib": clock.gib(phases.draft.bytes()) if phases.draft else 0.0,
        }
        if cell.split:
            found["steps"] = split(phases, self.counts)
        if cuda:  # before `_model`, which reads a large tensor to know the bandwidth
            found["peak_gib"] = clock.gib(torch.cuda.max_memory_allocated(device))
        yield {**found, **self._model(cell, found["cycle_ms"])}

    def _model(self, cell: CycleCell, cycle_ms: float) -> Row:
        """What the cycle should take and its bound on this GPU; nothing elsewhere or for unknown drafts."""
        gpu, size, forwards = self.context.gpu, Sizes.of(self.target.info), list(cell.forwards)
        if gpu is None or not forwards:
            return {}
        sizes = {"batch": cell.batch, "context": cell.context}
        read = clock.read_bytes_per_s(self.target.device)
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
    """A table of all rows, and one of the cycles that were taken apart."""
    apart = [row for row in rows if "steps" in row]
    shown = [of_rows(rows, COLUMNS), *([of_rows(apart, STEP_COLUMNS)] if apart else [])]
    return "\n\n".join(shown) + "\n"


def pictures(rows: Sequence[Row]) -> dict[str, bytes]:
    """Speed by drafted tokens, one step taken apart, and tokens a second by batch, as far as measured."""
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
    """Speed over plain decoding from the full cache, measured and expected, and from the same cache."""
    figure, (left, right) = plots.panels(2, size=(5.5, 3.8))
    named = [
        {
            **row,
            "length": tokens(row["prompt_tokens"]),
            "line": f"{row['system']}, {tokens(row['prompt_tokens'])}",
        }
        for row in rows
    ]
    plots.lines(left, named, "drafted", "speed", "{line}")
    left.set_prop_cycle(None)
    plots.lines(left, named, "drafted", "expected_speed", "model, {length}", linestyle="--")
    plots.lines(right, named, "drafted", "int8_speed", "{line}")
    for axes, cache in ((left, "full cache"), (right, "the same INT8 cache")):
        axes.axhline(1, color="black", linewidth=0.8)
        title = f"over plain decoding, {cache}"
        plots.label(axes, "drafted tokens a cycle", "speed", title=title, legend=False)
    return plots.png(figure, legend=True)


def _steps(rows: Sequence[Row]) -> bytes:
    """Milliseconds of each part of a cycle, on top of each other."""
    figure, (axes,) = plots.panels(1, size=(11, 3.8))
    keys = phase_columns(*PARTS_OF_A_CYCLE, within="steps.")
    layers = {part: [value_at(row, key) for row in rows] for part, key in keys.items()}
    plots.stacks(axes, [f"{row['name']}\n{tokens(row['prompt_tokens'])}" for row in rows], layers)
    plots.label(axes, y="ms a cycle", legend=False)
    return plots.png(figure, legend=True)


def _batches(rows: Sequence[Row], context: str) -> bytes:
    """Tokens a second and tokens a cycle by batch."""
    figure, panels = plots.panels(2, size=(5.5, 3.8))
    keys = {"tokens_per_s": "tokens/s", "tokens_per_cycle": "committed tokens a cycle"}
    for axes, (key, title) in zip(panels, keys.items(), strict=True):
        plots.lines(axes, rows, "batch", key, "{name}")
        plots.label(axes, f"batch, {context} tokens each", title, legend=False)
        axes.set_ylim(bottom=0)
    return plots.png(figure, legend=True)


BENCH = Bench(
    settings=CyclesSettings,
    run=run,
    report=report,
    pictures=pictures,
)

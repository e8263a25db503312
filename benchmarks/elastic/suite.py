"""Steps of sparse decoding with KV entries on the GPU and on the host, and the transfers between them.

It also measures steps of a sequence that grows under a memory cap, and the throughput of workloads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.elastic import growth, mixes, steps, traffic
from benchmarks.elastic.settings import ElasticSettings
from longtrain.bench import clock
from longtrain.bench.suites import Bench, Context, Row, shape_keys
from longtrain.errors import ConfigError
from longtrain.tables import of_rows

TABLES = {None: steps.COLUMNS, "traffic": traffic.COLUMNS, "growth": growth.COLUMNS, "mix": mixes.COLUMNS}
"""Kind of a row -> columns of its table."""


def run(settings: ElasticSettings, context: Context) -> Iterator[Row]:
    """Yield rows of steps and of transfers for each length, then of a growing sequence, then of workloads.

    Raises:
        ConfigError: a budget is not larger than sinks and window, `method` does not score KV entries before
            the forward, or an artifact is given, whose weights would have no effect.
    """
    keys, budgets = shape_keys(settings.shape), settings.read_budgets
    if context.artifact is not None and context.method is None:  # recipes name both
        raise ConfigError(
            f"artifact={context.artifact}: suite=elastic times random weights; pass method=NAME instead"
        )
    target = context.random_target(keys)
    if context.method is not None:
        traffic.scorer(target, budgets[0], context)  # raises errors before the first step
    for length in settings.lengths:
        step_ms: dict[int, float] = {}
        for row in steps.measure(target, length, budgets, settings, context):
            if "step_ms" in row and "rows" in row:
                ms = row["step_ms"]["median"]
                step_ms[row["rows"]] = min(ms, step_ms.get(row["rows"], ms))
            yield row
        for side_by_side in settings.side_by_side:
            for budget in budgets:
                about: Row = {"tokens": length, "rows": budget.rows, "side_by_side": side_by_side}
                parts = traffic.measure(target, length, budget, settings, context, side_by_side=side_by_side)
                row = clock.filled(about | {"kind": "traffic"}, parts, context.device)
                yield traffic.selection(row, step_ms.get(budget.rows))
    if settings.growth:
        yield from growth.measure(target, budgets[0], settings)
    yield from mixes.measure(target, budgets[0], settings)


def report(rows: Sequence[Row], settings: ElasticSettings, context: Context) -> str:
    """Return tables of steps, of transfers, of a growing sequence, and of workloads."""
    own = {kind: [row for row in rows if row.get("kind") == kind] for kind in TABLES}
    return "\n\n".join(of_rows(own[kind], columns) for kind, columns in TABLES.items() if own[kind])


def pictures(rows: Sequence[Row]) -> dict[str, bytes]:
    """Plot the steps of a growing sequence, if there are any."""
    grown = [row for row in rows if row.get("kind") == "growth"]
    return {"elastic_growth.png": growth.picture(grown)} if grown else {}


BENCH = Bench(settings=ElasticSettings, run=run, report=report, pictures=pictures)

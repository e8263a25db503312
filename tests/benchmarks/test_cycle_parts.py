"""The parts of a decoding cycle, plainly, on a cache of its own and with a draft."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks import cycle_parts
from longtrain.bench.suites import Context
from longtrain.decoding.roles import TreeShape


def test_each_kind_of_cycle_has_its_parts() -> None:
    context = Context(
        torch.device("cpu"),
        method={"name": "longspec", "window": 8},
        drafting=lambda: TreeShape((2, 2)),
        home=Path(),
    )
    settings = cycle_parts.CyclePartsSettings((12,), batches=(2,), shape="llama_micro", cycles=2)
    rows = list(cycle_parts.run(settings, context))
    assert [row["shape"] for row in rows] == [[], [2, 2]]
    for row in rows:
        phases = ("propose_ms", "forward_ms", "accept_ms", "commit_ms", "attention_ms")
        assert all(row[name]["median"] > 0 for name in phases) and row["cycle_ms"] > 0
        assert row["linear_ms"] == row["forward_ms"]["median"] - row["attention_ms"]["median"]
    assert "| attention ms |" in cycle_parts.BENCH.table(rows, settings, context)

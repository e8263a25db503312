"""`bench suite=elastic` on a shape of a few thousand weights, and the count of its LRU baseline."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.cycles import PHASES, CycleCounts, ready, split
from benchmarks.elastic.steps import shares
from longtrain.bench.suites import Context, bench_of, random_ids
from longtrain.cache.selected import SelectedCache
from longtrain.decoding.evict import Budget
from longtrain.decoding.retrieval.lru import LruBuffer
from longtrain.decoding.roles import TreeShape
from longtrain.errors import ConfigError
from longtrain.systems import parse

CPU = Context(torch.device("cpu"), method={"name": "specontext"})


def rows_of(context=CPU, **changes):
    values = {"shape": "llama_micro", "lengths": [96], "budgets": [24], "window": 8, "steps": 4, "warmup": 2}
    bench = bench_of("elastic")
    settings = bench.read({**values, **changes}, context)
    torch.manual_seed(0)
    rows = list(bench.run(settings, context))
    return rows, bench.table(rows, settings, context)


def test_every_mode_moves_what_it_says():
    rows, table = rows_of(growth=[64, 96, 192], growth_gib=0.0001, overlap=0.5)
    assert not [row["failed"] for row in rows if "failed" in row]
    by = {row.get("system", row.get("kind")): row for row in rows}
    info = CPU.random_target("llama_micro").info
    whole_mb = info.n_layers * info.n_kv_heads * 24 * 2 * info.head_dim * 4 / 1e6
    assert by["gpu"]["moved_mb"] == 0
    assert by["async_difference"]["of_gpu"] > 0 and not [row for row in rows if "hidden" in row]
    for mode in ("sync", "async"):
        assert by[f"{mode}_all"]["moved_mb"] == pytest.approx(whole_mb)
        assert 0.05 * whole_mb < by[f"{mode}_difference"]["moved_mb"] < 0.6 * whole_mb
    traffic = by["traffic"]
    assert traffic["overlap"] + traffic["difference_share"] == pytest.approx(1)
    assert 0 < traffic["lru_share"] < traffic["difference_share"]
    assert min(traffic[key] for key in ("gather_gb_s", "copy_gb_s")) > 0
    assert min(traffic[key]["median"] for key in ("head_ms", "choose_ms", "slots_ms")) > 0
    grown = [row for row in rows if row.get("kind") == "growth"]
    assert [row["tokens"] for row in grown] == [64, 96, 192]
    assert [row["on_host"] for row in grown] == sorted(row["on_host"] for row in grown)
    assert grown[0]["on_host"] < grown[-1]["on_host"]
    assert "async_difference" in table and "layers on the host" in table


def test_what_is_hidden_of_a_transfer_that_noise_does_not_cover():
    def row(median, spread=0.1):
        return {"step_ms": {"median": median, "p10": median - spread, "p90": median + spread}}

    gpu, beside = row(4.0), row(4.5)
    assert shares(beside, gpu, row(6.0))["hidden"] == pytest.approx(0.75)
    assert shares(beside, gpu, row(4.1))["hidden"] is None
    assert shares(beside, gpu, row(6.0, spread=2.0))["hidden"] is None
    assert shares(beside, gpu, None) == {"of_gpu": 4.5 / 4}


def test_an_lru_buffer_loads_what_was_used_least_lately():
    """Against a list of rows, latest last, of which the last `slots` are there."""
    rng, slots = torch.Generator().manual_seed(1), 9
    buffer = LruBuffer(1, 1, slots, rows=30, device=torch.device("cpu"))
    held: list[int] = []
    for step in range(40):
        rows = sorted(torch.randperm(30, generator=rng)[: 5 if step % 3 else 4].tolist())
        idx = torch.tensor([[rows + [0] * (6 - len(rows))]])
        missing = len({*rows} - {*held[-slots:]})
        assert buffer.use(idx, torch.tensor([len(rows)])) == missing
        held = [row for row in held if row not in rows] + rows


def test_layers_side_by_side_are_measured_one_number_after_another():
    """Each with a row on the GPU of its own to be compared with, and a gather; what choosing takes once."""
    rows, table = rows_of(side_by_side=[1, 2], modes=["gpu", "async_difference"])
    assert not [row["failed"] for row in rows if "failed" in row]
    stepped = [(row["side_by_side"], row["system"]) for row in rows if "moved_mb" in row]
    assert stepped == [(1, "gpu"), (1, "async_difference"), (2, "gpu"), (2, "async_difference")]
    gathered = [row for row in rows if row.get("kind") == "traffic"]
    assert [row["side_by_side"] for row in gathered] == [1, 2] and "layers side by side" in table
    assert all(row["gather_gb_s"] > 0 for row in gathered)
    assert ["choose_ms" in row for row in gathered] == [True, False]
    taken = gathered[0]["head_ms"]["median"] + gathered[0]["choose_ms"]["median"]
    fastest = min(row["step_ms"]["median"] for row in rows if "moved_mb" in row)
    assert gathered[0]["selection_share"] == pytest.approx(taken / fastest)


@pytest.mark.parametrize("name, rule", [("sparse", {"rule": "quest"}), ("indexer", {}), ("longspec", {})])
def test_a_method_that_scores_no_rows_before_the_forward_is_refused_before_the_first_step(name, rule):
    settings = {"shape": "llama_micro", "lengths": [96], "budgets": [24], "window": 8}
    context, bench = replace(CPU, method={"name": name, **rule}), bench_of("elastic")
    with pytest.raises(ConfigError, match=f"method={name} scores no rows before the forward; leave it out"):
        next(bench.run(bench.read(settings, context), context))


def test_what_is_refused():
    with pytest.raises(ConfigError, match="artifact=some: suite=elastic times random weights; pass method="):
        rows_of(replace(CPU, method=None, artifact="some"))
    assert rows_of(replace(CPU, artifact="a recipe's own"), modes=[])[0]
    with pytest.raises(ConfigError, match=r"suite.modes.*late"):
        rows_of(modes=["late"])
    with pytest.raises(ConfigError, match=r"suite.growth=\[9, 3\]; allowed: lengths, ascending"):
        rows_of(growth=[9, 3])
    with pytest.raises(
        ConfigError, match=r"suite.budgets=\[24, 97\] rows, read of 96 tokens; allowed: lengths of 97"
    ):
        rows_of(budgets=[24, 97])


def test_requests_of_mixes():
    """As many as the caps hold; more layers on the device never mean more rows moved from the host."""
    kept, host = 0.0012, 0.0006
    systems = ["full", "full_host", "sync_all", "async_difference", "adaptive"]
    rows, table = rows_of(
        replace(CPU, method=None),
        lengths=[],
        mixes=[[32, 64]],
        mix_systems=systems,
        mix_gib=kept,
        mix_host_gib=host,
    )
    assert not [row["failed"] for row in rows if "failed" in row]
    info = CPU.random_target("llama_micro").info
    token = 2 * info.n_layers * info.n_kv_heads * info.head_dim * 4
    assert [row["system"] for row in rows] == systems and "full_host" in table
    for row in rows:
        assert [point["tokens"] for point in row["points"]] == [32, 64, 96]
        on_device, whole = row["system"] == "full", row["batch"] * token * 96
        assert whole <= 2**30 * (kept if on_device else host)
        assert row["batch"] * token * 25 <= kept * 2**30
        first, middle, last = (point["step_ms"]["median"] for point in row["points"])
        whole_ms = row["batch"] * row["prefill_ms"] + row["output"] * (first + 2 * middle + last) / 4
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] * row["output"] / whole_ms)
    away = [[point["on_host"] for point in row["points"]] for row in rows if row["system"] == "adaptive"]
    assert all(counts == sorted(counts) and counts[0] < info.n_layers for counts in away)
    with pytest.raises(ConfigError, match="hold no request of 96 tokens for 'full'"):
        rows_of(lengths=[], mixes=[[32, 64]], mix_gib=1e-6)


@torch.no_grad()
def test_choosing_is_a_phase_of_its_own():
    """A step over chosen rows taken apart: what is chosen is due in every one of them."""
    (system,) = CPU.systems(target := CPU.random_target("llama_micro"), parse({"method": dict(CPU.method)}),
                            budgets=[Budget(80)])  # fmt: skip
    counts = CycleCounts(2, 2, read=False)
    prompts = random_ids(target.info.vocab_size, 2, 150, seed=1)
    phases = ready(target, system.parts, prompts, TreeShape(()), counts)
    found = split(phases, counts)
    assert {"select_ms", *PHASES} <= {*found} and isinstance(phases.cache, SelectedCache)
    since_B, len_B = phases.cache.entry_sets.since_B, phases.cache.len_B
    assert torch.equal(since_B, len_B - 1) and int(len_B[0]) == 150 + 5

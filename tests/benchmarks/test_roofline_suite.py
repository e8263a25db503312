"""The roofline of whole models against the statements of QuantSpec's figures, and its table."""

from __future__ import annotations

import json

import pytest

from benchmarks import roofline
from benchmarks.roofline import generation
from longtrain.costs.hardware import GPUS
from longtrain.costs.model import Sizes
from longtrain.costs.roofline import Width, ridge, step

LLAMA2_7B = Sizes(32, 32, 32, 128, 4096, 11008, 32000)
LLAMA31_8B = Sizes(32, 32, 8, 128, 4096, 14336, 128256)
A6000 = GPUS["A6000"]


def table(gpu, *, batches, contexts, tokens):
    return [
        row
        for batch in batches
        for context in contexts
        for row in roofline.cell(LLAMA2_7B, gpu, batch, context, tokens=tokens, width=Width())
    ]


def test_prefill_is_bound_by_arithmetic_and_decoding_by_memory() -> None:
    """Figs. 2 and 5, Llama-2-7B on an A6000 at the contexts and batch sizes plotted."""
    assert ridge(A6000) == pytest.approx(201.6, abs=0.1)
    rows = table(A6000, batches=[1, 8, 64], contexts=[1024, 16384, 262144], tokens=1024)
    bounds = {(row["phase"], row["aggregate_bound"]) for row in rows}
    assert bounds == {("prefill", "compute"), ("decode", "memory")}
    assert all(row["attention_bound"] == "compute" for row in rows if row["phase"] == "prefill")


def test_attention_takes_over_with_context_and_batch() -> None:
    rows = table(A6000, batches=[1, 16], contexts=[512, 32768, 131072], tokens=1024)
    share = {
        (row["batch"], row["context"]): row["attention_share"] for row in rows if row["phase"] == "decode"
    }
    assert share[1, 512] < 0.05 < 0.5 < share[1, 32768] < share[1, 131072]
    assert share[1, 512] < share[16, 512] and share[16, 32768] > 0.9


def test_the_cache_outgrows_eight_gpus() -> None:
    """Fig. 6: Llama-2-7B's cache against 8 x 80 GB."""
    (row,) = (
        row
        for row in table(GPUS["H100"], batches=[16], contexts=[131072], tokens=2)
        if row["phase"] == "decode"
    )
    assert row["kv_gb"] == pytest.approx(16 * 68.7, rel=1e-3)
    assert row["kv_gb"] > 8 * 80 and not row["fits"] and row["memory_share"] > 8


def test_the_roofline_is_a_table(measured, tmp_path, capsys):
    keys = ("lengths=[1k,128k]", "suite.batches=[1]", "suite.kv_bits=4")
    rows = measured("roofline", *keys)
    found = {(row["phase"], row["context"]): row for row in rows}
    content = json.loads((tmp_path / "bench" / "roofline.json").read_text())
    assert content["settings"]["kv_bits"] == 4 and content["versions"]["torch"] and "argv" in content
    assert "gpus" in content["machine"]
    assert found["decode", 131072]["kv_gb"] == pytest.approx(17.2 / 3.76, rel=0.01)
    assert found["decode", 1024]["attention_share"] < 0.02 < 0.2 < found["decode", 131072]["attention_share"]
    said = capsys.readouterr().out
    assert (
        "| attention's share |" in said
        and "llama31_8b on H200" in said
        and "wrote roofline.json, roofline.md in " in said
    )


def test_generation_is_the_sum_of_its_steps() -> None:
    whole = generation(LLAMA31_8B, batch=2, context=100, tokens=5, width=Width())
    by_hand = [step(LLAMA31_8B, batch=2, context=100 + i) for i in range(5)]
    for part in ("linear", "attention"):
        for what in ("flops", "bytes"):
            summed = sum(getattr(getattr(one, part), what) for one in by_hand)
            assert getattr(getattr(whole, part), what) == pytest.approx(summed)

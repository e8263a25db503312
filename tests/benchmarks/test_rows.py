"""Whether a token of a decoding step comes out the same however many tokens the step has."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks import rows as rows_of_a_step
from longtrain.cache.hierarchical import HierarchicalCache
from longtrain.decoding.roles import Parts
from longtrain.targets.loading import random_target
from tests.helpers import ONE_LAYER, attached

MICRO = {**ONE_LAYER, "num_hidden_layers": 2, "max_position_embeddings": 1024}


@pytest.fixture(scope="module")
def target():
    return random_target(MICRO, seed=3, dtype=torch.float64)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(61, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


quantspec = partial(attached, "quantspec")


@pytest.mark.parametrize("own_cache", [True, False])
def test_single_rows_are_single_rows(target, own_cache):
    parts = quantspec(target, draft=False) if own_cache else Parts()
    one, three = rows_of_a_step.measure(target, parts, tokens(257, 0), tokens(6, 1), counts=[1, 3])
    assert one["attention_equal"] and one["logits_equal"] and one["layers_equal"] == 2
    assert (one["first_layer"], one["hidden_difference"], one["same_argmax"]) == (None, 0.0, 1.0)
    assert three["hidden_difference"] < 1e-12 and three["same_argmax"] == 1.0


def test_rows_that_depend_on_their_number_are_told(target):
    class Uneven(HierarchicalCache):
        def attend(self, layer, q_BHTD, **how):
            out, lse = super().attend(layer, q_BHTD, **how)
            return out * (1 + 1e-3 * (self._own is None and layer == 0 and q_BHTD.shape[2] > 1)), lse

    parts = Parts(cache=quantspec(target, draft=False).cache)
    shape = {"n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 64, "device": "cpu"}
    uneven = replace(
        parts,
        cache=lambda batch, max_tokens, max_nodes: Uneven(
            **shape, batch=batch, max_tokens=max_tokens, max_nodes=max_nodes, dtype=torch.float64
        ),
    )
    (row,) = rows_of_a_step.measure(target, uneven, tokens(257, 0), tokens(6, 1), counts=[2])
    assert not row["attention_equal"] and not row["logits_equal"]
    assert row["first_layer"] == 0 and row["layers_equal"] == 0
    assert row["hidden_difference"] > 1e-6 and row["logit_difference"] > 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(4, 64), (2, 64), (2, 128)])
def test_on_a_gpu_rows_are_the_same_to_the_last_bit(kv_heads, head_dim):
    """In bf16, up to 32 packed rows: the reason why texts of chains are those of plain decoding there."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    heads["hidden_size"] = 512
    shape = {**MICRO, **heads, "max_position_embeddings": 2048}
    target = random_target(shape, seed=3, dtype=torch.bfloat16, device="cuda").fuse()
    for parts in (quantspec(target, draft=False), Parts()):
        found = rows_of_a_step.measure(target, parts, tokens(1025, 0), tokens(16, 1), counts=[2, 5, 8])
        assert all(row["attention_equal"] and row["logits_equal"] for row in found)


@pytest.mark.slow
def test_rows_of_a_step_beside_single_rows(measured, capsys):
    rows = measured("rows", "target.path=tiny", "lengths=[128]", "suite.row_counts=[1,3]")
    assert [(row["cache"], row["rows"]) for row in rows] == [
        (cache, count) for cache in ("quantised", "plain") for count in (1, 3)
    ]
    assert {row["context_tokens"] for row in rows} == {129} and {row["section"] for row in rows} == {"rows"}
    assert all(row["logits_equal"] for row in rows if row["rows"] == 1)
    assert all(row["same_argmax"] == 1.0 for row in rows)
    assert "| quantised | 129 | 3 |" in capsys.readouterr().out

"""Quality of quantised caches, rows of a step, and texts beside plain decoding, on a model of one layer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from longtrain import methods
from longtrain.cache.hierarchical import HierarchicalCache
from longtrain.cache.readings import Axis, UpperHalfCache
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import ConfigError
from longtrain.evaluation import row_invariance, same_text
from longtrain.evaluation.perplexity import measure
from longtrain.evaluation.quantised import FULL, Reading, axis_choices, decoding_caches, figures, score
from longtrain.kernels.hierarchical.layout import Split
from longtrain.targets.loading import random_target

MICRO = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def target():
    return random_target(MICRO, seed=3, dtype=torch.float64)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(61, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def windows(*lengths: int, scored: int = 20):
    return [(tokens(length, length), tokens(scored, length + 1)) for length in lengths]


def test_decoding_caches_cost_what_their_twins_cost(target):
    """The caches that decode, and rounded copies along the same axes: the windows pass over a block's end."""
    real = decoding_caches([Split.FLOOR], [8, 4])
    twins = [
        one
        for one in axis_choices(Split.FLOOR, [8, 4])
        if (one.rounding.keys, one.rounding.values) == (Axis.CHANNEL, Axis.TOKEN)
    ]
    assert [one.rounding for one in real] == [one.rounding for one in twins]
    found = score(target, [*real, *twins], windows(370, 380), batch=2)
    for one, twin in zip(real, twins, strict=True):
        assert found[one.name].nats == pytest.approx(found[twin.name].nats, abs=1e-9)
        assert found[one.name].divergence == pytest.approx(found[twin.name].divergence, abs=1e-9)
    full, eight, four = (sum(found[name].divergence) for name in (FULL.name, real[0].name, real[1].name))
    assert full == 0 < eight < four / 10  # 16 times the steps, so about 256 times the divergence


def test_full_precision_is_the_plain_cache(target):
    found = score(target, decoding_caches([Split.RTN], [8]), windows(300, 310, 290), batch=2)
    contexts, scored = zip(*windows(300, 310, 290), strict=True)
    plain = measure(target, Parts(), contexts, scored=scored)
    assert found[FULL.name].nats == pytest.approx([one.nats for one in plain], rel=1e-12)
    assert found[FULL.name].agreed == found[FULL.name].tokens == [20, 20, 20]


def test_contexts_below_two_blocks_lose_nothing(target):
    readings = [*decoding_caches([Split.FLOOR], [4]), *axis_choices(Split.FLOOR, [4])[:1]]
    found = score(target, readings, windows(150, 200), batch=2)
    for one in readings:
        assert sum(found[one.name].divergence) < 1e-12 and found[one.name].agreed == [20, 20]


def test_figures(target):
    reading = decoding_caches([Split.FLOOR], [4])[0]
    found = score(target, [reading], windows(300, 330, 360, 390), batch=4)
    full, row = figures(found, resamples=200)
    assert full["reading"] == FULL.name and "change_percent" not in full
    assert row["tokens"] == 80 and row["windows"] == 4
    nats = sum(found[reading.name].nats) - sum(found[FULL.name].nats)
    change = row["change_percent"]
    assert change["value"] == pytest.approx(100 * math.expm1(nats / 80))
    assert change["value"] == pytest.approx(100 * (row["perplexity"] / full["perplexity"] - 1))
    assert change["low"] <= change["value"] <= change["high"]
    assert row["divergence_nats"]["value"] > 0 and 0 < row["top1_agreement"]["value"] <= 1


def test_readings_without_rounding_bring_no_cache(target):
    assert Reading("plain").parts(target).cache is None
    kinds = [one.parts(target).cache(1, 300, 1) for one in decoding_caches([Split.RTN], [8, 4])]
    assert [type(one) for one in kinds] == [HierarchicalCache, UpperHalfCache]
    assert all(one.planes.split is Split.RTN for one in kinds)


def quantspec(target, **keys) -> Parts:
    spec = methods.get("quantspec")
    config = spec.config(**keys)
    return spec.attach(spec.build(config, target.info), target, config, {})


@pytest.mark.parametrize("own_cache", [True, False])
def test_single_rows_are_single_rows(target, own_cache):
    parts = quantspec(target, draft=False) if own_cache else Parts()
    one, three = row_invariance.measure(target, parts, tokens(257, 0), tokens(6, 1), counts=[1, 3])
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
    (row,) = row_invariance.measure(target, uneven, tokens(257, 0), tokens(6, 1), counts=[2])
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
        found = row_invariance.measure(target, parts, tokens(1025, 0), tokens(16, 1), counts=[2, 5, 8])
        assert all(row["attention_equal"] and row["logits_equal"] for row in found)


def test_a_text_over_a_blocks_end_is_refused(target):
    with pytest.raises(
        ConfigError, match="16 tokens after a prompt of 250 on a cache that quantises after 6"
    ):
        row_invariance.measure(target, quantspec(target), tokens(250, 0), tokens(16, 1), counts=[2])


def test_texts_of_a_draft_are_those_of_plain_decoding(target):
    shapes = [TreeShape((1,)), TreeShape((1, 1, 1))]
    told: list[dict] = []
    prompts = [tokens(250, 0), tokens(130, 1)]
    rows = same_text.measure(
        target, quantspec(target), prompts, shapes, max_new_tokens=20, batch=1, told=told.append
    )
    assert told == rows and [row["shape"] for row in rows] == [[1], [1, 1, 1]]
    for row in rows:
        assert (row["exactness"]["compared"], row["exactness"]["different"]) == (2, 0)
        assert row["tau"] > 1 and 0 < row["acceptance_rate"] <= 1 and row["context_tokens"] == 250
    assert rows[1]["tau"] > rows[0]["tau"]


def test_texts_on_another_cache_are_told(target):
    """The second cache, the draft's, mixes up a head's channels: what `different` is there to find."""

    class Mixed(HierarchicalCache):
        def attend(self, layer, q_BHTD, **how):
            out, lse = super().attend(layer, q_BHTD, **how)
            return out.flip(-1), lse

    made = []

    def alternating(batch, max_tokens, max_nodes):
        made.append(Mixed if made else HierarchicalCache)
        shape = {"n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 64, "device": "cpu"}
        return made[-1](**shape, batch=batch, max_tokens=max_tokens, max_nodes=max_nodes, dtype=torch.float64)

    parts = replace(quantspec(target, weight_bits=16), cache=alternating)
    (row,) = same_text.measure(target, parts, [tokens(300, 5)], [TreeShape((1,))], max_new_tokens=40)
    assert row["exactness"]["different"] == row["exactness"]["violations"] == 1

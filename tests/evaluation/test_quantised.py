"""Quality of quantised caches, rows of a step, and texts beside plain decoding, on a model of one layer."""

from __future__ import annotations

import pytest
import torch

from longtrain.decoding.roles import Parts
from longtrain.evaluation.perplexity import measure_against_full
from longtrain.systems import Builder, parse
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


def compared(target, windows, *entries) -> dict[str, list]:
    """What each named cache costs beside the full one, by the words of its entry."""
    named = {str(i): window for i, window in enumerate(windows)}
    builder = Builder(target, (), (), {}.__getitem__)
    known: dict[str, torch.Tensor] = {}
    found = {"full": measure_against_full(target, Parts(), named, known)}
    for entry in entries:
        (system,) = builder.of(parse({"cache": entry}))
        found[system.name] = measure_against_full(target, system.parts, named, known)
    return found


def test_decoding_caches_cost_what_their_twins_cost(target):
    """The caches that decode, and rounded copies along the same axes: the windows pass over a block's end."""
    twin = {"name": "rounded", "keys": "channel", "values": "token", "split": "floor"}
    some = windows(370, 380)
    full, eight, four, twin8, twin4 = compared(
        target, some, "int8", "int4", {**twin, "bits": 8}, {**twin, "bits": 4}
    ).values()
    for one, other in ((eight, twin8), (four, twin4)):
        assert [a.nats for a in one] == pytest.approx([a.nats for a in other], abs=1e-9)
        assert [a.divergence for a in one] == pytest.approx([a.divergence for a in other], abs=1e-9)
    total = [sum(a.divergence for a in one) for one in (full, eight, four)]
    assert total[0] == 0 < total[1] < total[2] / 10  # 16 times the steps, so about 256 times the divergence
    assert [a.agreed for a in full] == [20, 20]


def test_contexts_below_two_blocks_lose_nothing(target):
    for one in compared(target, windows(150, 200), "int4", {"name": "rounded", "bits": 4}).values():
        assert sum(a.divergence for a in one) < 1e-12 and [a.agreed for a in one] == [20, 20]

"""When QuantSpec is expected to be slower than plain decoding, against what was measured on one H200."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longtrain.costs.hardware import GPUS
from longtrain.costs.model import Experts, Sizes
from longtrain.decoding.engine import Engine
from longtrain.decoding.roles import TreeShape
from longtrain.methods.quantspec.gain import Gain, quantised_tokens
from longtrain.methods.quantspec.runtime import _bytes_per_s
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from tests.helpers import HEADS_OF_64, attached

RESULTS = Path(__file__).parents[3] / "recipes" / "results"
SMALL = Sizes(
    n_layers=8, n_heads=8, n_kv_heads=4, head_dim=64, hidden_size=512, intermediate_size=1408, vocab_size=8192
)
QWEN = Sizes(
    n_layers=28,
    n_heads=12,
    n_kv_heads=2,
    head_dim=128,
    hidden_size=1536,
    intermediate_size=8960,
    vocab_size=151936,
)
BITS = {"quantspec": (4, 4), "quantspec, KV only": (16, 4), "quantspec, weights only": (4, 8)}


def gain(size, weight_bits=4, kv_bits=4, *, gpu="H200", windows=None) -> Gain:
    own = (0,) * size.n_layers if windows is None else windows
    return Gain(size, own, 2, weight_bits, kv_bits, GPUS[gpu].bytes_per_s if gpu else None)


def measured(file, **where):
    rows = json.loads((RESULTS / file).read_text())["rows"]
    return [row for row in rows if all(row[key] == value for key, value in where.items())]


def test_a_small_target_is_expected_to_be_slower_at_every_length_where_it_was_measured():
    """Up to 30% too slow: what cannot gain is another question, and not for this."""
    rows = [row for row in measured("quantspec/small28m.json", drafted=3) if row["system"] in BITS]
    assert len(rows) == 9 and all(row["speed"] < 1 for row in rows)
    for row in rows:
        expected = gain(SMALL, *BITS[row["system"]]).speed(1, row["prompt_tokens"])
        assert 0.65 * row["speed"] < expected < 0.9


@pytest.mark.parametrize("shape", ["llama31_8b", "llama31_8b_batch1", "llama31_8b_warp_groups", "llama2_7b"])
def test_a_large_target_is_served_wherever_it_was_measured_faster(shape):
    """Acceptance was given there, 0.9 as here."""
    size = Sizes.of_keys(SHAPES["llama2_7b" if shape == "llama2_7b" else "llama31_8b"])
    drafted = 2 if shape == "llama2_7b" else 3
    rows = measured(f"quantspec/{shape}.json", system="quantspec", drafted=drafted)
    assert len(rows) > 1 and all(row["speed"] > 1.3 for row in rows)
    for row in rows:
        expected = gain(size).speed(row["batch"], row["prompt_tokens"])
        assert expected > 1.3
        if row["batch"] == 1:
            assert expected == pytest.approx(row["speed"], rel=0.15)


def test_a_published_model_of_1_5b_pays_at_30k_and_not_at_short_lengths():
    run = json.loads((RESULTS / "published/qwen25_coder_15b/quantspec_acceptance.json").read_text())
    ratio = run["speed"][0]["metrics"]["quantspec"]["ratio"]
    speed = gain(QWEN).speed(1, 30720)
    assert ratio > 1 and speed > 1 and speed == pytest.approx(ratio, rel=0.1)
    assert gain(QWEN).speed(1, 100) < gain(QWEN).speed(1, 8192) < 1


def test_it_grows_with_what_is_read_and_not_with_what_is_not():
    assert gain(QWEN).speed(8, 8192) > gain(QWEN).speed(1, 8192)  # more of the cache
    assert gain(QWEN, gpu="L4").speed(1, 100) > gain(QWEN).speed(1, 100)  # a step is its reads there
    assert gain(QWEN).speed(17, 100) < 0.93 * gain(QWEN).speed(16, 100)  # 4-bit weights, twice
    near = (4096,) * QWEN.n_layers  # windows: nothing is quantised
    assert gain(QWEN, windows=near).speed(1, 1 << 17) < gain(QWEN).speed(1, 1 << 17)
    sparse = Sizes(**{**vars(QWEN), "experts": Experts(count=64, per_token=4, size=1024)})
    assert gain(sparse, 16).speed(1, 100) < gain(QWEN, 16).speed(1, 100)  # verification reads more experts


def test_without_a_known_bandwidth_bytes_alone_decide():
    assert gain(SMALL, 16, gpu=None).speed(1, 160) == pytest.approx(3.439 / 4, abs=0.01)
    assert gain(SMALL, 16, gpu=None).speed(1, 1 << 17) > 1.5 and gain(SMALL, gpu=None).speed(1, 100) > 1.5


def test_windows_and_the_head_are_read_too():
    narrow, wide = ((window,) * QWEN.n_layers for window in (128, 4096))
    assert gain(QWEN, windows=wide).speed(8, 8192) != gain(QWEN, windows=narrow).speed(8, 8192)
    large = Sizes(**{**vars(QWEN), "vocab_size": 10 * QWEN.vocab_size})
    assert gain(large).speed(1, 100) > gain(QWEN).speed(1, 100)  # 4 bits of it instead of 16


def test_one_line_says_that_it_is_expected_to_be_slower_and_drafting_goes_on(monkeypatch, caplog):
    target = random_target(HEADS_OF_64, seed=0)
    parts = attached("quantspec", target)
    assert parts.draft.slower(1, 100) == ""  # a CPU, where bytes alone count
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    assert _bytes_per_s(torch.device("cuda")) == GPUS["H200"].bytes_per_s
    parts.draft.gain = replace(parts.draft.gain, bytes_per_s=GPUS["H200"].bytes_per_s)
    for _ in range(2):
        out = Engine(target, parts).generate([[5, 6, 7, 8]], max_new_tokens=8, shape=TreeShape((1, 1)))
        assert set(out.stats.shapes) == {(1, 1)}
    (line,) = caplog.messages
    assert line.startswith("quantspec: expected at 0.") and line.endswith("decode without method=quantspec")


def test_the_newest_tokens_are_not_quantised():
    assert [quantised_tokens(n) for n in (0, 127, 255, 256, 384, 511)] == [0, 0, 0, 128, 256, 256]

"""What finally happens is part of the golden outputs: which entries of the KV cache stay, and which are read.

Whoever changes a setting or a tensor here also writes every checksum anew (`save`), so that nothing but the
golden outputs can refuse it.
"""

from __future__ import annotations

import dataclasses
import typing

import pytest
import torch
from mutations import made_of, verify

from longtrain import methods
from longtrain.artifact import Artifact, Golden
from longtrain.artifact.golden.checks import Check, Verification
from longtrain.artifact.golden.kinds import REPEATED, SHARE
from longtrain.errors import ArtifactError, LongtrainError
from longtrain.settings import OneOf
from longtrain.targets.loading import load_target, random_target
from longtrain.targets.shapes import SHAPES

MADE = {
    "longspec": {"window": 16},
    "eagle3": {"layers": [1, 2, 4]},
    "lookaheadkv": {},
    "kvzap": {},
    "specontext": {"sets": 3},
    "indexer": {},
    "dspark": {"layers": [0, 2], "n_layers": 2, "windows": [16, None], "target_kv": True, "markov_rank": 8}
    | {"draft_vocab_size": 40, "objective": "lk_hybrid", "gain": 3.0},
    "dspark, DFlash2": {"layers": [0, 2], "n_layers": 2, "heads": "selector", "markov_rank": 8}
    | {"conv_taps": 2, "selector_top": 9},
}
"""Method (and which of its drafts) -> settings other than its defaults, and the gain of `module_of`: an
untrained head of the draft's own is so flat that no other setting would show."""

SETS = {"pool", "queries", "by_mass", "sinks", "window", "recall_weight", "recall_entries"}
OFFSETS = {"anchor_offset", "anchors", "offset_max_tokens", "offset_max_doc_tokens"}
IN_TRAINING = {
    "longspec": OFFSETS
    | {"warm_start", "max_depth", "flash_noisy", "shift_weights", "guard_every", "views", "objective"}
    | {"chunk_tokens", "head_bits"},  # head_bits: a copy of the head, on GPUs alone
    "eagle3": OFFSETS
    | {"depths", "depth_decay", "kl_decay", "warm_start", "chunk_tokens", "views", "head"}
    | {
        "objective",
        "draft_vocab_size",
        "start_mlp",
        "start_outputs",
        "start_norm",
        "start_inputs",
    },  # draft_vocab_size: beyond the vocabulary; below it shapes differ
    "lookaheadkv": {"init_std", "embedding_lr_scale", "budget_weight", "budgets", "response"},
    "kvzap": {"chunk", "labels"},
    "specontext": SETS | {"conv", "mapping"},  # conv: of another variant; mapping: its table is stored
    "indexer": SETS,
    "dspark": OFFSETS
    | {"anchor_every", "block_decay", "objective", "ce_weight", "l1_weight", "kl_decay"}
    | {"confidence_weight", "chunk_tokens"}
    | {"min_confidence", "start_norm"},  # which of the same nodes are verified; how a new draft begins
}
IN_TRAINING["dspark, DFlash2"] = IN_TRAINING["dspark"] | {"selector_weight"}
"""Settings that nothing depends on once a module is trained."""


STEERS = {
    "longspec": {"window", "kv_source_layer", "final_norm", "cross_attention"},
    "eagle3": {"window", "norm_output", "norm_before_residual"},
    "lookaheadkv": {"pool_kernel", "adaptive", "reduction", "suffix_window", "lora_alpha"},
    "kvzap": {"sinks", "window"},
    "specontext": {"variant", "row", "sets"},
    "indexer": {"dims"},
    "dspark": {"block_size", "heads", "sample_from_anchor", "target_kv", "draft_vocab_size"}
    | {"conv_taps", "conv_group", "selector_top", "selector_weight"},  # both: refused without a selector
    "dspark, DFlash2": {"block_size", "heads", "sample_from_anchor", "conv_taps", "conv_group"}
    | {"selector_top", "markov_rank"},
}
"""Settings of which this test must have changed some: those that decide what is drafted, kept or read."""


@pytest.fixture(scope="module")
def target():
    return random_target({**SHAPES["llama_micro"], "num_hidden_layers": 6}, seed=0)


@pytest.fixture(scope="module")
def artifacts(target):
    return {name: made_of(name.split(",")[0], target, **settings) for name, settings in MADE.items()}


def changed(made: Artifact, folder, **parts) -> Artifact:
    """The artifact with other parts, written and read again: all checksums are those of the new files."""
    return Artifact.load(dataclasses.replace(made, **parts).save(folder))


def others(kind: type, key: str, value) -> list:
    """Near values of a setting, of its own type."""
    hint = typing.get_type_hints(kind, include_extras=True)[key]
    words = [
        one for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, OneOf) for one in mark.values
    ]
    if words:
        return [word for word in words if word != value]
    if key == "adaptive":
        return [word for word in (False, "heads", "layers") if word != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1] if key != "pool_kernel" else [value + 2]
    return []


@pytest.mark.parametrize("name", MADE)
def test_every_setting_that_steers_is_covered(name, target, artifacts, tmp_path):
    made, kind = artifacts[name], methods.config_class(name.split(",")[0])
    changed(made, tmp_path / "same").build(target)
    taken, refused = set(), set()
    for key, value in made.config.items():
        for number, other in enumerate(others(kind, key, value)):
            try:
                changed(made, tmp_path / f"{key}{number}", config={**made.config, key: other}).build(target)
                taken.add(key)
            except LongtrainError:
                refused.add(key)
    assert taken <= IN_TRAINING[name]
    assert refused - IN_TRAINING[name] >= STEERS[name]


@pytest.mark.parametrize("other", [{"pool_kernel": 5}, {"adaptive": "heads"}, {"adaptive": "layers"}])
def test_what_stays_is_compared(target, artifacts, tmp_path, other):
    made = artifacts["lookaheadkv"]
    found = changed(made, tmp_path / "x", config={**made.config, **other})
    with pytest.raises(ArtifactError, match="other entries of the KV cache are chosen"):
        found.build(target)


def test_the_bundled_artifact_is_refused_with_another_pool(tmp_path):
    target = load_target("tiny", dtype="bfloat16", device="cpu")
    made = Artifact.load("tiny_lookaheadkv")
    changed(made, tmp_path / "same").build(target)
    found = changed(made, tmp_path / "x", config={**made.config, "pool_kernel": 5})
    with pytest.raises(ArtifactError, match="what the evictor chooses by stored scores"):
        found.build(target)


@pytest.mark.parametrize("order", ["layers", "heads"])
def test_what_each_layer_reads_is_compared(target, artifacts, tmp_path, order):
    made = artifacts["specontext"]
    table_LG = made.tensors["table_LG"].flip(0 if order == "layers" else 1)
    found = changed(made, tmp_path / "x", tensors={**made.tensors, "table_LG": table_LG})
    with pytest.raises(ArtifactError, match="other entries of the KV cache are chosen"):
        found.build(target)


def test_golden_outputs_without_the_choice_are_refused(artifacts, tmp_path):
    for name, lost in (("kvzap", "kept_LGS"), ("specontext", "read_LGK")):
        golden = artifacts[name].golden
        tensors = golden.tensors()
        del tensors[lost]
        with pytest.raises(ArtifactError, match=f"lacks {lost}"):
            Golden.from_tensors(golden.kind, tensors, golden.dtype, golden.noise)


def test_one_entry_is_enough(target, artifacts):
    made = artifacts["kvzap"]
    kept_LGS = made.golden.own["kept_LGS"].clone()
    assert kept_LGS.shape[-1] == REPEATED * len(made.golden.own["ids_T"])
    assert int(kept_LGS.sum()) == int(kept_LGS.numel() * SHARE)
    kept_LGS[1, 0, 7] = ~kept_LGS[1, 0, 7]
    golden = dataclasses.replace(made.golden, own={**made.golden.own, "kept_LGS": kept_LGS})
    with pytest.raises(ArtifactError, match="chooses by stored scores"):
        verify(golden, made._parts, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_that_exchanges_candidates_is_rounding(dtype):
    """The last candidate of a slot in one dtype is another one in another dtype."""
    shape = {**SHAPES["llama_micro"], "num_hidden_layers": 6, "vocab_size": 2000}
    made = made_of("dspark", random_target(shape, seed=0, dtype=dtype), **MADE["dspark, DFlash2"])
    for other in (torch.float32, torch.bfloat16, torch.float16):
        assert verify(made.golden, made._parts, random_target(shape, seed=0, dtype=other)) < 0.01


@pytest.mark.parametrize("name", ["lookaheadkv", "kvzap", "specontext", "indexer"])
def test_rounding_changes_no_choice(name, artifacts):
    """The choice is by stored scores, so half precision takes and leaves the very same entries."""
    half = random_target({**SHAPES["llama_micro"], "num_hidden_layers": 6}, seed=0, dtype=torch.bfloat16)
    made = artifacts[name]
    checks = made.golden.measure(made._parts, half)
    assert [check.error for check in checks if "chooses" in check.what] == [0.0]


def test_no_difference_is_allowed_where_the_limit_is_none():
    exact, near = Check("a choice", 0.0, 0.0), Check("a score", 0.5, 1.0)
    assert exact.passed and not Check("a choice", 1e-9, 0.0).passed
    assert "a score" in Verification([exact, exact, near]).summary()
    assert "a choice" in Verification([near, near, Check("a choice", 1e-9, 0.0)]).summary()

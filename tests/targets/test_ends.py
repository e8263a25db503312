"""A target without its layers has everything of the whole one but a forward."""

from __future__ import annotations

import json
import random

import pytest
import torch

from longtrain.errors import ArtifactError, ConfigError, TargetMismatchError
from longtrain.targets.families import FAMILIES
from longtrain.targets.info import TargetInfo
from longtrain.targets.loading import load_target
from longtrain.targets.shapes import SHAPES
from tests import families
from tests.helpers import without_layers
from tests.targets import test_window_layers as windows
from tests.targets.test_families import checkpoint


@pytest.mark.parametrize(
    ("dtype", "weights"), [("float32", "stored"), ("bfloat16", "stored"), ("bfloat16", "random")]
)
def test_the_ends_are_those_of_the_whole_target(dtype, weights):
    whole, ends = (load_target("tiny", dtype=dtype, weights=weights, layers=one) for one in (True, False))
    assert ends.info == whole.info  # the hash of all weights too
    held = sum(value.nbytes for value in ends.parameters() if not value.is_meta)
    assert held == whole.head_weight.nbytes + whole.final_norm_weight.nbytes
    ids_T, pos_BT = torch.arange(9), torch.arange(7, 16)[None]
    assert torch.equal(ends.embed(ids_T), whole.embed(ids_T))
    assert torch.equal(ends.head(ends.embed(ids_T)), whole.head(whole.embed(ids_T)))
    assert torch.equal(ends.final_norm_weight, whole.final_norm_weight)
    assert all(torch.equal(a, b) for a, b in zip(ends.rope(pos_BT), whole.rope(pos_BT), strict=True))
    one, other = ends.layer_state(3), whole.layer_state(3)
    assert set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(ConfigError, match=r"loaded without its layers .*features=fill"):
        ends.packed(ids_T, pos_BT[0], (0, 9))


def test_a_missing_layer_is_told_although_it_is_not_kept(tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    from longtrain.assets import asset_dir

    folder = shutil.copytree(asset_dir("bundled") / "tiny", tmp_path / "copy")
    file = folder / "weights.int8.safetensors"
    tensors = load_file(file)
    for name in ("model.layers.4.mlp.up_proj.weight", "model.layers.4.mlp.up_proj.weight.scale"):
        del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ArtifactError, match=r"lacks 1 tensors, the first is model.layers.4.mlp.up_proj"):
        load_target(folder, layers=False)


def shape_of(family):
    """A small config of a family, with windows if the family may have them."""
    if family in windows.FAMILIES:
        return windows.shape_of(family, random.Random(0))
    if family == "gpt_oss":
        return families.usual(family, layer_types=windows.MIXED, sliding_window=8)
    return families.usual(family) if family in families.FAMILIES else SHAPES["llama_micro"]


def changes(shape):
    """Keys of a config that change what a layer computes, each with another value."""
    act = "hidden_activation" if shape["model_type"] == "gemma3_text" else "hidden_act"
    fewer = shape["num_hidden_layers"] - 1
    found = {"rms_norm_eps": 3e-3, "num_hidden_layers": fewer, "intermediate_size": 48, act: "relu"}
    if shape.get("sliding_window"):
        found["sliding_window"] = 9
    if "num_experts_per_tok" in shape:
        found["num_experts_per_tok"] = 1
    if "no_rope_layers" in shape:
        found["no_rope_layers"] = [1, 1, 1]
    return found


def changed(values, key, value):
    """A config with another value; a model of fewer layers has fewer types of layers."""
    values = {**values, key: value}
    if key == "num_hidden_layers" and values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:value]
    return values


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ends_alone_have_the_facts_of_the_whole_target(family, tmp_path, tokenizer_folder):
    """In both directions, as an artifact has them too; and not those of a target that differs in one key."""
    shape = shape_of(family)
    folder = checkpoint(tmp_path, tokenizer_folder, shape, 0)
    part = without_layers(folder, tmp_path / "part")
    whole, ends = load_target(folder), load_target(part, layers=False)
    for one, other in ((ends.info, whole.info), (whole.info, ends.info)):
        one.check(other)
        TargetInfo.from_json(json.loads(json.dumps(one.to_json()))).check(other)
    assert (ends.info.max_positions, ends.info.eos_ids) == (whole.info.max_positions, whole.info.eos_ids)
    assert not ends.info.weights_hash and ends.info.known_weights
    pos_BT, ids_T = torch.tensor([[0, 5, 1000]]), torch.arange(9)
    assert all(map(torch.equal, ends.rope(pos_BT), whole.rope(pos_BT)))
    assert torch.equal(ends.embed(ids_T), whole.embed(ids_T))
    state_TE = torch.randn(9, whole.info.hidden_size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ends.final_norm(state_TE), whole.final_norm(state_TE))
    torch.testing.assert_close(ends.final_norm_weight, whole.final_norm_weight)
    values = json.loads((part / "config.json").read_text())
    for key, value in changes(shape).items():
        (part / "config.json").write_text(json.dumps(changed(values, key, value)))
        other = load_target(part, layers=False).info
        for one, against in ((other, whole.info), (whole.info, other)):
            with pytest.raises(TargetMismatchError, match="artifact was trained for"):
                one.check(against)


def test_rotary_tables_and_parts_of_heads_are_facts_of_the_ends(tmp_path, tokenizer_folder):
    cases = {
        "glm4": {"partial_rotary_factor": 0.25, "rope_type": "default", "rope_theta": 1e4},
        "gemma3_text": {
            "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
        },
    }
    for seed, (family, rope) in enumerate(cases.items()):
        folder = checkpoint(tmp_path, tokenizer_folder, shape_of(family), seed)
        part, whole = without_layers(folder, tmp_path / family), load_target(folder).info
        values = json.loads((part / "config.json").read_text())
        (part / "config.json").write_text(json.dumps({**values, "rope_parameters": rope}))
        with pytest.raises(TargetMismatchError, match=r"rope=|layers=layer 0"):
            load_target(part, layers=False).info.check(whole)


def test_a_window_of_the_whole_context_is_none_in_the_ends_too(tmp_path, tokenizer_folder):
    folder = checkpoint(tmp_path, tokenizer_folder, shape_of("mistral"), 0)
    part = without_layers(folder, tmp_path / "part")
    for most in (8, 9):
        whole, ends = (load_target(one, layers=one != part, max_positions=most) for one in (folder, part))
        ends.info.check(whole.info)
        assert bool(ends.info.layers) == (most == 9)


def test_a_text_model_that_lies_in_a_folder_with_others_has_its_own_facts(tmp_path, tokenizer_folder):
    """Gemma 3 of a folder that reads images too: a draft of its ends is one for the text model alone."""
    folder = checkpoint(tmp_path, tokenizer_folder, shape_of("gemma3_text"), 0)
    part = without_layers(folder, tmp_path / "part")
    text = json.loads((part / "config.json").read_text())
    (part / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    whole, ends = load_target(folder).info, load_target(part, layers=False).info
    ends.check(whole)
    assert ends.family == "gemma3_text" and ends.layers == whole.layers

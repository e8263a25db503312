"""Folders whose `config.json` holds values of the wrong kind: one line says which."""

from __future__ import annotations

import json

import pytest

from longtrain.artifact import Artifact
from longtrain.errors import ArtifactError
from longtrain.methods.eagle3.formats.read import read_folder

MISSING = object()
IDS = "eagle_aux_hidden_state_layer_ids"

OF_THE_LAYER = [
    ("eagle_config", "x", "a mapping"),
    ("rope_parameters", ["x"], "a mapping"),
    ("rope_scaling", "linear", "a mapping"),
    ("num_hidden_layers", "1", "a whole number, 1 or more"),
    ("sliding_window", "9", "a whole number, 0 or more"),
    ("max_position_embeddings", "128", "a whole number, 1 or more"),
    ("max_position_embeddings", -1, "a whole number, 1 or more"),
    ("rope_theta", "1e4", "a number, above 0"),
    ("rope_theta", 0, "a number, above 0"),
    ("rms_norm_eps", None, "a number, above 0"),
    ("hidden_size", -48, "a whole number, 1 or more"),
    ("hidden_size", True, "a whole number, 1 or more"),
    ("hidden_size", MISSING, "a whole number, 1 or more"),
    ("layer_types", 5, "a list, each text"),
    ("attention_bias", "false", "true or false"),
    ("mlp_bias", "false", "true or false"),
]
OF_THE_FOLDER = [
    ("draft_vocab_size", "40", "a whole number, 1 or more"),
    ("architectures", 5, "a list, each text"),
    ("norm_output", "false", "true or false"),
    ("norm_before_residual", "false", "true or false"),
    ("trained_by", ["eagle"], "text"),
    ("trained_by", "unsloth", "longtrain, speculators"),
    (IDS, "2", "a list, each a whole number, 1 or more"),
    (IDS, 2, "a list, each a whole number, 1 or more"),
    (IDS, [0, 3, 5], "a list, each a whole number, 1 or more"),
    (IDS, ["2", 3, 5], "a list, each a whole number, 1 or more"),
]
OF_SPECULATORS = [
    ("transformer_layer_config", MISSING, "a mapping"),
    ("transformer_layer_config", [], "a mapping"),
    ("speculators_config", "x", "a mapping"),
]


def refusals(path, config, mapping, faults):
    """The lines that loading ends with, for one fault of `mapping` (a part of `config`) after another."""
    for key, value, allowed in faults:
        before = dict(mapping)
        mapping[key] = value
        if value is MISSING:
            del mapping[key]
        (path / "config.json").write_text(json.dumps(config))
        mapping.clear()
        mapping |= before
        with pytest.raises(ArtifactError) as error:
            Artifact.load(path)
        shown = "nothing" if value is MISSING else json.dumps(value)
        yield str(error.value), f"{key}={shown}; allowed: {allowed}"


@pytest.mark.parametrize("form", ["speculators", "flat"])
def test_a_value_of_the_wrong_kind(export, form):
    folder = export(form)[0]
    config = folder.config
    layer = config.get("transformer_layer_config", config)
    faults = [(config, OF_THE_FOLDER), (layer, OF_THE_LAYER)]
    if form == "speculators":
        faults.append((config, OF_SPECULATORS))
        faults.append((config["speculators_config"], [("verifier", "name", "a mapping")]))
    for mapping, of_it in faults:
        for line, said in refusals(folder.path, config, mapping, of_it):
            assert line.startswith(f"{folder.path / 'config.json'}: ") and said in line and "\n" not in line


@pytest.mark.parametrize("size", [0, 1, 2])
def test_a_window_that_leaves_nothing_to_see_is_not_read_as_full_attention(export, size):
    folder = export("flat", window=9)[0]
    folder.write(config={**folder.config, "sliding_window": size})
    with pytest.raises(ArtifactError, match=r"sliding_window(=[12]; allowed: 3 or more| is missing)"):
        Artifact.load(folder.path)
    folder.write(config={**folder.config, "sliding_window": 3})
    assert read_folder(folder.path, None).config["window"] == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({IDS: [5, 3, 2], "eagle_config": None}, r"method.layers=\[4, 2, 1\]"),
        ({"fc_norm": True, "norm_before_fc": True}, "method.norm_before_fc=true"),
        ({"rope_parameters": {"rope_type": "linear"}, "rope_scaling": None}, "factor"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "rope_scaling": None},
            "type 'dynamic'",
        ),
        ({"num_key_value_heads": 3}, "3"),
        ({"head_dim": 9}, "heads have 9 dims; allowed: an even number"),
    ],
    ids=["descending layers", "two norms", "no factor", "dynamic rope", "heads", "odd heads"],
)
def test_a_draft_that_cannot_be_built_is_told_by_its_folder(export, change, said):
    folder = export("flat")[0]
    config = {**folder.config, **change}
    config["eagle_config"] = {**(config["eagle_config"] or {}), "norm_before_fc": config["norm_before_fc"]}
    folder.write(config=config)
    with pytest.raises(ArtifactError, match=said) as error:
        Artifact.load(folder.path)
    assert str(error.value).startswith(str(folder.path)) and "\n" not in str(error.value)

"""JSON files of a target folder that say something else than a model's: one sentence each."""

import json
import os
from types import SimpleNamespace

import pytest

from longtrain.errors import ArtifactError
from longtrain.targets.config_file import eos_ids_of, read_config
from longtrain.targets.shapes import SHAPES
from longtrain.targets.stored.files import weight_files

DEEP = "[" * 10**5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan; allowed: numbers below"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_parameters.rope_theta=inf"),
        ({"vocab_size": 10**30}, "vocab_size=an integer of 100 bits"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True; allowed: a whole number from 1 to 4096"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers=2147483648"),
        ({"hidden_size": -1}, "hidden_size=-1"),
        ({"head_dim": "x"}, "head_dim='x'"),
        ({"rope_parameters": []}, "not a config that transformers can read|no model"),
        ({"model_type": 5}, "not a config that transformers can read"),
    ],
)
def test_a_config_with_values_of_another_kind(tmp_path, change, message):
    (tmp_path / "config.json").write_text(json.dumps({**SHAPES["llama_micro"], **change}))
    with pytest.raises(ArtifactError, match=message) as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "5", "[]", "null", DEEP, "\xff"])
def test_files_that_are_no_json_object(tmp_path, content):
    config = SimpleNamespace(eos_token_id=1, vocab_size=9)
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_text(content, encoding="latin-1")
    reads = (read_config, lambda folder: eos_ids_of(config, folder), weight_files)
    for read in reads:
        with pytest.raises(ArtifactError, match=r"get the folder again|pass a target folder"):
            read(tmp_path)


def test_a_pipe_in_place_of_a_config_is_refused(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ArtifactError, match="not a regular file"):
        read_config(tmp_path)


@pytest.mark.parametrize("eos", ["x", True, -1, 1.5, [1, None], {}, 2**40])
def test_ends_that_are_no_token_ids(tmp_path, eos):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ArtifactError, match=r"generation_config\.json has eos_token_id="):
        eos_ids_of(SimpleNamespace(eos_token_id=1, vocab_size=9), tmp_path)


def test_ends_beyond_the_vocabulary_are_left_out_and_named(tmp_path, caplog):
    """The model cannot generate them, and a table over the vocabulary has no place for them."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 1, 12]}))
    assert eos_ids_of(SimpleNamespace(eos_token_id=1, vocab_size=9), tmp_path) == (1,)
    assert "end_ids_left_out=[9, 12] vocab_size=9" in caplog.text


@pytest.mark.parametrize(
    "names", [5, {}, {"a": 5}, {"a": "../model.safetensors"}, {"a": "/etc/passwd"}, ["a"]]
)
def test_an_index_that_names_no_files_of_the_folder(tmp_path, names):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ArtifactError, match="is not a weight index"):
        weight_files(tmp_path)

"""A folder that longtrain wrote for engines is loaded as it was exported, or not at all."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from longtrain.errors import ArtifactError
from longtrain.methods.eagle3.formats import FORMATS

HEAD = "lm_head.weight"


@pytest.mark.parametrize("form", ["speculators", "flat"])
def test_a_negated_head_is_not_loaded(export, form):
    path = export(form)[0].path
    FORMATS.read(path, None)
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, HEAD: -tensors[HEAD]}, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=r"model\.safetensors is not what was exported"):
        FORMATS.read(path, None)


@pytest.mark.parametrize("form", ["speculators", "flat"])
def test_an_edited_key_is_not_loaded(export, form):
    path = export(form)[0].path
    config = json.loads((path / "config.json").read_text())
    config["norm_before_residual"] = not config["norm_before_residual"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=r"config\.json has norm_before_residual=.*\(exported: "):
        FORMATS.read(path, None)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_no_floats_are_refused_of_anybody_s_folder(export, dtype):
    path = export("flat")[0].path
    for file in (path / "longtrain").iterdir():
        file.unlink()
    (path / "longtrain").rmdir()
    config = json.loads((path / "config.json").read_text())
    config["trained_by"] = "speculators"
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    FORMATS.read(path, None)
    save_file({**tensors, HEAD: tensors[HEAD].to(dtype)}, path / "model.safetensors")
    with pytest.raises(ArtifactError, match=rf"lm_head\.weight is {str(dtype)[6:]}, not bfloat16, float16"):
        FORMATS.read(path, None)

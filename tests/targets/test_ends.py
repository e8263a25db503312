"""A target without its layers has everything of the whole one but a forward."""

from __future__ import annotations

import pytest
import torch

from longtrain.errors import ArtifactError, ConfigError
from longtrain.targets.loading import load_target


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

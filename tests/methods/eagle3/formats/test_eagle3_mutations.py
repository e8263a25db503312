"""`verify` finds every fault that engines load without a word."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from longtrain.errors import ArtifactError
from longtrain.methods.eagle3.formats import FORMATS
from longtrain.methods.eagle3.formats.names import PREFIX

FORMS = ("speculators", "flat")
REPLAY = "relative distance"


def layer_keys(folder, form):
    config = folder.config
    return config, config["transformer_layer_config"] if form == "speculators" else config


def without_tensor(name):
    def change(folder, form):
        tensors = folder.tensors
        del tensors[name.replace("P.", PREFIX[form])]
        folder.write(tensors=tensors)

    return change


def changed_tensor(name, change_it):
    def change(folder, form):
        tensors, name_there = folder.tensors, name.replace("P.", PREFIX[form])
        tensors[name_there] = change_it(tensors[name_there])
        folder.write(tensors=tensors)

    return change


def without_key(key):
    def change(folder, form):
        config = folder.config
        del config[key]
        folder.write(config=config)

    return change


def shifted_layers(folder, form):
    """Both keys, so that they agree with each other."""
    config, layer = layer_keys(folder, form)
    config["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]
    layer["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]
    folder.write(config=config)


def one_layer_key(folder, form):
    config = folder.config
    config["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]
    folder.write(config=config)


def rope_base(folder, form):
    config, layer = layer_keys(folder, form)
    layer["rope_parameters"]["rope_theta"] = layer["rope_theta"] = 20000.0
    folder.write(config=config)


def no_window(folder, form):
    config, layer = layer_keys(folder, form)
    for key in ("sliding_window", "use_sliding_window", "layer_types"):
        del layer[key]
    folder.write(config=config)


def wider_window(folder, form):
    config, layer = layer_keys(folder, form)
    layer["sliding_window"] += 1
    folder.write(config=config)


def swapped_halves(tensor):
    return torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)


MUTATIONS = {
    "k_proj missing": (without_tensor("P.self_attn.k_proj.weight"), "missing self_attn.k_proj.weight"),
    "lm_head missing": (without_tensor("lm_head.weight"), "missing lm_head.weight"),
    "fc_norm missing": (without_tensor("fc_norm.1.weight"), "missing fc_norm.1.weight"),
    "d2t absent": (without_tensor("d2t"), "has no d2t"),
    "d2t rolled": (changed_tensor("d2t", lambda t: t.roll(1)), "d2t is no map|t2d does not mark"),
    "d2t absolute": (changed_tensor("d2t", lambda t: t + torch.arange(len(t))), "d2t is no map"),
    "norm_output absent": (without_key("norm_output"), REPLAY),
    "fc_norm key absent": (without_key("fc_norm"), "unexpected fc_norm.0.weight"),
    "rope base": (rope_base, REPLAY),
    "window dropped": (no_window, REPLAY),
    "window one wider": (wider_window, REPLAY),
    "halves of q swapped": (changed_tensor("P.self_attn.q_proj.weight", swapped_halves), REPLAY),
    "o_proj transposed": (changed_tensor("P.self_attn.o_proj.weight", lambda t: t.T), REPLAY),
    "down_proj zero": (changed_tensor("P.mlp.down_proj.weight", torch.zeros_like), "one number everywhere"),
    "not finite": (changed_tensor("fc.weight", lambda t: t / 0), "not finite"),
    "hidden_norm fresh": (changed_tensor("P.hidden_norm.weight", torch.ones_like), "as fresh .all ones."),
    "one layer key": (one_layer_key, "they must differ by one"),
}
"""What is changed, and what must be said of it when neither checksums nor keys tell."""


@pytest.mark.corners
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_found_though_checksums_and_keys_were_made_to_fit(export, form, name):
    folder, module, _ = export(form, window=9, fc_norm=True, norm_output=True, head_dim=12)
    assert module.self_attn.o_proj.weight.shape == (48, 48), "a transposed projection must have its shape"
    assert FORMATS.verify(folder.path, None, None)
    change, said = MUTATIONS[name]
    change(folder, form)
    with pytest.raises(
        ArtifactError, match=r"sha256 differs|exported|missing|lacks|has no|no map|differ by one|unexpected"
    ):
        FORMATS.verify(folder.path, None, None)
    folder.reseal(keys=True)
    with pytest.raises(ArtifactError, match=said) as error:
        FORMATS.verify(folder.path, None, None)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("form", FORMS)
def test_layer_ids_off_by_one_are_found_by_the_record(export, form):
    folder, _, _ = export(form)
    shifted_layers(folder, form)
    folder.reseal()
    with pytest.raises(
        ArtifactError, match=r"eagle_aux_hidden_state_layer_ids=\[2, 4, 5\] .exported: \[2, 3, 5\]"
    ):
        FORMATS.verify(folder.path, None, None)


def test_norm_before_residual_absent(export):
    """vLLM and the speculators class take opposite defaults; in a flat folder both engines take false."""
    folder, _, _ = export("speculators", norm_before_residual=True)
    without_key("norm_before_residual")(folder, "speculators")
    folder.reseal(keys=True)
    with pytest.raises(ArtifactError, match="norm_before_residual is missing: vLLM takes true"):
        FORMATS.verify(folder.path, None, None)
    folder, _, _ = export("flat")
    without_key("norm_before_residual")(folder, "flat")
    folder.reseal()
    with pytest.raises(ArtifactError, match="lacks norm_before_residual"):
        FORMATS.verify(folder.path, None, None)


def test_a_map_rolled_together_with_its_mask_is_found_by_the_golden_tokens(export):
    folder, _, _ = export("flat")
    tensors = folder.tensors
    ids = (tensors["d2t"] + torch.arange(40) + 1).clamp(max=96).unique()
    ids = torch.cat((torch.tensor([0]), ids))[:40]
    mask = torch.zeros(97, dtype=torch.bool)
    mask[ids] = True
    folder.write(tensors={**tensors, "d2t": ids - torch.arange(40), "t2d": mask})
    folder.reseal(keys=True)
    with pytest.raises(ArtifactError, match="of 16 drafted tokens are the recorded ones"):
        FORMATS.verify(folder.path, None, None)


def test_what_may_be_edited_is_no_fault_once_resealed(export):
    folder, _, _ = export("speculators")
    config = folder.config
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 7
    folder.write(config=config)
    folder.reseal()
    assert FORMATS.verify(folder.path, None, None)


def test_embeddings_of_another_target(export):
    changed = changed_tensor("embed_tokens.weight", lambda t: t.roll(1, 0))
    folder, _, _ = export("speculators")
    changed(folder, "speculators")
    folder.reseal()
    with pytest.raises(ArtifactError, match=r"embed_tokens.weight has other rows"):
        FORMATS.verify(folder.path, None, None)


@pytest.mark.parametrize("what", ["missing", "shape"])
def test_embeddings_that_are_missing_or_of_another_shape(export, target, what):
    folder, _, _ = export("speculators")
    tensors = folder.tensors
    embed_VE = tensors.pop("embed_tokens.weight")
    folder.write(tensors=tensors if what == "missing" else {**tensors, "embed_tokens.weight": embed_VE[:50]})
    folder.reseal()
    said = {
        "missing": "is missing, and a speculators",
        "shape": r"is torch.float32 \(50, 48\); allowed: floats \(97, 48\)",
    }
    for with_target in (None, target):
        with pytest.raises(ArtifactError, match=f"embed_tokens.weight {said[what]}"):
            FORMATS.verify(folder.path, with_target, None)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("states_TN", lambda t: t[:-1], "cannot be replayed"),
        ("logits_KRV", lambda t: t[..., :-1], "cannot be replayed"),
        ("mixed_KRHD", lambda t: t[:, :, 0], "cannot be replayed"),
        ("tokens_KR", lambda t: t.float() + 1, "0 of 16 drafted tokens"),
        ("ids_T", lambda t: t + 97, "cannot be replayed"),
        ("rows_T", None, "lacks rows_T"),
    ],
)
def test_damaged_golden_tensors(export, name, change, said):
    folder, _, _ = export("speculators")
    path = folder.path / "longtrain" / "golden.safetensors"
    golden = load_file(path)
    part = golden.pop(name)
    save_file(golden if change is None else {**golden, name: change(part).contiguous()}, path)
    folder.reseal()
    with pytest.raises(ArtifactError, match=said) as error:
        FORMATS.verify(folder.path, None, None)
    assert "\n" not in str(error.value)


def test_a_record_without_checksums_is_not_trusted(export):
    folder, _, _ = export("flat")
    path = folder.path / "longtrain" / "record.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "files": {}}))
    with pytest.raises(
        ArtifactError, match=r"no checksum of config.json, model.safetensors, longtrain/golden"
    ):
        FORMATS.verify(folder.path, None, None)

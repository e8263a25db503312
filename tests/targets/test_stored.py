"""Checkpoints as other people write them: transformers' own model is what they are compared with."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from longtrain.errors import ArtifactError, TargetMismatchError
from longtrain.targets.info import TargetInfo, rope_values
from longtrain.targets.loading import load_target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.step import OutputRequest, TokenBatch

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
IDS = torch.randint(0, 97, (1, 23), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def write(tmp_path, tokenizer_folder):
    """A folder of a small model, its tensors and config changed by the caller."""

    def made(change=None, *, family="llama_micro", file="model.safetensors", **values):
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tokenizer_folder, folder)
        torch.manual_seed(0)
        config = AutoConfig.for_model(**{**SHAPES[family], **values})
        tensors = {
            name: one.clone() for name, one in AutoModelForCausalLM.from_config(config).state_dict().items()
        }
        if config.tie_word_embeddings:
            del tensors[HEAD]
        tensors = change(tensors) if change else tensors
        if file.endswith(".bin"):
            torch.save(tensors, folder / file, _use_new_zipfile_serialization=False)
        else:
            save_file(tensors, folder / file, metadata={"format": "pt"})
        written = {
            **config.to_dict(),
            "architectures": [f"{type(config).__name__[:-6]}ForCausalLM"],
            **values,
        }
        (folder / "config.json").write_text(json.dumps(written))
        return folder

    return made


def same_logits(folder, **keys):
    """Logits of a folder here, and that they are those of transformers."""
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    stock.config.return_dict = True  # its own forward fails without
    target = load_target(folder, dtype="float64", **keys)
    with torch.no_grad():
        cache, pos_BT = target.new_cache(1, 32, 32), torch.arange(IDS.shape[1])[None]
        ours = target(TokenBatch(pos_BT, ids_BT=IDS), cache, outputs=OutputRequest("all")).logits_BTV
        theirs = stock(IDS).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    return target


def test_another_head_beside_tied_embeddings_is_kept(write):
    folder = write(lambda found: {**found, HEAD: found[EMBEDDINGS] * 2 + 1}, tie_word_embeddings=True)
    target = same_logits(folder)
    assert target.head_weight is not target.embed_weight
    ends = load_target(folder, dtype="float64", layers=False)
    assert torch.equal(ends.head_weight, target.head_weight)
    assert ends.info == target.info
    tied = same_logits(
        write(lambda found: {**found, HEAD: found[EMBEDDINGS].clone()}, tie_word_embeddings=True)
    )
    assert tied.head_weight is tied.embed_weight
    assert tied.info.weights_hash != target.info.weights_hash


def test_a_tied_checkpoint_may_store_the_head_alone(write):
    def moved(found):
        found[HEAD] = found.pop(EMBEDDINGS)
        return found

    same_logits(write(moved, tie_word_embeddings=True))


def test_a_checkpoint_of_the_body_alone_has_no_prefix(write):
    def bare(found):
        return {name.removeprefix("model."): one for name, one in found.items()}

    tied = same_logits(write(bare, tie_word_embeddings=True))
    assert tied.info == dataclasses.replace(
        load_target(write(tie_word_embeddings=True), dtype="float64").info, name=tied.info.name
    )
    with pytest.raises(ArtifactError, match=r"lacks 1 tensors, the first is lm_head\.weight"):
        load_target(write(lambda found: {k: v for k, v in bare(found).items() if k != HEAD}))


def test_old_files_of_torch_load_and_run_no_code(write):
    folder = write(file="pytorch_model.bin")
    assert not (folder / "pytorch_model.bin").read_bytes().startswith(b"PK")
    same_logits(folder)

    class Code:
        def __reduce__(self):
            return (open, (str(folder / "written"), "w"))

    torch.save({"x": Code()}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ArtifactError, match=r"pytorch_model\.bin is damaged"):
        load_target(folder)
    assert not (folder / "written").exists()
    for content, message in (
        ([torch.ones(1)], "holds a list"),
        ({"epoch": 3}, "holds 'epoch'"),
    ):
        torch.save(content, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
        with pytest.raises(ArtifactError, match=message):
            load_target(folder)


def test_a_changed_byte_of_a_bin_file_is_refused(write):
    """Torch reads such a file without a word; its archive's CRC says that the weights are others."""
    folder = write(file="model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    torch.save(tensors, file)
    same_logits(folder)
    content = bytearray(file.read_bytes())
    name, weight = next((name, one) for name, one in tensors.items() if one.numel() > 64)
    at = content.find(weight.contiguous().numpy().tobytes()[:64])
    assert at > 0, name
    content[at + 8] ^= 1
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"pytorch_model\.bin is damaged"):
        load_target(folder)


def test_two_bin_files_that_are_compared_are_each_opened_once(write, monkeypatch):
    folder = write(lambda found: {**found, HEAD: found[EMBEDDINGS].clone()}, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {name: f"{'ab'[name == HEAD]}.bin" for name in tensors}
    for file in set(index.values()):
        torch.save({name: one for name, one in tensors.items() if index[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    opened, load = [], torch.load
    monkeypatch.setattr("torch.load", lambda file, **keys: opened.append(file.name) or load(file, **keys))
    monkeypatch.setattr("longtrain.targets.stored.checkpoint._AT_ONCE", 48)  # many parts to compare
    target = load_target(folder)
    assert target.head_weight is target.embed_weight and sorted(opened) == ["a.bin", "b.bin"]


@pytest.mark.parametrize("layers", [True, False])
def test_a_tensor_that_the_model_has_not_is_an_error(write, layers):
    name = "model.layers.2.mlp.up_proj.weight"
    folder = write(lambda found: {**found, name: torch.ones(80, 48)})
    with pytest.raises(ArtifactError, match=rf"has {name}, which the model of config.json has not") as caught:
        load_target(folder, layers=layers)
    assert "\n" not in str(caught.value)
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    same_logits(write(lambda found: {**found, buffer: torch.ones(8)}))


def test_a_tensor_that_the_model_has_not_is_named_as_its_file_names_it(write):
    folder = write(lambda found: {f"text_model.{name}": one for name, one in found.items() if name != HEAD})
    with pytest.raises(ArtifactError, match=r"safetensors has text_model\.model\."):
        load_target(folder)


def test_weights_that_are_no_floats_are_refused(write):
    folder = write(lambda found: {**found, HEAD: found[HEAD].to(torch.int32)})
    with pytest.raises(ArtifactError, match=r"lm_head.weight is stored as int32 without a scale"):
        load_target(folder)


def test_a_window_of_the_context_is_one_where_the_context_is_longer(write):
    folder = write(family="mistral_micro", sliding_window=64, max_position_embeddings=64)
    short, long = (same_logits(folder, max_positions=most).info for most in (64, 65))
    assert (short.max_positions, short.layers, long.layer(1).window) == (64, (), 64)
    assert short.weights_hash == long.weights_hash
    with pytest.raises(TargetMismatchError, match=r"layers=layer 0: .*'window': 0"):
        short.check(long)


@pytest.mark.parametrize("key", ["return_dict", "output_hidden_states"])
def test_what_a_config_asks_of_outputs_changes_nothing(write, key):
    same_logits(write(**{key: key != "return_dict"}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads=3; allowed: a divisor of num_attention_heads=4",
        ),
        ({"head_dim": 15}, "head_dim=15; allowed: even numbers"),
    ],
)
def test_heads_that_no_attention_can_be_made_of(write, values, message):
    folder = write()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    with pytest.raises(ArtifactError, match=message):
        load_target(folder)


def test_identity_is_of_values_and_not_of_their_spelling(write):
    def info(**config):
        folder = write(lambda found: found, tie_word_embeddings=True)
        values = json.loads((folder / "config.json").read_text())
        values = {key: one for key, one in values.items() if key not in ("rope_parameters", "rope_theta")}
        (folder / "config.json").write_text(json.dumps({**values, **config}))
        return load_target(folder).info

    scaled = {"factor": 4.0, "original_max_position_embeddings": 512}
    groups = [
        [
            {"rope_theta": 10000},
            {"rope_theta": 10000.0},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            {"rope_theta": 1e4, "rope_scaling": None, "hidden_act": "swish"},
            {"rope_theta": 1e4, "rms_norm_eps": 9.999999974752427e-07},
        ],
        [
            {"rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 4}},
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        ],
        [
            {"rope_theta": 10000, "rope_scaling": {"rope_type": "yarn", **scaled}},
            {
                "rope_theta": 10000,
                "rope_scaling": {"type": "yarn", **scaled, "beta_fast": 32.0, "beta_slow": 1},
            },
        ],
        [{"rope_theta": 20000}],
        [{"rope_theta": 10000, "rms_norm_eps": 1e-5}],
    ]
    found = [[info(**config) for config in group] for group in groups]
    for group in found:
        for one in group:
            assert one.weights_hash == group[0].weights_hash
            group[0].check(one)
    assert len({group[0].weights_hash for group in found}) == len(groups)


def test_an_artifact_of_another_spelling_is_for_the_same_target(write):
    info = load_target(write(rope_theta=10000.0)).info
    before = TargetInfo.from_json({**info.to_json(), "rope": {"type": "default", "rope_theta": 10000}})
    before.check(info)
    other = TargetInfo.from_json({**info.to_json(), "rope": {"type": "default", "rope_theta": 10001}})
    with pytest.raises(TargetMismatchError, match="rope="):
        other.check(info)


def test_a_stored_copy_of_the_embeddings_is_the_same_target(write):
    tied = load_target(write(tie_word_embeddings=True)).info
    copied = load_target(write(lambda found: {**found, HEAD: found[EMBEDDINGS].clone()})).info
    assert tied.weights_hash == copied.weights_hash
    apart = load_target(write()).info
    assert apart.weights_hash != tied.weights_hash


def test_the_bundled_targets_identity_is_what_its_artifacts_recorded():
    hashed = load_target("tiny", layers=False).info.weights_hash
    assert hashed == "6e90a8b1e5f5cc578cb89d2acc5721e746d7daa82c06656de998fa4b42642cdd"


def test_rotary_values():
    llama3 = SHAPES["llama31_8b"]["rope_parameters"]
    assert rope_values(llama3) == dict(sorted(llama3.items()))
    assert rope_values({"rope_theta": 5, "type": "default", "factor": 2.0}) == {
        "rope_theta": 5.0,
        "rope_type": "default",
    }


def test_the_revision_of_the_hub_is_kept(write, tmp_path, monkeypatch):
    folder = write()
    assert load_target(folder).info.source == {}
    snapshot = tmp_path / "hub" / "snapshots" / "0123abcd"
    shutil.copytree(folder, snapshot)
    info = load_target(snapshot).info
    assert info.source == {"hub_revision": "0123abcd"}
    assert TargetInfo.from_json(json.loads(json.dumps(info.to_json()))) == info
    assert load_target(snapshot, weights="random").info.source == {}
    stamp = folder / ".cache" / "huggingface" / "download" / "config.json.metadata"
    stamp.parent.mkdir(parents=True)
    stamp.write_text("4567cdef\netag\n1700000000.0\n")
    assert load_target(folder).info.source == {"hub_revision": "4567cdef"}

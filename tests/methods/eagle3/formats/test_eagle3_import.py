"""Folders that other trainers wrote, read with their own conventions, and folders that do not say enough."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from longtrain.artifact import Artifact
from longtrain.errors import ArtifactError, ConfigError, TargetMismatchError
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.formats import FORMATS
from longtrain.methods.eagle3.formats.names import outside
from longtrain.methods.eagle3.formats.sglang import sglang_problems
from longtrain.methods.eagle3.spec import SPEC
from longtrain.targets.loading import random_target

FORMS = ("speculators", "flat")
FC_NORMS = ("fc_norm.0", "fc_norm.1", "fc_norm.2")
OLD_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")


def foreign(tmp_path, tensors, config, *, prefix="midlayer.", pickled=False):
    """A flat folder as others write it, from our module's tensors."""
    named = {outside(name, "flat").replace("midlayer.", prefix): tensor for name, tensor in tensors.items()}
    ids = named.pop("draft_ids_K")
    mask = torch.zeros(97, dtype=torch.bool)
    mask[ids] = True
    named |= {"d2t": ids - torch.arange(len(ids)), "t2d": mask}
    path = tmp_path / "foreign"
    path.mkdir()
    if pickled:
        torch.save(
            {**named, "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)}, path / "pytorch_model.bin"
        )
    else:
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def old(export):
    """A module, and the keys that EAGLE's own folders have."""
    _, module, _ = export("flat")
    keys = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 48}
    keys |= {"intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    keys |= {"num_hidden_layers": 1, "rms_norm_eps": 1e-6, "vocab_size": 97, "draft_vocab_size": 40}
    keys |= {"rope_theta": 10000.0, "max_position_embeddings": 128}
    return module.state_dict(), keys


@pytest.mark.corners
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "fields",
    [
        {"norm_output": True, "fc_norm": True, "window": 5, "depths": 4},
        {
            "norm_before_fc": True,
            "layers": [0, 3],
            "rope": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4},
        },
        {"draft_vocab_size": 0, "n_heads": 6, "n_kv_heads": 3, "head_dim": 8, "intermediate_size": 64},
    ],
    ids=["3.1", "gpt-oss", "shapes"],
)
def test_what_was_written_is_read(export, target, form, fields):
    folder, module, config = export(form, **fields)
    artifact = Artifact.load(folder.path)
    assert artifact.method == "eagle3" and artifact.folder == folder.path
    artifact.build(target)
    layer = folder.config.get("transformer_layer_config", folder.config)
    assert layer["num_aux_hidden_states"] == len(config.layers)
    back, mine = artifact.typed_config(), vars(config)
    same = ("layers", "draft_vocab_size", "fc_norm", "norm_output", "norm_before_fc", "window")
    assert {key: getattr(back, key) for key in same} == {key: mine[key] for key in same}
    assert back.rope == {"rope_type": "default", **(config.rope or target.info.rope)}
    for name, tensor in module.state_dict().items():
        assert torch.equal(artifact.tensors[name], tensor), name


@pytest.mark.parametrize(
    "fields", [{"attention_bias": True}, {"qk_norm": True}, {"norm_before_residual": True}]
)
def test_what_only_vllm_serves(export, fields):
    folder, module, _ = export("speculators", **fields)
    back = Artifact.load(folder.path)
    assert all(getattr(back.typed_config(), key) for key in fields)
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in module.state_dict().items())
    key = next(iter(fields))
    with pytest.raises(
        ConfigError, match=f"drop method.{key}=true silently; use format=speculators and vLLM"
    ):
        export("flat", **fields)


def test_norm_output_says_the_same_to_engines_and_to_specforge(export):
    """False is a head without a norm to SpecForge's class; missing, both feed back what is not normed."""
    assert "norm_output" not in export("flat")[0].config
    assert export("flat", norm_output=True)[0].config["norm_output"] is True
    assert export("speculators")[0].config["norm_output"] is False


@pytest.mark.parametrize("form", FORMS)
def test_heads_that_do_not_divide_the_hidden_size(export, target, form):
    words = r"method.n_heads=5 does not divide the hidden size of target .*, 48, and no engine loads"
    with pytest.raises(ConfigError, match=words):
        export(form, n_heads=5, n_kv_heads=5, head_dim=8)
    config = Config(layers=[1, 2, 4], n_heads=5, n_kv_heads=5, head_dim=8)
    with pytest.raises(ConfigError, match=words):  # before it is trained
        SPEC.check_target(config, target.info)


@pytest.mark.parametrize("form", FORMS)
def test_no_engine_keeps_sinks(export, form):
    with pytest.raises(ConfigError, match=r"method.sinks=4.*serve it with longtrain"):
        export(form, window=16, sinks=4)


def test_sglang_never_captures_the_last_layer(export):
    export("speculators", layers=[1, 2, 5])
    with pytest.raises(ConfigError, match=r"method.layers reads it \(5 of 0..5\); use format=speculators"):
        export("flat", layers=[1, 2, 5])


def test_a_server_drafts_no_more_than_was_trained(export):
    folder = export("speculators", depths=2)[0]
    methods = folder.config["speculators_config"]["proposal_methods"]
    assert methods[0]["speculative_tokens"] == 2
    assert '"num_speculative_tokens": 2' in (folder.path / "README.md").read_text()


@pytest.mark.parametrize("form", FORMS)
def test_keys_that_engines_need(export, form):
    folder = export(form, window=9)[0]
    config = folder.config
    layer = config["transformer_layer_config"] if form == "speculators" else config
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert layer["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert layer["num_aux_hidden_states"] == 3
    assert layer["sliding_window"] == 10 and layer["use_sliding_window"] is True
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] and "rope_scaling" in layer
    assert config["norm_before_residual"] is False and "target_hidden_size" not in config
    assert config["trained_max_tokens"] == 128 and layer["max_position_embeddings"] == 512
    assert config["trained_by"] == "longtrain" and layer["tie_word_embeddings"] is False
    sglang = "--speculative-num-draft-tokens 5 \\\n  --speculative-draft-window-size 10\n"
    assert (sglang in (folder.path / "README.md").read_text()) == (form == "flat")


@pytest.mark.parametrize(
    ("change", "prefix", "pickled"),
    [({}, "midlayer.", True), ({"model_type": "llama"}, "layers.0.", False), ({}, "model.midlayer.", False)],
    ids=["EAGLE's pickle", "ModelOpt's prefix", "within a model"],
)
def test_others_folders(old, target, tmp_path, change, prefix, pickled):
    tensors, keys = old
    path = foreign(tmp_path, tensors, keys | change, prefix=prefix, pickled=pickled)
    artifact = Artifact.load(path)
    assert all(torch.equal(artifact.tensors[name], tensor) for name, tensor in tensors.items())
    assert artifact.typed_config().layers is None and not artifact.typed_config().norm_before_residual
    with pytest.raises(TargetMismatchError, match="for a target of 8 layers or more"):
        artifact.build(target)
    assert FORMATS.verify(path, None, None) == [
        f"tensors={len(tensors)} format=flat",
        "SGLang's rules of loading hold",
    ]


@pytest.mark.parametrize(
    ("field", "says", "names", "size"),
    [
        ("fc_norm", {"use_aux_norm": True}, dict(zip(FC_NORMS, OLD_NORMS, strict=True)), 48),
        ("norm_before_fc", {"norm_before_fc": True}, {"input_norm": "input_norm"}, 3 * 48),
        (
            "qk_norm",
            {"architectures": ["Eagle3Qwen3ForCausalLM"]},
            {f"self_attn.{x}_norm": f"midlayer.self_attn.{x}_norm" for x in "qk"},
            16,
        ),
    ],
    ids=["SGLang's old names", "no eagle_config", "Qwen3 by its architecture"],
)
def test_norms_that_others_name_elsewhere(old, tmp_path, field, says, names, size):
    tensors, keys = old
    norms = {f"{outer}.weight": torch.full((size,), 1.5 + i) for i, outer in enumerate(names.values())}
    artifact = Artifact.load(foreign(tmp_path, tensors | norms, keys | says))
    assert getattr(artifact.typed_config(), field)
    assert [artifact.tensors[f"{name}.weight"][0] for name in names] == [1.5, 2.5, 3.5][: len(names)]


def test_a_window_that_engines_read_differently(old, tmp_path):
    tensors, keys = old
    path = foreign(tmp_path, tensors, keys | {"use_sliding_window": True, "sliding_window": 9})
    with pytest.raises(ArtifactError, match="sliding_window=9 without layer_types: engines differ"):
        Artifact.load(path)


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "Eagle3Qwen3ForCausalLM",
        "LlamaEagle3ForCausalLM",
    ],
)
def test_a_flat_folder_is_known_by_its_architecture_alone(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    assert FORMATS.reads(tmp_path)


def test_a_pickle_that_would_run_code_is_refused(old, tmp_path):
    import os

    tensors, keys = old
    path = foreign(tmp_path, tensors, keys, pickled=True)

    class Attack:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "owned"),))

    torch.save({"fc.weight": Attack()}, path / "pytorch_model.bin")
    with pytest.raises(ArtifactError, match=r"pytorch_model.bin is missing or damaged"):
        Artifact.load(path)
    assert not (tmp_path / "owned").exists()


def test_layer_ids_that_engines_read_differently(old, tmp_path):
    tensors, keys = old
    keys |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}
    path = foreign(tmp_path, tensors, keys)
    with pytest.raises(
        ArtifactError, match=r"SGLang reads them as outputs of layers, vLLM as inputs; .*trained_by="
    ):
        Artifact.load(path)
    assert Artifact.load(path, trained_by="modelopt").typed_config().layers == [1, 2, 4]
    with pytest.raises(
        ConfigError, match=r"trained_by=unsloth is no trainer that is known; allowed: longtrain, "
    ):
        Artifact.load(path, trained_by="unsloth")


def test_specforge_never_fed_the_normed_state_back(old, tmp_path):
    tensors, keys = old
    path = foreign(
        tmp_path, tensors, keys | {"norm_output": True, "eagle_aux_hidden_state_layer_ids": [2, 3, 5]}
    )
    assert Artifact.load(path).typed_config().norm_output
    assert not Artifact.load(path, trained_by="specforge").typed_config().norm_output
    (path / "config.json").write_text(json.dumps(keys | {"norm_output": False}))
    with pytest.raises(ArtifactError, match="trains without a norm before the head"):
        Artifact.load(path, trained_by="specforge")


def test_another_target(export, target):
    folder, _, _ = export("flat")
    with pytest.raises(TargetMismatchError, match=r"a target with hidden size 48, .* has 64"):
        Artifact.load(folder.path).build(random_target({**shape_of(target), "hidden_size": 64}))
    with pytest.raises(TargetMismatchError, match=r"a vocabulary of 97, .* has 101"):
        Artifact.load(folder.path).build(random_target({**shape_of(target), "vocab_size": 101}))
    few = {**shape_of(target), "num_hidden_layers": 3}
    with pytest.raises(TargetMismatchError, match=r"of 5 layers or more, .* has 3"):
        Artifact.load(folder.path).build(random_target(few))


def test_a_vocabulary_without_an_end_of_texts(export, target, caplog):
    folder, _, _ = export("flat")
    other = random_target({**shape_of(target), "eos_token_id": [0, 1]})
    artifact = Artifact.load(folder.path)
    known = {*artifact.tensors["draft_ids_K"].tolist()}
    assert 0 not in known and 1 in known, "one of the two is missing"
    artifact.attach(other)
    assert "lacks token 0, which ends texts of" in caplog.text
    with pytest.raises(TargetMismatchError, match="lacks token 0, which ends texts of"):
        FORMATS.write("flat", artifact.tensors, artifact.typed_config(), other, {}, "draft")
    with pytest.raises(ArtifactError, match="lacks token 0, which ends texts of"):
        FORMATS.verify(folder.path, other, None)


def shape_of(target):
    from longtrain.targets.shapes import SHAPES

    return {
        **SHAPES["llama_micro"],
        "num_hidden_layers": target.info.n_layers,
        "max_position_embeddings": 512,
    }


def test_sglang_s_rules(export):
    folder, _, _ = export("flat", fc_norm=True, norm_output=True)
    config, names = folder.config, list(folder.tensors)
    assert sglang_problems(config, names) == []
    assert sglang_problems(config, [*names, "midlayer.self_attn.q_proj.bias"]) == [
        "SGLang drops midlayer.self_attn.q_proj.bias silently"
    ]
    ids = ("num_aux_hidden_states", "eagle_config", "eagle_aux_hidden_state_layer_ids")
    assert sglang_problems({key: config[key] for key in config if key not in ids}, names) == []
    fewer = [name for name in names if name != "midlayer.mlp.up_proj.weight"]
    assert sglang_problems(config, fewer) == ["SGLang leaves up_proj unset: no tensor has it"]
    assert sglang_problems({**config, "norm_before_residual": True}, names) == [
        "SGLang ignores norm_before_residual=true"
    ]
    assert "null" in sglang_problems({**config, "target_hidden_size": None}, names)[0]

"""Folders with block drafts: every key that engines need, reading back, and what no engine would run."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from longtrain.artifact import Artifact
from longtrain.errors import ArtifactError, ConfigError, TargetMismatchError
from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.formats import FORMATS
from longtrain.targets.loading import random_target

FORMS = ("speculators", "flat")
DFLASH = {"heads": "none", "sample_from_anchor": False}
PART = {"draft_vocab_size": 40, "objective": "lk_hybrid"}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}
VARIANTS = {
    "dspark": {},
    "without confidence, fill in": {"heads": "markov", "sample_from_anchor": False},
    "dflash": DFLASH,
    "windows": {"windows": [9, None]},
    "shapes": {"n_heads": 6, "n_kv_heads": 3, "head_dim": 8, "intermediate_size": 64, "rope": LINEAR},
}


DFLASH2 = {"heads": "selector", "sample_from_anchor": False, "conv_taps": 2, "selector_top": 9}
PARTS = {
    "part of the vocabulary": PART,
    "part, fill in": {**PART, "heads": "markov", "sample_from_anchor": False},
    "part, dflash": {**PART, **DFLASH},
}
"""Drafts with a vocabulary of their own, which one format has."""


@pytest.mark.parametrize(
    ("form", "name"),
    [
        *((form, name) for form in FORMS for name in VARIANTS),
        *(("speculators", name) for name in PARTS),
        ("flat", "dflash2"),
    ],
)
def test_what_was_written_is_read(export, target, form, name):
    folder, module, config = export(form, **(VARIANTS | PARTS | {"dflash2": DFLASH2})[name])
    assert FORMATS.verify(folder.path, None, None)
    artifact = Artifact.load(folder.path)
    assert artifact.method == "dspark"
    artifact.build(target)
    back = artifact.typed_config()
    same = ("layers", "n_layers", "block_size", "windows", "heads", "sample_from_anchor", "mask_token")
    same += ("draft_vocab_size", "objective", "markov_rank", "selector_top", "conv_taps", "conv_group")
    same = tuple(key for key in same if key != "markov_rank" or config.heads != "none")
    assert {key: getattr(back, key) for key in same} == {key: getattr(config, key) for key in same}
    assert back.rope == {"rope_type": "default", **(config.rope or target.info.rope)}
    state = module.state_dict()
    assert set(artifact.tensors) == set(state)
    assert all(torch.equal(artifact.tensors[key], tensor) for key, tensor in state.items())


@pytest.mark.parametrize("form", FORMS)
def test_factors_on_channels_are_written_into_fc(export, form):
    """Engines read no factors: the folder, its record included, is that of the same draft without them."""
    folder, module, _ = export(form, level_inputs=True, dtype=torch.bfloat16)
    assert FORMATS.verify(folder.path, None, None)
    artifact = Artifact.load(folder.path)
    state, factor_N = module.state_dict(), module.factor_N
    assert not artifact.typed_config().level_inputs and set(artifact.tensors) == {*state} - {"factor_N"}
    written = (module.fc.weight.double() * factor_N.double()).bfloat16()
    assert torch.equal(artifact.tensors["fc.weight"], written) and factor_N.unique().numel() > 1


def test_keys_of_a_flat_folder(export):
    folder = export("flat", windows=[9, None])[0]
    config = folder.config
    assert config["architectures"] == ["Qwen3DSparkModel"] and config["model_type"] == "qwen3"
    assert config["target_layer_ids"] == config["dflash_config"]["target_layer_ids"] == [1, 3]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4] and config["num_target_layers"] == 6
    assert config["block_size"] == config["dflash_config"]["block_size"] == 5
    assert config["mask_token_id"] == config["dflash_config"]["mask_token_id"] == 7
    assert config["sample_from_anchor"] is True and config["is_causal"] is False
    assert config["dflash_config"]["causal"] is False
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert config["sliding_window"] == 10 and config["use_sliding_window"] is True
    assert (config["markov_rank"], config["markov_head_type"]) == (6, "vanilla")
    assert config["enable_confidence_head"] is True and config["confidence_head_with_markov"] is True
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert config["trained_max_tokens"] == 128 and config["max_position_embeddings"] == 512
    assert "embed_tokens.weight" not in folder.tensors and "mask_id" not in folder.tensors
    assert "--speculative-num-draft-tokens 6" in (folder.path / "README.md").read_text()
    assert '"method": "dspark"' in (folder.path / "README.md").read_text()


def test_keys_of_a_dflash2_folder(export):
    folder = export("flat", **DFLASH2, windows=[9, 9])[0]
    config, tensors = folder.config, folder.tensors
    assert config["architectures"] == ["DFlash2DraftModel"] and config["sample_from_anchor"] is False
    assert config["is_causal"] is False and config["dflash_config"]["causal"] is False
    own = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 6, "selector_top_k": 9}
    assert {key: config["dflash_config"][key] for key in own} == own and "markov_rank" not in config
    assert config["dflash_config"]["block_size"] == 6, "it counts the anchor"
    convs = [f"layers.{i}.{part}_conv" for i in (0, 1) for part in ("attention", "mlp")]
    names = {f"{conv}.{name}" for conv in convs for name in ("base_kernel", "kernel_projection.weight")}
    selector = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    names |= {f"candidate_selector.{name}" for name in selector}
    assert {name for name in tensors if "conv" in name or "selector" in name} == names
    assert tensors[f"{convs[0]}.base_kernel"].shape == (2, 2, 48)
    assert tensors[f"{convs[0]}.kernel_projection.weight"].shape == (2 * 2 * 48 // 16, 48)
    assert tensors["candidate_selector.successor_codebook"].shape == (97, 6)
    card = (folder.path / "README.md").read_text()
    assert "--speculative-algorithm DFLASH " in card and '"method": "dflash"' in card


def test_a_dflash2_draft_of_speculators(export):
    """Its keys stand beside the others; the rows of a block see all of it where no key says so."""
    folder, module, _ = export("flat", **DFLASH2, windows=[9, 9])
    tensors, keys = folder.tensors, folder.config["dflash_config"]
    other = export("speculators", **DFLASH)[0]
    config = {**other.config, "speculators_model_type": "dflash2", "block_size": 6}
    config |= {key: keys[key] for key in ("conv_kernel_size", "conv_group_size")}
    config |= {key: keys[key] for key in ("selector_rank", "selector_top_k")}
    layer = {**config["transformer_layer_config"], "layer_types": ["sliding_attention"] * 2}
    layer = {**layer, "sliding_window": 9, "is_causal": None}
    gone = ("trained_by", "longtrain", "sliding_window_non_causal")
    config = {key: value for key, value in config.items() if key not in gone}
    for file in (other.path / "longtrain").iterdir():
        file.unlink()
    (other.path / "longtrain").rmdir()
    other.write(tensors=tensors, config={**config, "transformer_layer_config": layer})
    artifact = Artifact.load(other.path)
    found = artifact.typed_config()
    assert (found.heads, found.conv_taps, found.conv_group, found.selector_top) == ("selector", 2, 16, 9)
    assert (found.block_size, found.markov_rank, found.windows) == (5, 6, [9, 9])
    assert all(torch.equal(artifact.tensors[key], part) for key, part in module.state_dict().items())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "fields",
    [
        {"heads": "selector", "sample_from_anchor": False},
        {"conv_taps": 2},
        {"conv_taps": 2, **DFLASH},
        {**DFLASH2, "sample_from_anchor": True},
    ],
)
def test_options_that_no_engine_has_together(export, form, fields):
    with pytest.raises(ConfigError, match=r"in DFlash2 alone.*serve it with longtrain") as error:
        export(form, **fields)
    assert "\n" not in str(error.value)


def test_dflash2_in_the_format_that_no_engine_reads(export):
    with pytest.raises(ConfigError, match=r"not checked in vLLM for DFlash2.*format=flat"):
        export("speculators", **DFLASH2)


def test_keys_of_a_speculators_folder(export):
    config = export("speculators", windows=[9, None])[0].config
    layer = config["transformer_layer_config"]
    assert config["speculators_model_type"] == "dspark" and config["aux_hidden_state_layer_ids"] == [2, 4]
    assert config["block_size"] == 5 and config["sample_from_anchor"] is True
    assert config["draft_vocab_size"] == layer["vocab_size"] == 97
    assert config["sliding_window_non_causal"] is True and layer["is_causal"] is False
    assert layer["sliding_window"] == 9, "its class does not count the slot itself"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5


def test_a_vocabulary_of_the_drafts_own(export):
    """The map holds each token minus its place; its head goes along, and embeddings stay the target's."""
    folder, module, _ = export("speculators", **PART)
    tensors = folder.tensors
    assert folder.config["draft_vocab_size"] == 40
    assert folder.config["transformer_layer_config"]["vocab_size"] == 97
    ids = module.draft_ids_K
    assert ids is not None and torch.equal(tensors["d2t"] + torch.arange(40), ids)
    assert tensors["t2d"].dtype == torch.bool and tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    assert torch.equal(tensors["lm_head.weight"], module.lm_head.weight)
    assert tensors["markov_head.markov_w1.weight"].shape == (97, 6)
    assert tensors["markov_head.markov_w2.weight"].shape == (40, 6)
    assert not {"draft_ids_K", "embed_tokens.weight"} & set(tensors)
    whole = export("speculators")[0]
    assert not {"d2t", "t2d", "lm_head.weight"} & set(whole.tensors)


def test_vocabularies_that_engines_do_not_draft_from(export, target):
    with pytest.raises(ConfigError, match=r"format=flat: SGLang has no LM head of the draft's own.*=40\)"):
        export("flat", **PART)
    with pytest.raises(ConfigError, match="draft_vocab_size=97 is no part of 97; train with fewer"):
        FORMATS.refuse("speculators", Config(**{**PART, "draft_vocab_size": 97}), target.info)
    FORMATS.refuse("speculators", Config(**PART), None)
    _, module, config = export("speculators", **PART)
    ids = module.draft_ids_K
    endless = {**module.state_dict(), "draft_ids_K": ids + (ids == 1)}
    with pytest.raises(TargetMismatchError, match="lacks token 1, which ends texts"):
        FORMATS.write("speculators", endless, config, target, {}, "x")


def test_a_block_counts_its_anchor_where_the_format_does(export):
    """Speculators and DFlash count rows, a flat DSpark folder the tokens that are drafted."""
    config = export("speculators", sample_from_anchor=False)[0].config
    assert config["block_size"] == 6
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert export("flat", sample_from_anchor=False)[0].config["block_size"] == 5
    for form in FORMS:
        folder = export(form, **DFLASH)[0]
        assert folder.config["block_size"] == 6 and "markov_rank" not in folder.config
        assert '"method": "dflash"' in (folder.path / "README.md").read_text()
    assert "--speculative-algorithm DFLASH" in (folder.path / "README.md").read_text()


@pytest.mark.parametrize("form", FORMS)
def test_what_engines_cannot_run_is_refused(export, form):
    with pytest.raises(ConfigError, match="anchor predicts nothing"):
        export(form, heads="none")
    with pytest.raises(ConfigError, match="target_kv"):
        export(form, windows=[12, None], target_kv=True)
    with pytest.raises(ConfigError, match=r"method.windows has \[8, 9\]"):
        export(form, windows=[8, 9])
    least = {"flat": 11, "speculators": 12}[form]
    with pytest.raises(
        ConfigError, match=f"windows=10 would hide parts of a block of 12; train with {least}"
    ):
        export(form, windows=[10, None], block_size=12)
    assert export(form, windows=[least, None], block_size=12)


@pytest.mark.parametrize("form", FORMS)
def test_another_target(export, form):
    artifact = Artifact.load(export(form)[0].path)
    with pytest.raises(TargetMismatchError, match="of 5 layers or more"):
        artifact.build(random_target("qwen2_micro", seed=0))


@pytest.mark.parametrize("form", FORMS)
def test_a_changed_folder_is_not_loaded(export, form):
    folder = export(form)[0]
    tensors = folder.tensors
    save_file({**tensors, "norm.weight": -tensors["norm.weight"]}, folder.path / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"model\.safetensors is not what was exported"):
        FORMATS.read(folder.path, None)
    folder.write(tensors=tensors, config={**folder.config, "block_size": 6})
    with pytest.raises(ArtifactError, match=r"block_size"):
        FORMATS.read(folder.path, None)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("architectures", [["Qwen3DSparkModel"]], "no DSpark or DFlash draft"), ("head_dim", 9, "even number")],
)
def test_keys_that_describe_no_draft(export, key, value, said):
    folder = export("flat")[0]
    folder.write(config={**folder.config, key: value})
    with pytest.raises(ArtifactError, match=said):
        FORMATS.verify(folder.path, None, None)


def test_a_draft_of_deepspec(foreign, target):
    """Its folders have no key for the layout: they are anchor-first, and bring copies of the target's own."""
    missing = dict.fromkeys(
        ("sample_from_anchor", "is_causal", "dflash_config", "eagle_aux_hidden_state_layer_ids")
    )
    path, module = foreign("flat", missing)
    with pytest.raises(ArtifactError, match=r"sample_from_anchor is missing.*trained_by=deepspec"):
        Artifact.load(path)
    copies = {"embed_tokens.weight": target.embed_weight, "lm_head.weight": target.head_weight}
    tensors = {**load_file(path / "model.safetensors"), **copies}
    save_file({name: part.detach().clone() for name, part in tensors.items()}, path / "model.safetensors")
    artifact = Artifact.load(path, trained_by="deepspec")
    assert artifact.typed_config().sample_from_anchor and artifact.typed_config().layers == [1, 3]
    assert all(torch.equal(artifact.tensors[key], part) for key, part in module.state_dict().items())
    assert FORMATS.verify(path, None, "deepspec")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0)
    save_file({name: part.detach().clone() for name, part in tensors.items()}, path / "model.safetensors")
    with pytest.raises(ArtifactError, match=r"lm_head.weight is no copy of the target's"):
        FORMATS.verify(path, target, "deepspec")


def test_a_draft_of_speculators_with_part_of_the_vocabulary(foreign, target):
    """Its LM head is a copy of the target's rows, which its trainer does not change."""
    with pytest.raises(ArtifactError, match="sample_from_anchor is missing"):
        Artifact.load(foreign("speculators", {"sample_from_anchor": None}, **PART)[0])
    path, module = foreign("speculators", {}, **PART)
    tensors = load_file(path / "model.safetensors")
    rows = target.head_weight[module.draft_ids_K].detach().clone()
    save_file({**tensors, "lm_head.weight": rows}, path / "model.safetensors")
    artifact = Artifact.load(path)
    assert torch.equal(artifact.tensors["lm_head.weight"], rows)
    assert torch.equal(artifact.tensors["draft_ids_K"], module.draft_ids_K)
    assert artifact.typed_config().objective == "lk_hybrid"
    assert artifact.build(target).lm_head.weight.shape == rows.shape
    assert any(
        "over 40 tokens, which SGLang does not have" in line for line in FORMATS.verify(path, None, None)
    )


def test_a_flat_draft_with_part_of_the_vocabulary(foreign):
    """Its keys are vLLM's; longtrain writes none, since SGLang cannot read them."""
    parts = load_file(foreign("speculators", {}, **PART)[0] / "model.safetensors")
    path, _ = foreign("flat", {"draft_vocab_size": 40})
    save_file(parts, path / "model.safetensors")
    artifact = Artifact.load(path)
    assert artifact.typed_config().draft_vocab_size == 40
    assert torch.equal(artifact.tensors["draft_ids_K"] - torch.arange(40), parts["d2t"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"d2t": None}, "has no d2t, and its draft knows 40 of 97 tokens"),
        ({"d2t": lambda t: t.flip(0)}, r"d2t is no map of offsets.*not in ascending order"),
        ({"d2t": lambda t: t + torch.arange(40)}, "d2t is no map of offsets"),
        ({"d2t": lambda t: t + 97}, "d2t is no map of offsets: it gives tokens"),
        ({"d2t": lambda t: t[:-1]}, r"d2t is torch.int64 \(39,\); allowed: int64 \(40,\)"),
        ({"d2t": lambda t: t.float()}, r"d2t is torch.float32 \(40,\); allowed"),
        ({"t2d": lambda t: ~t}, "t2d does not mark the tokens that d2t names"),
        ({"lm_head.weight": None}, r"missing lm_head.weight \(40, 48\)"),
        ({"lm_head.weight": lambda t: t[:-1]}, r"lm_head.weight is \(39, 48\), not \(40, 48\)"),
        ({"markov_head.markov_w1.weight": lambda t: t[:40]}, r"markov_w1.weight is \(40, 6\), not \(97, 6\)"),
    ],
)
def test_maps_of_a_vocabulary_that_are_damaged(foreign, changes, said):
    path, _ = foreign("speculators", {}, **PART)
    tensors = load_file(path / "model.safetensors")
    for name, becomes in changes.items():
        tensors[name] = None if becomes is None else becomes(tensors[name]).contiguous()
    save_file({name: part for name, part in tensors.items() if part is not None}, path / "model.safetensors")
    with pytest.raises(ArtifactError, match=said) as error:
        Artifact.load(path)
    assert "\n" not in str(error.value)


def test_a_vocabulary_larger_than_the_targets(foreign):
    path, _ = foreign("speculators", {"draft_vocab_size": 98})
    with pytest.raises(ArtifactError, match="draft_vocab_size=98; allowed: 1 to 97, the target's tokens"):
        Artifact.load(path)


def test_a_published_dflash_draft(foreign):
    """Layers and mask token stand in dflash_config alone; the block counts its anchor."""
    gone = (
        "target_layer_ids",
        "mask_token_id",
        "sample_from_anchor",
        "is_causal",
        "dflash_config.block_size",
    )
    gone += ("eagle_aux_hidden_state_layer_ids", "dflash_config.causal", "layer_types")
    path, _ = foreign("flat", dict.fromkeys(gone), **DFLASH)
    config = Artifact.load(path).typed_config()
    assert (config.block_size, config.rows, config.heads) == (5, 6, "none")
    assert config.layers == [1, 3] and config.mask_token == 7 and config.windows is None


def test_where_no_key_names_it_there_is_no_confidence_head(foreign):
    gone = dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"))
    path, _ = foreign("flat", {**gone, "architectures": ["DSparkDraftModel"]}, heads="markov")
    assert Artifact.load(path).typed_config().heads == "markov"


def test_the_layout_in_dflash_config_is_the_one_that_engines_read(foreign):
    path, _ = foreign("flat", {"dflash_config.sample_from_anchor": True}, **DFLASH)
    with pytest.raises(ArtifactError, match="sample_from_anchor=true; allowed: false"):
        Artifact.load(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"dflash_config.mask_token_id": 8}, r"mask_token_id=7, and 8 in dflash_config; make them equal"),
        ({"mask_token_id": None, "dflash_config.mask_token_id": None}, "mask_token_id=nothing"),
        ({"mask_token_id": 97, "dflash_config.mask_token_id": 97}, r"mask_token_id=97; allowed: 0 to 96"),
        ({"markov_head_type": "gated"}, 'markov_head_type="gated"; allowed: vanilla'),
        ({"confidence_head_with_markov": None}, "confidence_head_with_markov=nothing; allowed: true"),
        ({"output_multiplier": 2.0}, r"output_multiplier=2\.0; allowed: 1"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style=false; allowed: true"),
        ({"dflash_config.attention_sink_bias": True}, "attention_sink_bias=true; allowed: false"),
        ({"rope_parameters.partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5; allowed: 1"),
        ({"rope_parameters.mrope_section": [2, 3, 3]}, "mrope_section"),
        ({"is_causal": True}, "rows of a block see only those before them"),
        ({"dflash_config.conv_kernel_size": 2}, "conv_kernel_size=2; allowed: 0, or no such key"),
        ({"selector_rank": 4}, "selector_rank=4; allowed: 0, or no such key"),
        ({"architectures": ["DFlash2DraftModel"]}, "sample_from_anchor=true; allowed: false"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"block_size": "5"}, "block_size"),
        ({"trained_by": "unsloth"}, "trained_by"),
    ],
)
def test_what_longtrain_does_not_compute_is_told(foreign, changes, said):
    path, _ = foreign("flat", changes)
    with pytest.raises(ArtifactError, match=said) as error:
        Artifact.load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dflash_config.conv_group_size": None}, "conv_group_size=nothing; allowed: a whole number"),
        ({"dflash_config.selector_top_k": 0}, "selector_top_k=0"),
        ({"dflash_config.selector_top_k": 98}, "selector_top_k=98; allowed: 1 to 97, the target's"),
        ({"dflash_config.conv_group_size": 7}, "method.conv_group=7 channels"),
        ({"dflash_config.conv_kernel_size": 3}, r"base_kernel is \(2, 2, 48\), not \(2, 3, 48\)"),
        ({"dflash_config.conv_kernel_size": 7}, "method.conv_taps=7; allowed: 0 to 6"),
        ({"dflash_config.selector_rank": 8}, r"codebook is \(97, 6\), not \(97, 8\)"),
        ({"architectures": ["DFlashDraftModel"]}, "conv_kernel_size=2; allowed: 0, or no such key"),
    ],
)
def test_keys_of_a_dflash2_folder_that_are_wrong(foreign, changes, said):
    path, _ = foreign("flat", changes, **DFLASH2)
    with pytest.raises(ArtifactError, match=said) as error:
        Artifact.load(path)
    assert "\n" not in str(error.value)


def test_a_default_draft_of_speculators_is_causal_in_its_windows(foreign):
    gone = {"sliding_window_non_causal": None, "transformer_layer_config.is_causal": None}
    path, _ = foreign("speculators", gone, windows=[9, 9])
    with pytest.raises(ArtifactError, match="see only those before them in some layers"):
        Artifact.load(path)


def test_the_record_is_needed(export):
    folder = export("flat")[0]
    (folder.path / "longtrain" / "record.json").unlink()
    with pytest.raises(ArtifactError, match=r"record\.json is missing"):
        FORMATS.verify(folder.path, None, None)
    assert json.loads((folder.path / "config.json").read_text())["trained_by"] == "longtrain"

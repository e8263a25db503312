"""EAGLE-3 for a target that longtrain cannot run, a small Qwen3-Next, from states and its ends."""

from __future__ import annotations

import json

import pytest
import torch
from byte_tokens import byte_tokenizer
from helpers import token_ids
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from longtrain.artifact import Artifact
from longtrain.errors import ArtifactError, ConfigError, TargetMismatchError
from longtrain.jobs import export, generate, train
from longtrain.targets.loading import load_target
from longtrain.targets.shapes import SHAPES

KEYS = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
}
SHARDS = {"model-1.safetensors": ("embed_tokens",), "model-3.safetensors": ("model.norm", "lm_head")}
"""The files that are in the folder; the index names a second one, of the layers, which is not."""


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_next", **KEYS), dtype=torch.float32)
    torch.nn.init.normal_(made.model.norm.weight, std=0.3)
    return made.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    """What a user gets of a model that is too large: the config, the tokenizer, and files of the ends."""
    folder = tmp_path_factory.mktemp("foreign")
    model.config.architectures = ["Qwen3NextForCausalLM"]
    model.config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    state, placed = model.state_dict(), {}
    for name in state:
        placed[name] = next(
            (file for file, parts in SHARDS.items() if any(part in name for part in parts)),
            "model-2.safetensors",
        )
    for file in SHARDS:
        save_file({name: state[name].contiguous() for name in state if placed[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


@pytest.fixture
def rows(tmp_path, model):
    """Documents, and their states by the model's own code in vLLM's layout; gives the token ids."""
    documents = token_ids(40, 90, 64, 120, 30, 77, vocab=256)
    (tmp_path / "states").mkdir()
    with (tmp_path / "rows.jsonl").open("w") as file:
        for number, ids in enumerate(documents):
            file.write(json.dumps({"input_ids": ids}) + "\n")
            save_file(
                {"token_ids": torch.tensor(ids), "hidden_states": states(model, ids)[0]},
                tmp_path / f"states/hs_{number}.safetensors",
            )
    return documents


def states(model, ids):
    """States [T, 4, E] of vLLM's ids 1, 2, 3, 4; and the logits."""
    seen = []
    handles = [
        layer.register_forward_hook(lambda _m, _i, out: seen.append(out)) for layer in model.model.layers
    ]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    for handle in handles:
        handle.remove()
    return torch.stack(
        [(one[0] if isinstance(one, tuple) else one)[0] for one in seen], 1
    ).contiguous(), logits


@pytest.fixture
def words(composed, tmp_path, folder, rows):
    def make(job, *overrides):
        only = [] if job != "train" else [
            "method=eagle3",
            "method.depths=2",
            "method.draft_vocab_size=64",
            "data=text",
            f"data.sources=[{{tokenised: {tmp_path}/rows.jsonl, kind: text}}]",
            "data.min_doc_tokens=8",
            "data.max_doc_tokens=128",
            "data.val_fraction=0",
            "data.val_sequences=0",
            "data.stages=[{epochs: 2, sequence_tokens: 128, doc_tokens: 128, recut: false}]",
            "trainer=cpu",
            "trainer.val_every=0",
            "callbacks.progress=false",
            "callbacks.curves=false",
            "features=engine",
            f"features.folder={tmp_path}/states",
        ]  # fmt: skip
        return composed(job, f"target.path={folder}", "quiet=true", *only, *overrides)

    return make


def test_the_ends_give_the_models_own_logits(folder, model, rows):
    """Its norm multiplies by 1 + weight, which transformers' class for it does."""
    target = load_target(folder, layers=False)
    found, logits = states(model, rows[0])
    torch.testing.assert_close(target.head(target.final_norm(found[:, -1])), logits)
    torch.testing.assert_close(target.final_norm_weight, 1 + model.model.norm.weight)
    assert torch.equal(target.embed(torch.tensor(rows[0])), model.model.embed_tokens(torch.tensor(rows[0])))
    info = target.info
    assert (info.family, info.n_layers, info.n_heads, info.qk_norm) == ("qwen3_next", 4, 4, True)
    assert info.rope == {"rope_theta": 10000.0, "rope_type": "default"}  # a quarter of each head in the model
    assert (
        not info.weights_hash and info.known_weights == load_target(folder, layers=False).info.known_weights
    )
    assert target.rope(torch.arange(3)[None])[0].shape == (1, 3, 16)


def test_a_draft_is_trained_and_exported_and_nothing_that_runs_the_target_begins(words, tmp_path):
    for checked in (
        words("train", "method.start_mlp=random", "dry_run=true"),
        words("train", "method.start_mlp=random"),
    ):
        train.check(checked)
    train.run(words("train", "method.start_mlp=random"))
    for form in ([], ["format=speculators"], ["format=flat"]):
        export.run(words("export", *form))
    artifact = Artifact.load(tmp_path / "checkpoints/one")
    assert artifact.verified and artifact.target.family == "qwen3_next"
    card = (tmp_path / "checkpoints/one/README.md").read_text()
    assert "trained and checked on hidden states that an engine wrote" in card
    config = json.loads((tmp_path / "checkpoints/one-speculators/config.json").read_text())
    assert config["speculators_config"]["verifier"]["architectures"] == ["Qwen3NextForCausalLM"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    with pytest.raises(TargetMismatchError, match=r"\(qwen3_next\) .*; supported: llama") as error:
        generate.run(words("generate", "artifact=one", "prompt=once"))
    assert "\n" not in str(error.value)


def test_a_start_from_layers_that_are_not_read_is_refused(words):
    with pytest.raises(
        ConfigError, match=r"are not read, and a warm start copies from them; pass method.start_mlp=random"
    ):
        train.run(words("train"))


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        (
            "embed_tokens",
            "lacks the target's embedding matrix .*which is in model-1.safetensors; get that file too",
        ),
        ("lm_head", "lacks the target's head matrix .*which is in model-3.safetensors"),
        ("model.norm", "lacks the target's final norm .*which is in model-3.safetensors"),
    ],
)
def test_a_matrix_that_is_missing_is_named_with_its_file(folder, model, tmp_path, gone, message):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (copy / file.name).write_bytes(file.read_bytes())
    for file, parts in SHARDS.items():
        kept = {
            name: one.contiguous()
            for name, one in model.state_dict().items()
            if any(part in name for part in parts) and gone not in name
        }
        save_file(kept, copy / file)
    with pytest.raises(ArtifactError, match=message) as error:
        load_target(copy, layers=False)
    assert "\n" not in str(error.value)


def test_a_model_that_changes_its_logits_is_refused(folder, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": 30.0}))
    with pytest.raises(TargetMismatchError, match=r"scales its logits .final_logit_softcapping=30.0"):
        load_target(copy, layers=False)


@pytest.mark.parametrize("shape", ["llama_micro", "qwen2_micro", "qwen3_micro"])
def test_a_supported_target_without_its_layers_files_is_the_same_target(tmp_path, shape):
    keys = {**SHAPES[shape], "vocab_size": 256, "eos_token_id": None, "rms_norm_eps": 1e-5}
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys), dtype=torch.float32)
    made.save_pretrained(tmp_path, max_shard_size="60KB")
    byte_tokenizer().save_pretrained(tmp_path)
    whole = load_target(tmp_path)
    assert load_target(tmp_path, layers=False).info == whole.info
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    ends = {file for name, file in places.items() if "layers" not in name}
    for file in {*places.values()} - ends:
        (tmp_path / file).unlink()
    part = load_target(tmp_path, layers=False)
    part.info.check(whole.info)
    whole.info.check(part.info)
    assert part.info.known_weights and not part.info.weights_hash
    pos_BT, ids_T = torch.arange(5)[None], torch.arange(9)
    assert all(map(torch.equal, part.rope(pos_BT), whole.rope(pos_BT)))
    state_TE = torch.randn(9, 48)
    for ours, theirs in (
        (part.embed, whole.embed),
        (part.head, whole.head),
        (part.final_norm, whole.final_norm),
    ):
        given = ids_T if ours == part.embed else state_TE
        assert torch.equal(ours(given), theirs(given))
    with pytest.raises(ArtifactError, match="lacks model-"):
        load_target(tmp_path)


def test_embeddings_are_scaled_where_the_models_are(tmp_path):
    keys = {**SHAPES["gemma3_micro"], "vocab_size": 256, "eos_token_id": None}
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys), dtype=torch.float32)
    made.save_pretrained(tmp_path, max_shard_size="60KB")
    byte_tokenizer().save_pretrained(tmp_path)
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    for file in {*places.values()} - {file for name, file in places.items() if "layers" not in name}:
        (tmp_path / file).unlink()
    part, ids_T = load_target(tmp_path, layers=False), torch.arange(9)
    assert part.embed_scale > 1
    torch.testing.assert_close(part.embed(ids_T), made.model.embed_tokens(ids_T))

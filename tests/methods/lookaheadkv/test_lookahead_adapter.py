"""LookaheadKV as peft's adapter folder: written, read back, and computed by peft's own layers."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from longtrain import cli, methods
from longtrain.artifact import Artifact
from longtrain.artifact.inspection import inspect
from longtrain.decoding.evict import PromptRun
from longtrain.errors import ArtifactError, ConfigError, TargetMismatchError
from longtrain.files import write_files
from longtrain.methods.lookaheadkv.config import Config
from longtrain.targets.loading import random_target
from longtrain.targets.step import OutputRequest, TokenBatch

CONFIG = Config(n_lookahead=5, lora_rank=3, lora_alpha=6.0)
FORMATS = methods.get("lookaheadkv").formats


@pytest.fixture(params=["qwen3", "gemma3"])
def target(three_layers, request):
    return three_layers(request.param, torch.float32)


@pytest.fixture
def folder(target, make_module, tmp_path):
    """The folder of a module whose LoRA is not zero."""
    made = Artifact.from_module(
        "lookaheadkv", CONFIG, module=make_module(target, CONFIG, torch.float32), target=target
    )
    write_files(tmp_path / "a", FORMATS.write("peft", made.tensors, CONFIG, target, made.provenance, "a"))
    return tmp_path / "a"


def hugging_face(target):
    """The target as transformers has it, on its own attention."""
    config = copy.deepcopy(target.model.config)  # its attention is set in place
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    plain.load_state_dict(target.model.state_dict())
    return plain.eval()


@torch.no_grad()
def scores_by_peft(model, rows_ME, ids_S):
    """Mean attention of the lookahead rows on the prompt, [H, S] a layer; the adapter is on for them only."""
    with model.disable_adapter():
        cache = model(input_ids=ids_S[None], use_cache=True).past_key_values
    found = model(inputs_embeds=rows_ME[None], past_key_values=cache, output_attentions=True).attentions
    return [p[0, :, :, : len(ids_S)].mean(1) for p in found]


@torch.no_grad()
def scores_by_us(artifact, target, ids_S):
    """The same by the evictor of an artifact, [H, S] a layer: heads of one KV head are averaged."""
    evictor = artifact.attach(target, budget_tokens=4).evictor
    n, count = torch.tensor([len(ids_S)]), len(ids_S)
    cache = target.plain_cache(1, count, 0)
    target.forward(
        TokenBatch(torch.arange(count)[None], ids_S[None], n_B=n), cache, outputs=OutputRequest("none")
    )
    cache.commit(None, n)
    run = PromptRun(target, cache, (count,), ids_S[None], n, ids_S[:1], watched=None)
    return evictor.scores(run)[:, 0]


def equal(target, mine_LGS, theirs):
    layers = target.info.full_layers
    for mine_GS, p_HS in zip(mine_LGS, [theirs[layer] for layer in layers], strict=True):
        p_GS = p_HS.reshape(target.info.n_kv_heads, -1, p_HS.shape[-1]).mean(1)
        torch.testing.assert_close(mine_GS, p_GS, rtol=1e-4, atol=1e-6)


def test_scores_are_those_of_pefts_own_layers(folder, target):
    from peft import PeftModel

    ids_S = torch.randint(2, target.info.vocab_size, (23,))
    artifact = Artifact.load(folder)
    rows_ME = load_file(folder / "lookahead_embeddings.safetensors")["lookahead_embeddings"]
    model = PeftModel.from_pretrained(hugging_face(target), folder)
    theirs = scores_by_peft(model, rows_ME, ids_S)
    equal(target, scores_by_us(artifact, target, ids_S), theirs)
    for parameter in model.parameters():
        parameter.data.mul_(0 if parameter.ndim == 2 and 3 in parameter.shape else 1)
    bare = scores_by_peft(model, rows_ME, ids_S)  # without the LoRA they are others
    assert not torch.allclose(bare[1], theirs[1], rtol=1e-2)


def test_an_adapter_that_peft_saved_is_read(folder, target):
    """Another rank and alpha, and LoRA in the last layer too, as peft initialises and saves it."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=2,
        lora_alpha=5,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        init_lora_weights=False,
    )
    model = get_peft_model(hugging_face(target), lora)
    model.save_pretrained(folder)
    artifact = Artifact.load(folder)
    config = artifact.typed_config()
    assert (config.lora_rank, config.lora_alpha, len(config.linears())) == (2, 5.0, 7)
    ids_S = torch.randint(2, target.info.vocab_size, (19,))
    equal(
        target,
        scores_by_us(artifact, target, ids_S),
        scores_by_peft(model, artifact.tensors["lookahead_embeddings"], ids_S),
    )


def test_every_tensor_comes_back(folder, target, make_module):
    module = make_module(target, CONFIG, torch.float32)
    found = Artifact.load(folder)
    assert found.typed_config() == dataclasses.replace(CONFIG, lora_targets=found.typed_config().lora_targets)
    assert {*found.typed_config().linears()} == {*CONFIG.linears()}
    assert found.tensors.keys() == module.state_dict().keys()
    assert all(torch.equal(found.tensors[name], one) for name, one in module.state_dict().items())
    assert FORMATS.verify(folder, target, None)[0].startswith(f"{len(found.tensors)} tensors")


def changed(folder, **keys):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


@pytest.mark.corners
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda at: changed(at, use_dora=True), "use_dora=True, which LookaheadKV does not compute"),
        (lambda at: changed(at, use_rslora=True), "use_rslora=True"),
        (lambda at: changed(at, target_modules="all-linear"), "target_modules=all-linear"),
        (lambda at: changed(at, r=4), "size mismatch"),
        (lambda at: (at / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is missing"),
        (lambda at: (at / "adapter_config.json").unlink(), "adapter_config.json is missing"),
        (lambda at: (at / "adapter_model.safetensors").write_bytes(b"no"), "cannot be read"),
        (
            lambda at: save_file(
                {"lookahead_embeddings": torch.zeros(5, 64)}, at / "lookahead_embeddings.safetensors"
            ),
            "sha256 differs",
        ),
        (lambda at: (at / "longtrain/lookaheadkv.json").write_text("{}"), "no checksum of its own"),
    ],
)
def test_what_cannot_be_read_is_one_line(folder, change, says):
    change(folder)
    with pytest.raises(ArtifactError, match=says) as error:
        Artifact.load(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def test_another_target_is_refused(folder):
    other = random_target("llama_micro", seed=0, dtype="float32", device="cpu")
    with pytest.raises(TargetMismatchError, match="pass the target it was trained for"):
        Artifact.load(folder).attach(other, budget_tokens=4)


def test_the_job_writes_the_folder_of_an_artifact_and_checks_it(tmp_path, monkeypatch):
    for words in (
        ["artifact=tiny_lookaheadkv", "format=peft", "target=tiny"],
        [f"verify={tmp_path}/checkpoints/tiny_lookaheadkv-peft", "target=tiny"],
    ):
        monkeypatch.setattr("sys.argv", ["longtrain", "export", *words, f"home={tmp_path}", "quiet=true"])
        cli.main()
    folder = tmp_path / "checkpoints/tiny_lookaheadkv-peft"
    assert not inspect(str(folder)).fault
    made, again = Artifact.load("tiny_lookaheadkv"), Artifact.load(folder)
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in made.tensors.items())
    assert "PeftModel.from_pretrained" in (folder / "README.md").read_text()


def test_what_peft_cannot_load_is_not_written(target, folder, monkeypatch):
    with pytest.raises(ConfigError, match="has no LoRA"):
        FORMATS.refuse("peft", dataclasses.replace(CONFIG, lora_targets="none"), None)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'longtrain\[peft\]'"):
        FORMATS.read(folder, None)

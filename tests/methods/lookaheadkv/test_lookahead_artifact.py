"""From the module to a folder and back: golden scores, PEFT's format, budgets at attach."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import replace

import lookahead_equations as equations
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from longtrain import methods
from longtrain.artifact import Artifact, Golden
from longtrain.artifact.folder import FILES
from longtrain.artifact.golden import KINDS
from longtrain.artifact.golden.checks import refuse
from longtrain.decoding.evict import PromptRun
from longtrain.errors import ArtifactError, ConfigError, TargetMismatchError
from longtrain.files import sealed
from longtrain.methods.lookaheadkv.config import Config
from longtrain.methods.lookaheadkv.modules import LookaheadKV
from longtrain.methods.lookaheadkv.runtime import LookaheadEvictor
from longtrain.targets.loading import random_target
from longtrain.targets.step import OutputRequest, TokenBatch

CONFIG = Config(n_lookahead=5, lora_rank=3, lora_alpha=6.0)


@pytest.fixture
def target(three_layers):
    return three_layers("qwen3", torch.float32)


@pytest.fixture
def made(target, make_module):
    module = make_module(target, CONFIG, torch.float32)
    return Artifact.from_module("lookaheadkv", CONFIG, module=module, target=target)


def verify(golden, attach, target):
    checks = golden.measure(attach, target)
    refuse(checks)
    return checks[0].error


def attach(target, module, config=CONFIG, **keys):
    return methods.get("lookaheadkv").attach(module, target, config, keys or {"budget_ratio": 1.0})


def prefilled(target, lengths, hook=None, seed=2):
    """A PromptRun of random prompts."""
    ids = torch.randint(2, target.info.vocab_size, (len(lengths), max(lengths)))
    cache, n = target.new_cache(len(lengths), max(lengths), 0), torch.tensor(lengths)
    pos = torch.arange(max(lengths)).expand(len(lengths), -1)
    target.forward(TokenBatch(pos, ids, n_B=n), cache, outputs=OutputRequest("none"), hook=hook)
    cache.commit(None, n)
    return PromptRun(target, cache, tuple(lengths), ids, n, ids[:, 0], watched=hook)


def test_round_trip_is_bit_equal(made, target, tmp_path):
    assert made.golden.kind is KINDS["scores"]
    back = Artifact.load(made.save(tmp_path / "e"))
    assert back.golden.kind is KINDS["scores"] and back.typed_config() == CONFIG
    assert made.tensors.keys() == back.tensors.keys()
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in made.tensors.items())
    for name, tensor in made.golden.tensors().items():
        assert torch.equal(back.golden.tensors()[name], tensor), name
    run = prefilled(target, [40])
    one, two = (x.attach(target, budget_tokens=7).evictor.select(run) for x in (made, back))
    assert torch.equal(one.idx_LBGK, two.idx_LBGK) and one.n_LBG.eq(7).all()


def test_a_target_with_windows_is_checked_up_to_its_first_full_layer(three_layers, make_module, tmp_path):
    """Its scores depend on the lookahead tokens' way through the layer before, which has a window."""
    target = three_layers("gemma3", torch.float32)
    module = make_module(target, CONFIG, torch.float32)
    made = Artifact.from_module("lookaheadkv", CONFIG, module=module, target=target)
    back = Artifact.load(made.save(tmp_path / "e"))
    assert [back.golden.own[name].shape[0] for name in ("near_FGT", "scores_LGT")] == [1, 2]
    assert verify(back.golden, lambda one: attach(one, module), target) < 1e-5
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for name in ("layers.0.mlp.up_proj.lora_A.weight", "layers.0.self_attn.v_proj.lora_B.weight"):
        module.load_state_dict({**state, name: state[name] * 1.5})
        with pytest.raises(ArtifactError, match="on stored inputs"):
            verify(back.golden, lambda one: attach(one, module), target)


def test_an_artifact_shares_budgets_out_as_it_was_told_unless_asked_otherwise(target, made):
    assert made.attach(target, budget_tokens=4).evictor.adaptive is False  # the paper's
    config = replace(CONFIG, adaptive="layers")
    module = LookaheadKV(config, target.info)
    ours = Artifact.from_module("lookaheadkv", config, module=module, target=target)
    found = [
        ours.attach(target, budget_tokens=4, adaptive=way).evictor.adaptive for way in (None, False, "heads")
    ]
    assert found == ["layers", False, "heads"]
    with pytest.raises(ConfigError, match=r"method\.adaptive=rows; allowed: false, heads, layers"):
        replace(CONFIG, adaptive="rows")


def test_attach_says_how_to_pass_a_budget(made, target):
    with pytest.raises(ConfigError, match=r"evict\.budget_tokens=128"):
        made.attach(target)
    with pytest.raises(ConfigError, match=r"evict\.budget_tokens=128"):
        made.attach(target, budget_tokens=None, budget_ratio=None)
    with pytest.raises(ConfigError, match="known: budget_tokens, budget_ratio, adaptive, kernel"):
        made.attach(target, budget=128)
    with pytest.raises(ConfigError, match="budget_tokens=0"):
        made.attach(target, budget_tokens=0)
    with pytest.raises(ConfigError, match="adaptive=rows; allowed: false, heads, layers"):
        made.attach(target, budget_tokens=4, adaptive="rows")
    with pytest.raises(ConfigError, match="adaptive=0; allowed: false, heads, layers"):
        made.attach(target, budget_tokens=4, adaptive=0)
    found = [made.attach(target, budget_tokens=4, kernel=n).evictor.kernel for n in (None, 1)]
    assert found == [CONFIG.pool_kernel, 1]
    with pytest.raises(ConfigError, match="kernel=2; allowed: 1"):
        made.attach(target, budget_tokens=4, kernel=2)


def test_another_target_is_refused(made, three_layers):
    with pytest.raises(TargetMismatchError, match="trained for"):
        made.attach(three_layers("qwen3", torch.float32, seed=2), budget_tokens=4)
    with pytest.raises(TargetMismatchError, match="family=qwen3"):
        made.attach(three_layers("llama", torch.float32), budget_tokens=4)


class Faulty:
    """A target as an evictor with a fault would use it."""

    def __init__(self, target, rope):
        self._target, self._rope = target, rope

    def __getattr__(self, name):
        return getattr(self._target, name)

    def rope(self, pos, *, dtype=None):
        return self._rope(self._target, pos, dtype)


def with_config(**changes):
    def faulty(module, target):
        return attach(target, module, dataclasses.replace(CONFIG, **changes))

    return faulty


def scaled(module, target):
    module.scale *= 1.5
    return attach(target, module)


def no_lora(module, target):
    for name, p in module.named_parameters():
        if "lora_B" in name:
            p.data.zero_()
    return attach(target, module)


def reordered(module, target):
    module.lookahead_embeddings.data = module.lookahead_embeddings.data.flip(0)
    return attach(target, module)


FAULTS = {
    "positions off by one": lambda module, target: attach(
        Faulty(target, lambda t, pos, dtype: t.rope(pos + 1, dtype=dtype)), module
    ),
    "no rope": lambda module, target: attach(
        Faulty(target, lambda t, pos, dtype: t.rope(pos * 0, dtype=dtype)), module
    ),
    "LoRA scaled otherwise": scaled,
    "LoRA lost": no_lora,
    "tokens in another order": reordered,
    "reduction over heads": with_config(reduction="max"),
}


def faulty_attach(made, fault):
    def parts(view):
        return FAULTS[fault](made._module(view), view)

    return parts


@pytest.mark.corners
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_faults_are_caught(made, target, fault, dtype):
    target = target.to(dtype)
    golden = Golden.record(KINDS["scores"], made._parts, target, tokens=128)
    assert verify(golden, made._parts, target) < 1e-6
    with pytest.raises(ArtifactError, match="golden outputs are not reproduced by the evictor"):
        verify(golden, faulty_attach(made, fault), target)


def test_another_targets_keys_are_caught(made, three_layers):
    other = three_layers("qwen3", torch.float32, seed=2)
    with pytest.raises(ArtifactError, match="not reproduced by"):
        verify(made.golden, made._parts, other)


def test_window_of_queries_is_part_of_the_golden_outputs(target, make_module, tmp_path):
    config = dataclasses.replace(CONFIG, suffix_window=8)
    module = make_module(target, config, torch.float32)
    made = Artifact.from_module("lookaheadkv", config, module=module, target=target)
    assert {"q_0", "k_1", "v_1"} <= made.golden.inputs.keys()
    assert made.save(tmp_path / "e") and Artifact.load(tmp_path / "e").attach(target, budget_ratio=0.5)
    with pytest.raises(ArtifactError, match="not reproduced"):
        verify(made.golden, lambda view: attach(view, made._module(view)), target)


def test_golden_tensors_that_do_not_fit_are_refused(made, target):
    tensors = made.golden.tensors()
    shorter = Golden.from_tensors(KINDS["scores"], tensors | {"ids_T": tensors["ids_T"][1:]}, "float32")
    with pytest.raises(ArtifactError, match=r"golden scores are \(.*gives \("):
        verify(shorter, made._parts, target)
    more = Golden.from_tensors(KINDS["scores"], tensors | {"x_0": tensors["k_0"]}, "float32")
    with pytest.raises(ArtifactError, match="the target's x_0, which the evictor does not read here"):
        verify(more, made._parts, target)
    del tensors["near_FGT"]
    with pytest.raises(ArtifactError, match="lacks near_FGT"):
        Golden.from_tensors(KINDS["scores"], tensors, "float32")


def test_a_missing_golden_input_is_told(made, target):
    inputs = {name: tensor for name, tensor in made.golden.inputs.items() if name != "v_1"}
    with pytest.raises(ArtifactError, match="reads v_1 of the target, which the artifact does not"):
        verify(dataclasses.replace(made.golden, inputs=inputs), made._parts, target)


def test_copies_for_other_tools_are_checked_but_not_needed(made, target, tmp_path):
    folder = made.save(tmp_path / "e")
    files = json.loads((folder / "longtrain.json").read_text())["files"]
    assert {name for name in files if "/" in name} == {
        f"peft/{name}"
        for name in (
            "adapter_config.json",
            "adapter_model.safetensors",
            "lookahead_embeddings.safetensors",
            "longtrain_eviction.json",
        )
    }
    for name, checksum in files.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == checksum
    assert not any(name in FILES for name in files if "/" in name)  # push adds them by name
    (folder / "peft/longtrain_eviction.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"longtrain_eviction.json is not what"):
        Artifact.load(folder)
    for file in (folder / "peft").iterdir():
        file.unlink()
    Artifact.load(folder).attach(target, budget_tokens=4)


def test_what_other_tools_are_told(made, tmp_path):
    folder = made.save(tmp_path / "e") / "peft"
    facts = json.loads((folder / "longtrain_eviction.json").read_text())
    assert {
        "n": 5,
        "pool": "max",
        "kernel": 7,
        "reduction": "mean",
        "query_aware": True,
    }.items() <= facts.items()
    assert facts["base_sha"] == made.target.weights_hash and facts["lora"]
    rows = load_file(folder / "lookahead_embeddings.safetensors")["lookahead_embeddings"]
    assert torch.equal(rows, made.tensors["lookahead_embeddings"])


def test_card_speaks_of_eviction(made, tmp_path):
    card = (made.save(tmp_path / "e") / "README.md").read_text()
    assert "kv-cache-eviction" in card and "speculative" not in card
    assert "evict.budget_tokens=128" in card and "attach(target, budget_tokens=128)" in card
    assert "`peft/`" in card and "importance of its tokens" in card


def test_peft_loads_the_adapter_and_merged_weights_are_our_rows(tmp_path, three_layers, make_module):
    """The lookahead rows alone, without a prompt: what a model merged by peft computes of soft tokens."""
    from peft import PeftModel

    target = equations.exact(three_layers("qwen3"))
    module = make_module(target, CONFIG)
    last = len(module.layers) - 1
    for half in "AB":  # held, not trained: B stays zero as it was made
        getattr(module.layers[last].self_attn.v_proj, f"lora_{half}").weight.zero_()
    made = Artifact.from_module("lookaheadkv", CONFIG, module=module, target=target)
    folder = made.save(tmp_path / "e") / "peft"

    plain = AutoModelForCausalLM.from_config(target.model.config, attn_implementation="eager").double()
    plain.load_state_dict(target.model.state_dict())
    with_adapter = PeftModel.from_pretrained(plain, folder)
    loaded = {name: p for name, p in with_adapter.named_parameters() if "lora_" in name}
    stored = load_file(folder / "adapter_model.safetensors")
    assert len(loaded) == len(stored) == 3 * 7 * 2
    for name, tensor in stored.items():
        assert torch.equal(loaded[name.replace(".weight", ".default.weight")], tensor.double()), name
    merged = with_adapter.merge_and_unload()

    n = CONFIG.n_lookahead
    outputs = equations.attention_of(
        target,
        module.lookahead_embeddings,
        torch.ones(n).double(),
        module,
        CONFIG.lora_alpha / CONFIG.lora_rank,
    )
    for layer in merged.model.layers:
        equations.exact_layer(layer, target.info.rms_norm_eps)
    got = merged.model(
        inputs_embeds=module.lookahead_embeddings[None].detach(), output_attentions=True, use_cache=False
    ).attentions
    for mine, theirs in zip(outputs, got, strict=True):
        torch.testing.assert_close(mine.detach(), theirs[0], rtol=0, atol=2e-7)  # its softmax is fp32


def test_no_lora_no_adapter(target, make_module, tmp_path):
    config = dataclasses.replace(CONFIG, lora_targets="none")
    made = Artifact.from_module(
        "lookaheadkv", config, module=make_module(target, config, torch.float32), target=target
    )
    folder = made.save(tmp_path / "e")
    assert sorted(p.name for p in (folder / "peft").iterdir()) == [
        "longtrain_eviction.json",
        "lookahead_embeddings.safetensors",
    ]
    assert isinstance(Artifact.load(folder).attach(target, budget_tokens=4).evictor, LookaheadEvictor)


def test_altered_tensors_are_caught_by_the_golden_outputs(made, target, tmp_path):
    folder = made.save(tmp_path / "e")
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.2.self_attn.q_proj.lora_B.weight"] += 1.0
    save_file(tensors, folder / "model.safetensors")
    manifest = json.loads((folder / "longtrain.json").read_text())
    content = (folder / "model.safetensors").read_bytes()
    manifest["files"]["model.safetensors"] = hashlib.sha256(content).hexdigest()
    (folder / "longtrain.json").write_bytes(sealed(manifest))
    with pytest.raises(ArtifactError, match="not reproduced by the evictor"):
        Artifact.load(folder).attach(target, budget_tokens=4)


def test_half_precision_target(made, target):
    half = random_target("qwen3_micro", dtype=torch.bfloat16)
    assert half.info.n_layers == 2
    with pytest.raises(TargetMismatchError, match="n_layers"):
        made.attach(half, budget_tokens=4)
    evictor = made.attach(target.to(torch.bfloat16), budget_tokens=4).evictor
    assert evictor.module.lookahead_embeddings.dtype == torch.bfloat16

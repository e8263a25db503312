"""Drafts with biases on q, k and v for a target that has none, and the authors' weights."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import linear

from longtrain.artifact import Artifact
from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.roles import TreeShape
from longtrain.errors import ArtifactError
from longtrain.integrations.longspec_vllm import LongSpecProposer
from longtrain.methods.longspec.authors import read_draft
from longtrain.methods.longspec.config import Config
from longtrain.methods.longspec.spec import SPEC

BIASED = Config(window=6, attention_bias=True, max_depth=4)
NAMES = [f"self_attn.{x}_proj.bias" for x in "qkv"] + ["cross_attn.q_proj.bias"]


def test_the_target_decides_unless_told_otherwise(target):
    for asked in (None, True, False):
        draft = SPEC.build(Config(attention_bias=asked), target.info)
        has = [name for name, _ in draft.named_parameters() if name.endswith("_proj.bias")]
        assert sorted(has) == (
            sorted(NAMES) if (target.info.attention_bias if asked is None else asked) else []
        )
        SPEC.objective(draft, target, Config(attention_bias=asked))  # warm start, with and without biases
        assert all(bool(torch.isfinite(p).all()) for p in draft.parameters())


def test_biases_count_in_training_and_drafting_and_survive_an_artifact(llama, make_draft, tmp_path):
    draft = make_draft(llama, BIASED)
    embed = llama.embed(torch.arange(5))
    attention = draft.self_attn
    outputs = linear(embed, attention.v_proj.weight, attention.v_proj.bias).unflatten(
        -1, (-1, llama.info.head_dim)
    )
    rope = tuple(part[0] for part in llama.rope(torch.arange(5)[None]))
    torch.testing.assert_close(attention.keys_values(embed, rope)[1], outputs)
    Artifact.from_module("longspec", BIASED, module=draft, target=llama).save(tmp_path / "draft")
    back = Artifact.load(tmp_path / "draft")
    assert back.tensors["cross_attn.q_proj.bias"].any()
    prompts, shape = [[3, 1, 4, 1, 5, 9, 2, 6, 5]], TreeShape((1, 1, 1))
    options = {"max_new_tokens": 12, "ignore_eos": True}
    texts = [
        Engine(llama, back.attach(llama)).generate(prompts, shape=s, **options).tokens for s in (PLAIN, shape)
    ]
    assert texts[0] == texts[1]  # attach has compared golden drafts, which the fused layer makes
    with torch.no_grad():
        draft.self_attn.v_proj.bias += 1
    other = Artifact.from_module("longspec", BIASED, module=draft, target=llama).golden.tensors()
    assert any(not torch.equal(x, other[name]) for name, x in back.golden.tensors().items())


def test_the_proposer_for_vllm_reads_them(llama, make_draft):
    draft = make_draft(llama, BIASED)
    proposer = LongSpecProposer.__new__(LongSpecProposer)
    proposer._weights, proposer.info = dict(draft.state_dict()), {"n_kv_heads": llama.info.n_kv_heads}
    x = torch.randn(1, 4, llama.info.hidden_size, dtype=torch.float64)
    found = proposer._heads("self_attn.v", x, llama.info.n_kv_heads)
    rope = tuple(part[0] for part in llama.rope(torch.arange(4)[None]))
    torch.testing.assert_close(found[0].transpose(0, 1), draft.self_attn.keys_values(x[0], rope)[1])


@pytest.mark.parametrize("prefix", ["", "glide.", "model.glide."])
@pytest.mark.parametrize("pickled", [False, True])
def test_the_authors_weights_are_read_without_loss(llama, make_draft, tmp_path, prefix, pickled):
    draft = make_draft(llama, BIASED)
    theirs = {prefix + name: tensor.clone() for name, tensor in draft.state_dict().items()}
    dead = torch.zeros(4, 4, dtype=torch.float64)
    theirs |= {f"{prefix}cross_attn.{x}": dead.clone() for x in ("k_proj.weight", "v_proj.bias")}
    theirs |= {
        f"{prefix}self_attn.rotary_emb.inv_freq": dead.clone(),
        "model.layers.0.mlp.up_proj.weight": dead.clone(),
    }
    if pickled:
        torch.save(theirs, tmp_path / "pytorch_model.bin")
    else:
        save_file(theirs, tmp_path / "model.safetensors")
    config, found = read_draft(tmp_path, llama.info)
    assert (config.attention_bias, config.window, config.objective) == (True, 512, "ce")
    assert found.state_dict().keys() == draft.state_dict().keys() and not found.fresh
    assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in found.state_dict().items())


def test_other_files_are_refused_in_one_line(llama, make_draft, tmp_path):
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_draft(tmp_path / "none.bin", llama.info)
    tensors = dict(make_draft(llama, BIASED).state_dict())
    for change, said in (
        (("fc.weight", torch.zeros(2)), "'fc.weight'"),
        (("mlp.up_proj.weight", torch.zeros(2)), "size"),
    ):
        save_file({**tensors, change[0]: change[1]}, tmp_path / "model.safetensors")
        with pytest.raises(ArtifactError, match=said) as caught:
            read_draft(tmp_path, llama.info)
        assert "\n" not in str(caught.value)

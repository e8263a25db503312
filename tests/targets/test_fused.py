"""The fused decoder against transformers' own, on every family."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from longtrain.cache.arena import ArenaCache
from longtrain.cache.hierarchical import HierarchicalCache
from longtrain.errors import ConfigError
from longtrain.targets.fused import joined
from longtrain.targets.int4 import Int4Target
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.step import OutputRequest, TokenBatch

FAMILIES = ["llama_micro", "qwen2_micro", "qwen3_micro", "mistral_micro"]
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
"""fp32 on a CPU: the same operations, sums in another order."""


def steps(target, outputs: OutputRequest):
    """Prefill of a ragged batch and a step of three rows over it: everything that comes back."""
    rng = torch.Generator().manual_seed(3)
    ids_BT = torch.randint(2, 97, (2, 9), generator=rng)
    n_B = torch.tensor([9, 4])
    cache = target.new_cache(2, 20, 3)
    with torch.no_grad():
        first = target(
            TokenBatch(torch.arange(9).expand(2, -1), ids_BT, n_B=n_B),
            cache,
            outputs=OutputRequest("last", outputs.hidden),
        )
        cache.commit(None, n_B)
        pos_BT = cache.len_B[:, None] + torch.arange(3)
        then = target(TokenBatch(pos_BT, ids_BT[:, :3]), cache, outputs=outputs)
    return [first.logits_BTV, then.logits_BTV, *then.hidden.values()], cache


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_equals_the_models_own(family):
    target = random_target(family, seed=2)
    for name, param in target.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # else nobody would notice that they are left out
            param.data += torch.linspace(-0.5, 0.5, param.numel()).view_as(param)
    outputs = OutputRequest("all", (0, 1, -1))
    expected, _ = steps(target, outputs)
    got, _ = steps(target.fuse(), outputs)
    assert len(got) == len(expected) == 5
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    back, _ = steps(target.unfuse(), outputs)
    for a, b in zip(back, expected, strict=True):
        assert torch.equal(a, b)


def test_weights_are_joined_without_a_copy_and_parted_again():
    target = random_target("qwen2_micro")
    before = {name: value.clone() for name, value in target.state_dict().items()}
    size = sum(p.nbytes for p in target.parameters())
    target.fuse()
    layer = target.fused.layers[1]
    attention = target.model.model.layers[1].self_attn
    whole = layer.qkv.weight
    assert whole.data_ptr() == attention.q_proj.weight.data_ptr()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in target.parameters()}
    assert sum(storages.values()) == size
    assert {name: value.shape for name, value in target.state_dict().items()} == {
        name: value.shape for name, value in before.items()
    }
    target.unfuse()
    assert target.fused is None
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in target.parameters())
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


@pytest.mark.parametrize("first", [True, False])
def test_linears_with_and_without_a_bias_are_not_joined(first):
    linears = [nn.Linear(8, 4, bias=first), nn.Linear(8, 4, bias=not first)]
    with pytest.raises(
        ConfigError, match="1 of 2 have a bias cannot be joined; allowed: all of them or none"
    ):
        joined(linears)


def test_a_target_with_int4_weights_is_fused_too():
    """The same products from joined codes: each output row has scales of its own."""
    shape = {**SHAPES["qwen2_micro"], "hidden_size": 64, "intermediate_size": 96}
    target = random_target(shape, seed=2)
    outputs = OutputRequest("all", (0, -1))
    expected, _ = steps(Int4Target(target, group=32), outputs)
    model = Int4Target(target.fuse(), group=32)
    assert model.fused is not None and model.fused is not target.fused
    size = model.int4_bytes()
    for a, b in zip(steps(model, outputs)[0], expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    model.unfuse()
    assert model.int4_bytes() == size
    for a, b in zip(steps(model, outputs)[0], expected, strict=True):
        assert torch.equal(a, b)


def test_a_cast_keeps_it_fused():
    target = random_target("llama_micro").fuse()
    before = target.fused
    target.double()
    assert target.fused is not None and target.fused is not before
    assert target.fused.layers[0].qkv.weight.dtype == torch.float64
    assert target.model.model.layers[0].self_attn.k_proj.weight.dtype == torch.float64
    steps(target, OutputRequest("all"))


def test_it_leaves_early_with_what_was_recorded():
    target = random_target("llama_micro").fuse()
    cache = target.new_cache(1, 8, 0)
    rows = TokenBatch(torch.arange(4)[None], torch.tensor([[5, 6, 7, 8]]))
    with torch.no_grad():
        step = target(rows, cache, outputs=OutputRequest("none", (0,), stop_at_layer=1))
    assert list(step.hidden) == [0] and step.logits_BTV is None
    assert cache.k_LBGSD[1, :, :, :4].abs().sum() > 0


def test_long_prompts_go_through_the_mlp_in_pieces(monkeypatch):
    target = random_target("llama_micro").fuse()
    whole, _ = steps(target, OutputRequest("all"))
    monkeypatch.setattr("longtrain.targets.fused.MLP_NUMBERS", 5 * target.info.intermediate_size)
    cut, _ = steps(target, OutputRequest("all"))
    for a, b in zip(cut, whole, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("other", [{"hidden_act": "gelu"}, {"mlp_bias": True}])
def test_an_mlp_that_is_no_swiglu_without_biases_runs_as_the_module_that_it_is(other):
    target = random_target({**SHAPES["llama_micro"], **other})
    outputs = OutputRequest("all", (0, -1))
    expected, _ = steps(target, outputs)
    for a, b in zip(steps(target.fuse(), outputs)[0], expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    assert target.fused.layers[0].mlp is None and target.fused.layers[0].qkv is not None


@pytest.mark.parametrize("kind", ["arena", "hierarchical", "draft view"])
def test_keys_and_values_go_straight_into_caches_with_slots(kind):
    """What a cache holds and gives is the same whether its `write` was called or not."""
    shape = {**SHAPES["qwen3_micro"], "head_dim": 64}
    target = random_target(shape, seed=2)
    found = []
    for model in (target.unfuse, target.fuse):
        cache, buffers = _filled(model(), kind)
        written = []
        write = cache.write
        cache.write = lambda layer, k, v, write=write, seen=written: (seen.append(layer), write(layer, k, v))
        pos_BT = cache.len_B[:, None] + torch.arange(3)
        with torch.no_grad():
            step = target(
                TokenBatch(pos_BT, torch.tensor([[5, 6, 7], [8, 9, 10]])), cache, outputs=OutputRequest("all")
            )
        assert written == ([] if target.fused else [0, 1])
        found.append([step.logits_BTV, *buffers])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def _filled(target, kind):
    """A cache of two sequences that were read, and its storage of new rows."""
    ids_BT = torch.randint(2, 97, (2, 9), generator=torch.Generator().manual_seed(3))
    n_B = torch.tensor([9, 4])
    info = target.info
    if kind == "arena":
        dense = target.new_cache(2, 20, 3)
        read = dense
    else:
        read = HierarchicalCache(
            n_layers=info.n_layers,
            n_heads=info.n_heads,
            n_kv_heads=info.n_kv_heads,
            head_dim=info.head_dim,
            batch=2,
            max_tokens=300,
            max_nodes=3,
            device="cpu",
            dtype=torch.float32,
        )
    with torch.no_grad():
        target(TokenBatch(torch.arange(9).expand(2, -1), ids_BT, n_B=n_B), read)
        read.commit(None, n_B)
    if kind == "arena":
        arena = ArenaCache(dense)
        arena.take(dense, room=3)
        return arena, (dense.k_LBGSD, dense.v_LBGSD)
    if kind == "hierarchical":
        return read, (read.ring.k, read.ring.v)
    view = read.draft_view()
    view.write(0, *torch.zeros(2, 2, info.n_kv_heads, 1, info.head_dim))
    view.commit(None, n_B)
    return view, (read.ring.k, read.ring.v)

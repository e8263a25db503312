"""Rows after a prompt: what they compute, and that the prompt does not notice them."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch

from longtrain.cache.dense import DenseCache
from longtrain.kernels.importance import Span
from longtrain.targets import lora as lora_of_targets
from longtrain.targets.loading import random_target
from longtrain.targets.lora import Lora
from longtrain.targets.step import OutputRequest, TokenBatch
from longtrain.targets.suffix import GROUPS, SuffixRun
from tests.families import FAMILIES as OTHERS
from tests.families import usual
from tests.targets.test_window_layers import shape_of

WINDOWS = [
    ("gemma3_text", 8), ("gemma3_text", 3), ("qwen3", 5), ("ministral", 8), ("olmo3", 8), ("exaone4", 3),
    ("smollm3", 8),
]  # fmt: skip
"""Families and windows, some narrower than the rows that follow a prompt."""


def window_shape(family):
    """Layers with a window before and between the full ones, and after them."""
    kinds = [*["sliding_attention", "full_attention"] * 2, "sliding_attention"]
    more = {"no_rope_layers": [0, 1, 1, 0, 1]} if family == "smollm3" else {}
    shape = shape_of(family, random.Random(2))
    return {**shape, "num_hidden_layers": 5, "layer_types": kinds, "query_pre_attn_scalar": 20, **more}


FAMILIES = [
    "llama_micro", "qwen2_micro", "qwen3_micro", "mistral_micro",
    *(usual(family) for family in OTHERS if family != "gpt_oss"),  # LookaheadKV refuses sinks
    *({**window_shape(family), "sliding_window": window} for family, window in WINDOWS),
]  # fmt: skip
LENGTHS = [23, 9, 17]


def name_of(shape):
    if isinstance(shape, str):
        return shape
    return (
        f"{shape['model_type']}-{shape['sliding_window']}" if "layer_types" in shape else shape["model_type"]
    )


M = 4


def made(shape):
    """A target in fp64 whose norms matter too."""
    target = random_target(shape, seed=3, dtype=torch.float64)
    rng = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in target.model.named_parameters():
            if name.endswith("norm.weight"):
                weight += 0.2 * torch.randn(weight.shape, generator=rng, dtype=weight.dtype)
    return target


def prompts(target, lengths=LENGTHS, seed=0):
    """Right-padded prompts in a committed cache, and the step that put them there."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.randint(target.info.vocab_size, (len(lengths), max(lengths)), generator=gen)
    cache, n = target.plain_cache(len(lengths), max(lengths) + M, 0), torch.tensor(lengths)
    pos = torch.arange(max(lengths)).expand(len(lengths), -1)
    step = target.forward(TokenBatch(pos, ids, n_B=n), cache, outputs=OutputRequest("all"))
    cache.commit(None, n)
    return ids, cache, step


def lora(target, seed=1, rank=2):
    """LoRA on all linears of all layers."""
    gen = torch.Generator().manual_seed(seed)

    def one(index, layer, key):
        weights = [layer.get_submodule(name).weight for name in GROUPS[key]]
        draw = lambda *shape: 0.2 * torch.randn(shape, generator=gen, dtype=target.dtype)  # noqa: E731
        b_OR = torch.block_diag(*(0.5 * draw(len(weight), rank) for weight in weights))
        return Lora(key, [index], draw(1, len(weights) * rank, weights[0].shape[1]), b_OR[None])

    keys = [key for key in GROUPS if target.family.swiglu or key in ("qkv", "o")]
    return [one(*layer, key) for layer in enumerate(target.model.model.layers) for key in keys]


def merged(target, adapters):
    """The target with the LoRA in its weights, for every row."""
    for one in adapters:
        layer = target.model.model.layers[one.layers[0]]
        weights = [layer.get_submodule(name).weight for name in GROUPS[one.key]]
        added = (one.b_LOR[0] @ one.a_LRE[0]).split([len(weight) for weight in weights])
        for weight, more in zip(weights, added, strict=True):
            weight.data += more
    return target


def run(target, cache, embeds, adapters, lengths=LENGTHS):
    scores = []
    rows = range(0, len(lengths) * M, M)
    spans = [
        Span((first, first + M), b, (0, n)) for b, (first, n) in enumerate(zip(rows, lengths, strict=True))
    ]
    pos = torch.cat([torch.arange(n, n + M) for n in lengths])
    run = SuffixRun(target, embeds, pos, spans, adapters)
    scores += [run.step(*cache.prefix(layer)) for layer in range(run.last + 1)]
    assert [layer for layer, s in enumerate(scores) if s is not None] == [*target.info.full_layers]
    return [s for s in scores if s is not None]


def attention(target, embeds, cache):
    """Scores of every layer for one prompt, from the target's own forward over rows after it."""
    seen = []
    length = int(cache.len_B[0])

    def hook(layer, q, k, v):
        seen.append((q[0].double(), k[0].double()))

    pos = length + torch.arange(M)[None]
    target.forward(TokenBatch(pos, embeds_BTE=embeds[None]), cache, outputs=OutputRequest("none"), hook=hook)
    found, group = [], target.info.n_heads // target.info.n_kv_heads
    for layer, (q, own) in enumerate(seen):
        if target.info.windows[layer]:
            continue
        keys = torch.cat((cache.k_LBGSD[layer, 0, :, :length].double(), own), 1).repeat_interleave(group, 0)
        logits = q @ keys.transpose(1, 2) * target.scaling(layer)
        logits[:, :, length:] += torch.full((M, M), -torch.inf).triu(1)
        found.append(logits.softmax(-1)[:, :, :length].mean(1))
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=name_of)
def test_rows_compute_what_the_target_with_merged_weights_computes(family):
    target = made(family)
    adapters = lora(target)
    _, cache, _ = prompts(target)
    embeds = torch.randn(len(LENGTHS) * M, target.info.hidden_size, dtype=torch.float64)
    with torch.no_grad():
        got = run(target, cache, embeds, adapters)
    other = merged(made(family), adapters)
    for b, length in enumerate(LENGTHS):
        alone = DenseCache(
            n_layers=target.info.n_layers,
            n_kv_heads=target.info.n_kv_heads,
            head_dim=target.info.head_dim,
            batch=1,
            max_tokens=length,
            max_nodes=M,
            device="cpu",
            dtype=torch.float64,
            windows=target.info.windows,
        )
        for layer in range(target.info.n_layers):
            alone.write(layer, *(x[layer, b : b + 1, :, :length] for x in (cache.k_LBGSD, cache.v_LBGSD)))
        alone.commit(None, torch.tensor([length]))
        outputs = attention(other, embeds[b * M : (b + 1) * M], alone)
        for mine, theirs in zip(got, outputs, strict=True):
            torch.testing.assert_close(mine[b, :, :length], theirs, rtol=1e-6, atol=1e-7)  # HF norms: fp32
            assert not mine[b, :, length:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama_micro", "qwen3_micro"])
def test_prompt_logits_and_cache_are_the_same_with_and_without(family, dtype):
    target = random_target(family, seed=3, dtype=dtype)
    _, cache, step = prompts(target)
    k, v, logits = cache.k_LBGSD.clone(), cache.v_LBGSD.clone(), step.logits_BTV.clone()
    embeds = torch.randn(len(LENGTHS) * M, target.info.hidden_size).to(dtype)
    run(target, cache, embeds.requires_grad_(), lora(target))
    _, again, step_again = prompts(target)
    assert torch.equal(cache.k_LBGSD, k) and torch.equal(cache.v_LBGSD, v)
    assert torch.equal(again.k_LBGSD, k) and torch.equal(again.v_LBGSD, v)
    assert torch.equal(step_again.logits_BTV, logits)
    assert cache.len_B.tolist() == LENGTHS


def test_only_the_rows_have_gradients_and_the_last_layers_tail_does_not_run():
    target = random_target("llama_micro", seed=3)
    _, cache, _ = prompts(target)
    adapters = lora(target)
    for one in adapters:
        for tensor in (one.a_LRE, one.b_LOR):
            tensor.requires_grad_()
    embeds = torch.randn(len(LENGTHS) * M, target.info.hidden_size, requires_grad=True)
    act = target.model.model.layers[-1].mlp.act_fn
    act.register_forward_pre_hook(lambda *_: pytest.fail("the last layer's MLP ran"))
    scores = run(target, cache, embeds, adapters)
    sum((s.square().sum() for s in scores), torch.zeros(())).backward()
    assert embeds.grad.norm() > 0 and not any(p.requires_grad for p in target.parameters())
    n = target.info.n_layers - 1
    for one in adapters:
        if one.layers[0] < n or one.key == "qkv":
            assert one.a_LRE.grad.norm() > 0 and one.b_LOR.grad.norm() > 0
        else:
            assert one.a_LRE.grad is None and one.b_LOR.grad is None
        if one.layers[0] == n and one.key == "qkv":
            values = target.info.n_kv_heads * target.info.head_dim
            assert not one.b_LOR.grad[0, -values:].any()


@pytest.mark.parametrize("family", FAMILIES, ids=name_of)
def test_gradients_are_those_of_finite_differences_with_joined_weights_or_without(family, monkeypatch):
    """All of them: of the inputs, and of A and B, of all layers at once or of one after the other."""
    target = made(family)
    _, cache, _ = prompts(target)
    embeds = torch.randn(len(LENGTHS) * M, target.info.hidden_size, dtype=torch.float64)
    adapters, rng = lora(target), torch.Generator().manual_seed(7)
    given = [embeds, *(x for one in adapters for x in (one.a_LRE, one.b_LOR))]
    with torch.no_grad():
        weights = [torch.randn(s.shape, generator=rng) for s in run(target, cache, embeds, adapters)]
    ways = [torch.randn(x.shape, generator=rng, dtype=torch.float64) * (x != 0) for x in given]

    def loss():
        found = zip(run(target, cache, embeds, adapters), weights, strict=True)
        return sum((100 * (s * weight).sum() for s, weight in found), torch.zeros(()))

    def slope(step=1e-5):
        sides = []
        for sign in (1, -2):
            for x, way in zip(given, ways, strict=True):
                x.data += sign * step * way
            with torch.no_grad():
                sides.append(float(loss()))
        for x, way in zip(given, ways, strict=True):
            x.data += step * way
        return (sides[0] - sides[1]) / step / 2

    outputs, found = slope(), []
    for x in given:
        x.requires_grad_()
    for joined, together in ((False, 2**25), (False, 1), (True, 2**25)):
        monkeypatch.setattr(lora_of_targets, "_TOGETHER", together)
        if joined and target.family.fused:
            target.fuse()
        grads = torch.autograd.grad(loss(), given, allow_unused=True)
        found.append([torch.zeros_like(x) if g is None else g for g, x in zip(grads, given, strict=True)])
        got = float(sum((g * way).sum() for g, way in zip(found[-1], ways, strict=True)))
        # the differences', and norms compute in fp32; so do routers, which are steep
        assert got == pytest.approx(outputs, rel=5e-3 if target.info.experts else 1e-5)
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_gradients_of_layers_in_one_stack_are_those_of_each_alone(monkeypatch):
    """In pieces too, and 0 where the loss does not come by: the last layer's o and MLP."""
    target = random_target("llama_micro", seed=3, dtype=torch.float64)
    _, cache, _ = prompts(target)
    embeds = torch.randn(len(LENGTHS) * M, target.info.hidden_size, dtype=torch.float64)
    alone, layers = lora(target), range(target.info.n_layers)
    sides = [[getattr(one, side) for one in alone] for side in ("a_LRE", "b_LOR")]
    for x in (*sides[0], *sides[1]):
        x.requires_grad_()
    keys = list(GROUPS)
    stacks = [
        Lora(key, layers, *(torch.cat(side[i :: len(keys)]) for side in sides)) for i, key in enumerate(keys)
    ]
    found = []
    for adapters, together in ((alone, 2**25), (stacks, 2**25), (stacks, 1)):
        monkeypatch.setattr(lora_of_targets, "_TOGETHER", together)
        loss = sum((s.square().sum() for s in run(target, cache, embeds, adapters)), torch.zeros(()))
        given = [*sides[0], *sides[1]]
        grads = torch.autograd.grad(loss, given, allow_unused=True, retain_graph=True)
        found.append([torch.zeros_like(x) if g is None else g for g, x in zip(grads, given, strict=True)])
    assert found[0][0].any() and len(layers) > 1
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("trained", [True, False])
def test_a_backward_that_leaves_lora_out_keeps_nothing(trained):
    """What it notes for the gradients of LoRA goes with the graph: nobody asks for them."""
    target = random_target("llama_micro", seed=3)
    _, cache, _ = prompts(target)
    adapters = lora(target)
    for one in adapters:
        one.a_LRE.requires_grad_(trained)
    embeds = torch.randn(len(LENGTHS) * M, target.info.hidden_size, requires_grad=True)
    (grad,) = torch.autograd.grad(sum(s.square().sum() for s in run(target, cache, embeds, adapters)), embeds)
    left = weakref.ref(embeds)
    del embeds
    gc.collect()
    assert grad.any() and left() is None


@torch.no_grad()
def test_the_inputs_live_as_long_as_the_run():
    """On a stream of its own the first layer may read them after the host has gone on."""
    target = random_target("llama_micro", seed=3)
    _, cache, _ = prompts(target)
    embeds = torch.randn(M, target.info.hidden_size)
    begun = SuffixRun(target, embeds, torch.arange(M), [Span((0, M), 0, (0, LENGTHS[0]))], lora(target))
    kept = weakref.ref(embeds)
    del embeds
    for layer in range(begun.last + 1):
        begun.step(*cache.prefix(layer))
    assert kept() is not None
    del begun
    assert kept() is None


def test_rows_in_another_dtype_than_the_weights():
    """Weights are cast as they are used: fp32 rows over a half-precision target."""
    half = random_target("qwen3_micro", seed=3, dtype=torch.bfloat16)
    wide = random_target("qwen3_micro", seed=3)
    wide.load_state_dict(half.state_dict())
    _, cache, _ = prompts(wide)
    embeds = torch.randn(len(LENGTHS) * M, wide.info.hidden_size)
    for mine, theirs in zip(run(half, cache, embeds, []), run(wide, cache, embeds, []), strict=True):
        assert torch.equal(mine, theirs)


def test_autocast_changes_nothing():
    target = random_target("llama_micro", seed=3)
    _, cache, _ = prompts(target)
    embeds = torch.randn(len(LENGTHS) * M, target.info.hidden_size)
    plain = run(target, cache, embeds, lora(target))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = run(target, cache, embeds, lora(target))
    assert all(torch.equal(a, b) for a, b in zip(plain, mixed, strict=True))

"""On a GPU: the gradient of flash attention, steps and drafts that wait for nothing, and CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longtrain.decoding.engine import Engine
from longtrain.decoding.roles import ChildChoice, TreeShape, Verdict
from longtrain.decoding.sampling import HashRng, Sampling
from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.objective import DSparkObjective
from longtrain.methods.dspark.runtime import DSparkRuntime
from longtrain.methods.dspark.spec import SPEC
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.step import OutputRequest, TokenBatch
from tests.decoding.tape import both
from tests.helpers import no_waiting

pytestmark = pytest.mark.gpu
SHAPE = {**SHAPES["llama_micro"], "num_hidden_layers": 4}
SMALL = Config(
    layers=[0, 2], n_layers=2, block_size=5, markov_rank=6, intermediate_size=40, anchor_every=1, mask_token=1
)
CONFIGS = {
    "all tokens": SMALL,
    "dflash": replace(SMALL, heads="none", sample_from_anchor=False),
    "a window": replace(SMALL, windows=[9, None]),
    "the target's keys": replace(SMALL, windows=[9, None], target_kv=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_training_in_bf16_is_close_to_fp64_and_does_not_wait(name, make_draft, make_batch):
    config = CONFIGS[name]
    exact = random_target(SHAPE, seed=1, dtype=torch.float64, device="cpu")
    half = random_target(SHAPE, seed=1, dtype=torch.float64, device="cpu").bfloat16().cuda()
    batch = make_batch(exact, [70, 3, 90, 1])
    plain = make_draft(exact, config)
    DSparkObjective(plain, exact, config)(batch).total.backward()
    truth = torch.cat([p.grad.flatten() for p in plain.parameters()])

    def distance(chunk):
        draft = make_draft(exact, config, torch.float32).cuda()
        objective = DSparkObjective(draft, half, replace(config, chunk_tokens=chunk))
        moved = batch.to("cuda", non_blocking=True)
        for guarded in (False, True):  # the first pass compiles and caches
            draft.zero_grad()
            torch.cuda.set_sync_debug_mode("error" if guarded else "default")
            try:
                with torch.autocast("cuda", torch.bfloat16):
                    loss = objective(moved)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            loss.total.backward()
        got = torch.cat([p.grad.flatten() for p in draft.parameters()]).double().cpu()
        return float((got - truth).norm() / truth.norm())

    whole, chunked = distance(0), distance(32)
    assert whole < 0.3
    assert chunked <= 1.2 * whole


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("children", [ChildChoice.POINT, ChildChoice.IID])
@torch.no_grad()
def test_drafting_does_not_wait_and_equals_the_cpu(name, children, make_draft):
    outputs_of, config = {}, CONFIGS[name]
    for device in ("cpu", "cuda"):
        target = random_target(SHAPE, seed=1, dtype=torch.float32, device="cpu").to(device)
        draft = make_draft(target, config, torch.float32).to(device)
        runtime = DSparkRuntime(draft, target, config)
        ids = torch.arange(2, 42, device=device).expand(2, 40)
        n_B = torch.tensor([40, 23], device=device)
        cache = target.new_cache(2, 80, 20)
        outputs = OutputRequest("last", runtime.outputs.hidden)
        step = target.forward(
            TokenBatch(torch.arange(40, device=device).expand(2, 40), ids, n_B=n_B), cache, outputs=outputs
        )
        cache.commit(None, n_B)
        runtime.start(ids, n_B, step, cache)
        root, shape = torch.tensor([5, 6], device=device), TreeShape((2, 4, 4), children)
        rng = HashRng(0, torch.arange(2, device=device))
        sampling = Sampling(temperature=0.0 if children is ChildChoice.POINT else 1.0)
        tree = runtime.propose(root, shape, sampling, rng)
        n, path = torch.tensor([3, 0], device=device), torch.tensor([[0, 1, 3, 0]] * 2, device=device)
        rows = TokenBatch(cache.len_B[:, None] + tree.depth_N, tree.tokens_BN)
        step = target.forward(rows, cache, outputs=OutputRequest("none", runtime.outputs.hidden))
        with no_waiting() if device == "cuda" else torch.no_grad():
            runtime.observe(tree, Verdict(path, n, root), step)
            tree = runtime.propose(root, shape, sampling, rng)
        outputs_of[device] = [tree.tokens_BN.cpu(), tree.parents_BN.cpu()]
        if tree.q_BNV is not None:
            outputs_of[device].append(tree.q_BNV.cpu())
    for here, there in zip(*outputs_of.values(), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [TreeShape((1,) * 5), TreeShape((3, 4, 2))], ids=str)
def test_cuda_graphs_of_cut_trees_give_the_same_texts(shape, make_draft):
    """As below, where the number of nodes differs from cycle to cycle."""
    target = random_target(SHAPE, dtype=torch.float32, device="cuda").fuse()
    draft = make_draft(target, SMALL, torch.float32).cuda().requires_grad_(False)
    draft.confidence_head.proj.weight.mul_(0.3)
    draft.confidence_head.proj.bias.fill_(0.8)
    parts = SPEC.attach(draft, target, SMALL, {"min_confidence": 0.3})
    prompts = [torch.randint(2, 97, (n,)).tolist() for n in (90, 7, 33)]
    options = {"max_new_tokens": 48, "ignore_eos": True}
    drafted = both(target, parts, prompts, shape=shape, **options)
    assert drafted.tokens == Engine(target).generate(prompts, **options).tokens


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shape", [TreeShape((1,) * 5), TreeShape((3, 4, 2))], ids=str)
def test_cuda_graphs_give_the_same_texts(name, shape, make_draft):
    """In fp32: kernels that sum in another order move logits by 1e-6, and texts of 48 tokens stay."""
    target = random_target(SHAPE, dtype=torch.float32, device="cuda").fuse()
    draft = make_draft(target, CONFIGS[name], torch.float32).cuda().requires_grad_(False)
    parts = SPEC.attach(draft, target, CONFIGS[name], {})
    gen = torch.Generator().manual_seed(0)
    for lengths in ((90, 7, 33), (300,)):
        prompts = [torch.randint(2, 97, (n,), generator=gen).tolist() for n in lengths]
        options = {"max_new_tokens": 48, "ignore_eos": True}
        drafted = both(target, parts, prompts, shape=shape, **options)
        assert drafted.tokens == Engine(target).generate(prompts, **options).tokens

"""On a GPU: nothing waits for the device, and flash attention gives the same draft."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longtrain.decoding.roles import ChildChoice, TreeShape, Verdict
from longtrain.decoding.sampling import HashRng, Sampling
from longtrain.methods.longspec.config import Config
from longtrain.methods.longspec.objective import LongSpecObjective
from longtrain.methods.longspec.runtime import LongSpecRuntime
from longtrain.targets.loading import random_target
from longtrain.targets.step import TargetStep, TokenBatch
from tests.helpers import no_waiting

pytestmark = pytest.mark.gpu
CONFIG = Config(window=12, chunk_tokens=32)


def test_training_in_bf16_is_close_to_fp64_and_does_not_wait(make_draft, make_batch):
    exact = random_target("llama_micro", seed=1, dtype=torch.float64, device="cpu")
    half = random_target("llama_micro", seed=1, dtype=torch.float64, device="cpu").bfloat16().cuda()
    batch = make_batch(exact, [70, 3, 90, 1])
    outputs = make_draft(exact, CONFIG)
    LongSpecObjective(outputs, exact, CONFIG)(batch).total.backward()
    truth = torch.cat([p.grad.flatten() for p in outputs.parameters()])

    def distance(chunk):
        draft = make_draft(exact, CONFIG, torch.float32).cuda()
        objective = LongSpecObjective(draft, half, replace(CONFIG, chunk_tokens=chunk))
        moved = batch.to("cuda", non_blocking=True)
        for guarded in (False, True):  # the first pass compiles and caches
            draft.zero_grad()
            with torch.autocast("cuda", torch.bfloat16), no_waiting() if guarded else torch.enable_grad():
                loss = objective(moved)
            loss.total.backward()
        got = torch.cat([p.grad.flatten() for p in draft.parameters()]).double().cpu()
        return float((got - truth).norm() / truth.norm())

    full, chunked = distance(0), distance(32)
    assert full < 0.3
    assert chunked <= 1.2 * full


@pytest.mark.parametrize("children", [ChildChoice.POINT, ChildChoice.IID])
def test_drafting_does_not_wait_and_equals_the_cpu(make_draft, children):
    laws = {}
    for device in ("cpu", "cuda"):
        target = random_target("llama_micro", seed=1, dtype=torch.float32, device="cpu").to(device)
        runtime = LongSpecRuntime(make_draft(target, CONFIG, torch.float32).to(device), target, CONFIG)
        ids = torch.arange(2, 42, device=device).expand(2, 40)
        n_B = torch.tensor([40, 23], device=device)
        cache = target.new_cache(2, 80, 20)
        with torch.no_grad():
            step = target.forward(
                TokenBatch(torch.arange(40, device=device).expand(2, 40), ids, n_B=n_B), cache
            )
            cache.commit(None, n_B)
            runtime.start(ids, n_B, step, cache)
            root, shape = torch.tensor([5, 6], device=device), TreeShape((2, 4, 4), children)
            rng = HashRng(0, torch.arange(2, device=device))
            sampling = Sampling(temperature=0.0 if children is ChildChoice.POINT else 1.0)
            runtime.propose(root, shape, sampling, rng)
            n = torch.tensor([3, 0], device=device)
            path = torch.tensor([[0, 1, 3, 0]] * 2, device=device)
            with no_waiting() if device == "cuda" else torch.no_grad():
                tree = runtime.propose(root, shape, sampling, rng)
                runtime.observe(tree, Verdict(path, n, root), TargetStep())
        laws[device] = [tree.tokens_BN.cpu(), tree.parents_BN.cpu()]
        if tree.q_BNV is not None:
            laws[device].append(tree.q_BNV.cpu())
    for here, there in zip(*laws.values(), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-4)

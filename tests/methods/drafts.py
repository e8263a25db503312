"""What tests of several drafts do alike: prompts, commits, the gradient in bf16, and drafting on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from longtrain.cache.base import Tree
from longtrain.decoding.roles import ChildChoice, TreeShape, Verdict
from longtrain.decoding.sampling import HashRng, Sampling
from longtrain.decoding.tree import visible
from longtrain.targets.loading import random_target
from longtrain.targets.step import OutputRequest, TokenBatch
from tests.helpers import no_waiting

LOGITS = OutputRequest()


def texts_of(*lengths, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 97, (n,), generator=gen).tolist() for n in lengths]


def path_to(tree, row, node):
    """Nodes from the root to a node."""
    nodes = []
    while node >= 0:
        nodes.append(node)
        node = int(tree.parents_BN[row, node])
    return nodes[::-1]


def path_tokens(tree, row, node):
    """Tokens from the root to a node."""
    return [int(tree.tokens_BN[row, i]) for i in path_to(tree, row, node)]


def prefilled(target, prompts, outputs=LOGITS):
    """Padded prompts, their lengths, a cache that holds them, and the target's step."""
    n = torch.tensor([len(p) for p in prompts])
    ids = torch.tensor([[*p, *[0] * (int(n.max()) - len(p))] for p in prompts])
    cache = target.new_cache(len(prompts), ids.shape[1] + 60, 40)
    pos = torch.arange(ids.shape[1]).expand_as(ids)
    step = target.forward(TokenBatch(pos, ids, n_B=n), cache, outputs=replace(outputs, logits="last"))
    cache.commit(None, n)
    return ids, n, cache, step


def accept(target, cache, runtime, tree, paths, *, levels=None):
    """Commit these paths (lists of nodes, root first; empty: the row is over) and tell the draft."""
    longest = 1 + (levels or int(tree.depth_N.max()))
    path_BP = torch.tensor([[*p, *[0] * (longest - len(p))] for p in paths])
    n_B = torch.tensor([len(p) for p in paths])
    rows = TokenBatch(
        cache.len_B[:, None] + tree.depth_N, tree.tokens_BN, mask=Tree(visible(tree.parents_BN))
    )
    step = target.forward(rows, cache, outputs=replace(runtime.outputs, logits="none"))
    cache.commit(path_BP, n_B)
    runtime.observe(tree, Verdict(path_BP, n_B, torch.zeros_like(n_B)), step)


def gradients(objective_of, module, target, config, batch, scale=1.0):
    """The loss of a batch, and the gradient of `scale` times it, by parameter."""
    module.zero_grad()
    loss = objective_of(module, target, config)(batch)
    (loss.total * scale).backward()
    return loss, {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def on(shape: Any) -> Callable[[str], Any]:
    """A function: device -> a random target of this shape there, in fp32."""
    return lambda device: random_target(shape, seed=1, dtype=torch.float32, device="cpu").to(device)


def check_gradients_in_bf16(
    draft_of: Callable[..., Any], objective_of: Callable[..., Any], exact: Any, config: Any, batch: Any
) -> None:
    """On a GPU: gradients in bf16 are close to those in fp64, chunked or not, and a step waits for nothing.

    Args:
        draft_of: (target, config, optional dtype) -> the draft.
        objective_of: (draft, target, config) -> its objective.
        exact: a target in fp64 on the CPU.
        config: hyperparameters.
        batch: documents.
    """
    half = copy.deepcopy(exact).bfloat16().cuda()
    plain = draft_of(exact, config)
    objective_of(plain, exact, config)(batch).total.backward()
    truth = torch.cat([p.grad.flatten() for p in plain.parameters()])

    def distance(chunk):
        draft = draft_of(exact, config, torch.float32).cuda()
        objective = objective_of(draft, half, replace(config, chunk_tokens=chunk))
        moved = batch.to("cuda", non_blocking=True)
        for guarded in (False, True):  # the first pass compiles and caches
            draft.zero_grad()
            with torch.autocast("cuda", torch.bfloat16), no_waiting() if guarded else torch.enable_grad():
                loss = objective(moved)
            loss.total.backward()
        got = torch.cat([p.grad.flatten() for p in draft.parameters()]).double().cpu()
        return float((got - truth).norm() / truth.norm())

    whole, chunked = distance(0), distance(32)
    assert whole < 0.3
    assert chunked <= 1.2 * whole


@torch.no_grad()
def check_drafting_on_both_devices(
    target_of: Callable[[str], Any], runtime_of: Callable[[Any, str], Any], children: ChildChoice
) -> None:
    """A GPU drafts as a CPU does, and a cycle waits for nothing.

    Args:
        target_of: device -> the target.
        runtime_of: (target, device) -> the draft at work.
        children: how the children of a node are chosen.
    """
    drafted = {}
    for device in ("cpu", "cuda"):
        target = target_of(device)
        runtime = runtime_of(target, device)
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
        drafted[device] = [tree.tokens_BN.cpu(), tree.parents_BN.cpu()]
        if tree.q_BNV is not None:
            drafted[device].append(tree.q_BNV.cpu())
    for here, there in zip(*drafted.values(), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-4)

"""Captured cycles of a draft with hidden states: a CUDA graph of one cycle is every cycle."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from longtrain.decoding import captured
from longtrain.decoding.engine import Engine
from longtrain.decoding.roles import Law, Parts, TreeShape, Verdict
from longtrain.decoding.sampling import HashCoins, Sampling
from longtrain.kernels.tree_attention.reference import masked_attention, visible_slots
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.modules import Eagle3Draft
from longtrain.methods.eagle3.runtime import Eagle3Runtime
from longtrain.methods.eagle3.spec import SPEC
from longtrain.targets.loading import random_target
from longtrain.targets.step import Rows, Want
from tests.decoding.micro import prompts_of, snapkv
from tests.decoding.micro import target as micro
from tests.decoding.tape import Tape

SMALL = {"layers": [0, 1], "draft_vocab_size": 40, "depths": 4}
CONFIGS = {
    "all positions": Config(**SMALL, fc_norm=True),
    "a window and sinks": Config(**SMALL, window=8, sinks=3, norm_output=True),
    "its own rope": Config(**SMALL, rope={"rope_type": "default", "rope_theta": 700.0}, head_dim=16),
}
CHAIN, TREE = TreeShape((1, 1, 1, 1)), TreeShape((3, 4, 2))
WARM = Sampling(temperature=0.9, top_p=0.95, seed=3)


def draft_of(target, config, dtype=torch.float64) -> Eagle3Draft:
    draft = Eagle3Draft(config, target.info).to(dtype)
    coins = torch.Generator().manual_seed(5)
    for name, p in draft.named_parameters():
        noise = torch.randn(p.shape, generator=coins, dtype=torch.float64)
        p.data = (1 + 0.2 * noise if "norm" in name else noise * 0.25).to(dtype)
    some = torch.randperm(target.info.vocab_size, generator=coins)[: config.draft_vocab_size]
    draft.draft_ids_K.copy_(some.sort().values)
    return draft


def everywhere(q_BHTD, k_BGSD, v_BGSD, len_B, mask, *, scale, base=0, nodes=None):
    """The twin of tree attention as it runs off a CPU: over all slots, without a look at the lengths."""
    rows, slots = q_BHTD.shape[2], k_BGSD.shape[2]
    visible = visible_slots(len_B, mask, rows=rows, slots=slots, base=base, nodes=nodes)
    return masked_attention(q_BHTD, k_BGSD, v_BGSD, visible, scale=scale)


@pytest.fixture
def tapes(monkeypatch) -> list[Tape]:
    """Cycles are recorded as on a GPU: the second one of a kind, and every later one is that record again."""
    made: list[Tape] = []

    class Graph:
        def __init__(self, tape: Tape) -> None:
            self.replay, self._pool = tape.replay, object()

        def pool(self) -> object:
            return self._pool

    def record(work, device, pool) -> Graph:
        made.append(Tape(work))
        return Graph(made[-1])

    monkeypatch.setattr(captured, "has_graphs", lambda device: True)
    monkeypatch.setattr(captured, "record", record)
    for place in ("arena", "history"):
        monkeypatch.setattr(f"longtrain.cache.{place}.tree_attention", everywhere)
    return made


def both(target, parts, prompts, **settings):
    """One call launched operator by operator; then that call twice from static buffers."""
    plain = Engine(target, parts, capture=False).generate(prompts, **settings)
    static = Engine(target, parts, capture=True)
    for _ in range(2):
        again = static.generate(prompts, **settings)
        assert again.tokens == plain.tokens and again.stats.rows == plain.stats.rows
    return plain, static


@pytest.mark.parametrize(
    ("name", "shape", "sampling"),
    [
        ("all positions", CHAIN, Sampling()),
        ("all positions", TreeShape((2, 4), Law.IID), WARM),
        ("a window and sinks", TREE, WARM),
        ("its own rope", TREE, Sampling()),
        ("all positions", TreeShape((3, 3, 3), keep=7), Sampling()),
    ],
)
def test_a_cycle_can_be_replayed(name, shape, sampling, tapes):
    target = micro()
    parts = SPEC.attach(draft_of(target, CONFIGS[name]), target, CONFIGS[name], {})
    options = {"max_new_tokens": 12, "sampling": sampling, "ignore_eos": True}
    drafted, static = both(target, parts, prompts_of(30, 1, 12), shape=shape, **options)
    assert len(tapes) == 1
    if shape.law is Law.POINT:
        assert drafted.tokens == Engine(target).generate(prompts_of(30, 1, 12), **options).tokens
    static.generate(prompts_of(8, 25, 3), shape=shape, **options)
    assert len(tapes) == 1  # prompts of other lengths come with the same graph


@pytest.mark.parametrize("name", ["all positions", "a window and sinks"])
def test_evicted_prompts(name, tapes):
    target = micro()
    parts = SPEC.attach(draft_of(target, CONFIGS[name]), target, CONFIGS[name], {})
    evicted = Parts(evictor=snapkv(12), name="snapkv")
    options = {"max_new_tokens": 12, "ignore_eos": True}
    drafted, _ = both(target, parts.merge(evicted), prompts_of(40, 40), shape=TREE, **options)
    assert drafted.tokens == Engine(target, evicted).generate(prompts_of(40, 40), **options).tokens
    assert len(tapes) == 1


@contextmanager
def no_waiting():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("law", [Law.POINT, Law.IID])
@torch.no_grad()
def test_drafting_does_not_wait_and_equals_the_cpu(name, law):
    laws, config = {}, CONFIGS[name]
    for device in ("cpu", "cuda"):
        target = random_target("llama_micro", seed=1, dtype=torch.float32, device="cpu").to(device)
        runtime = Eagle3Runtime(draft_of(target, config, torch.float32).to(device), target, config)
        ids = torch.arange(2, 42, device=device).expand(2, 40)
        n_B = torch.tensor([40, 23], device=device)
        cache = target.new_cache(2, 80, 20)
        want = Want("last", runtime.want.hidden)
        step = target.forward(
            Rows(torch.arange(40, device=device).expand(2, 40), ids, n_B=n_B), cache, want=want
        )
        cache.commit(None, n_B)
        runtime.start(ids, n_B, step, cache)
        root, shape = torch.tensor([5, 6], device=device), TreeShape((2, 4, 4), law)
        coins = HashCoins(0, torch.arange(2, device=device))
        sampling = Sampling(temperature=0.0 if law is Law.POINT else 1.0)
        tree = runtime.propose(root, shape, sampling, coins)
        n, path = torch.tensor([3, 0], device=device), torch.tensor([[0, 1, 3, 0]] * 2, device=device)
        rows = Rows(cache.len_B[:, None] + tree.depth_N, tree.tokens_BN)
        step = target.forward(rows, cache, want=Want("none", runtime.want.hidden))
        with no_waiting() if device == "cuda" else torch.no_grad():
            runtime.observe(tree, Verdict(path, n, root), step)
            tree = runtime.propose(root, shape, sampling, coins)
        laws[device] = [tree.tokens_BN.cpu(), tree.parents_BN.cpu()]
        if tree.q_BNV is not None:
            laws[device].append(tree.q_BNV.cpu())
    for here, there in zip(*laws.values(), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
def test_cuda_graphs_give_the_same_texts(name, shape):
    """In fp32: kernels that sum in another order move logits by 1e-6, and texts of 48 tokens stay."""
    target = random_target("llama_micro", dtype=torch.float32, device="cuda").fuse()
    draft = draft_of(target, CONFIGS[name], torch.float32).cuda().requires_grad_(False)
    parts = SPEC.attach(draft, target, CONFIGS[name], {})
    for prompts in (prompts_of(90, 7, 33), prompts_of(300)):
        options = {"max_new_tokens": 48, "ignore_eos": True}
        drafted, _ = both(target, parts, prompts, shape=shape, **options)
        assert drafted.tokens == Engine(target).generate(prompts, **options).tokens

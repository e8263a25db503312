"""Decoding from static buffers: the same texts, cycle for cycle, and a cycle that can be replayed.

A CUDA graph repeats operators on the same memory; on a CPU `Tape` does so, and finds whoever asks the host.
"""

from __future__ import annotations

import pytest
import torch

from longtrain.decoding import captured
from longtrain.decoding import engine as engine_module
from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.evict import Budget
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import ChildChoice, Parts, TreeShape
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConflictError
from longtrain.methods.policies.adakv import AdaKV
from longtrain.targets.loading import random_target
from tests.families import usual
from tests.helpers import Recall, attached, noisy_longspec

from .micro import prompts_of, snapkv
from .micro import target as micro
from .tape import Tape, both, same, tapes  # noqa: F401 (a fixture)
from .test_evict import Ragged
from .toys import Letters, OracleDraft

CHAIN, TREE = TreeShape((1, 1, 1, 1)), TreeShape((3, 4, 2))
WARM = Sampling(temperature=0.9, top_p=0.95, seed=3)
ONE, THREE = prompts_of(11), prompts_of(7, 1, 12)


@pytest.mark.corners
@pytest.mark.parametrize("prompts", [ONE, THREE], ids=["one", "three"])
@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama_micro", "qwen3_micro"])
def test_plain_decoding(family, sampling, prompts, tapes):  # noqa: F811
    both(micro(family), None, prompts, max_new_tokens=10, sampling=sampling, ignore_eos=True)
    assert len(tapes) == 1


@pytest.mark.parametrize(
    ("shape", "prompts", "sampling"),
    [
        (CHAIN, ONE, WARM),
        (TREE, THREE, Sampling()),
        (TreeShape((1, 1, 1), ChildChoice.IID), THREE, WARM),
        (TreeShape((2, 4), ChildChoice.IID), ONE, WARM),
        pytest.param(CHAIN, THREE, Sampling(), marks=pytest.mark.slow),
        pytest.param(TREE, THREE, WARM, marks=pytest.mark.slow),
        pytest.param(TreeShape((2, 4), ChildChoice.IID), THREE, WARM, marks=pytest.mark.slow),
    ],
)
def test_longspec(sampling, shape, prompts, tapes):  # noqa: F811
    target = micro()
    parts = Parts(draft=noisy_longspec(target), name="longspec")
    both(target, parts, prompts, max_new_tokens=12, sampling=sampling, shape=shape, ignore_eos=True)
    assert len(tapes) == 1


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
def test_accepted_paths_move_to_their_place(shape, tapes):  # noqa: F811
    """A draft that is mostly right: rows commit differently many nodes."""
    target = micro()
    texts = Engine(target, capture=False).generate(THREE, max_new_tokens=26, ignore_eos=True).tokens
    parts = Parts(draft=Recall(texts), name="recall")
    drafted = both(target, parts, THREE, max_new_tokens=26, shape=shape, ignore_eos=True)
    assert drafted.tokens == texts and drafted.stats.tau > 2
    assert len({c.accepted for row in drafted.stats.rows for c in row}) > 2
    assert len(tapes) == 1


def test_one_arena_serves_other_lengths_shapes_and_seeds(tapes):  # noqa: F811
    target = micro()
    draft = noisy_longspec(target)
    static = Engine(target, Parts(draft=draft, name="longspec"), capture=True)
    plain = Engine(target, Parts(draft=noisy_longspec(target), name="longspec"), capture=False)
    calls = [
        (prompts_of(5, 9), CHAIN, Sampling()),
        (prompts_of(17, 2), CHAIN, Sampling()),
        (prompts_of(17, 2), PLAIN, Sampling(0.9, seed=1)),
        (prompts_of(8, 8), PLAIN, Sampling(0.9, seed=2)),
        (prompts_of(30, 4), TREE, WARM),
        (prompts_of(5, 9), CHAIN, Sampling()),
        (prompts_of(6, 6), TREE, WARM),
    ]
    for prompts, shape, sampling in calls:
        settings = {"max_new_tokens": 12, "shape": shape, "sampling": sampling, "ignore_eos": True}
        same(plain.generate(prompts, **settings), static.generate(prompts, **settings))
    arena = static._kept.arena
    # The chain's graph went when the tree made the draft's ring larger; nothing else was recorded twice.
    assert len(tapes) == 4
    static.generate(THREE, max_new_tokens=20, ignore_eos=True)
    assert static._kept.arena is not arena
    long = prompts_of(230)
    same(plain.generate(long, max_new_tokens=20), static.generate(long, max_new_tokens=20))


def test_texts_end_where_they_did(tapes):  # noqa: F811
    """Stop ids and strings are noticed a cycle late; nothing of that cycle is seen."""
    target = micro()
    target.tokenizer = Letters()
    try:
        free = Engine(target, capture=False).generate(THREE, max_new_tokens=26, ignore_eos=True)
        parts = Parts(draft=Recall(free.tokens), name="recall")
        ids = [free.tokens[0][9], free.tokens[1][16], free.tokens[2][0]]
        stop = [free.texts[1][18:22]]
        for settings in (
            {"stop_ids": ids},
            {"stop": stop, "ignore_eos": True},
            {"stop_ids": ids, "min_new_tokens": 12},
            {"max_new_tokens": 1},
            {"max_new_tokens": 2},
            {"after": prompts_of(2, 3, 1), "ignore_eos": True},
        ):
            for shape in (PLAIN, CHAIN, TREE):
                out = both(target, parts, THREE, **{"max_new_tokens": 26, "shape": shape, **settings})
                if "stop_ids" in settings:
                    assert "stop_id" in out.finish
                if "stop" in settings:
                    assert "stop_string" in out.finish
    finally:
        target.tokenizer = None


def test_the_stream_is_the_same():
    target, heard = micro(), {}
    texts = Engine(target, capture=False).generate(THREE, max_new_tokens=30).tokens
    for capture in (False, True):
        heard[capture] = []
        Engine(target, Parts(draft=Recall(texts)), capture=capture).generate(
            THREE, max_new_tokens=30, stream=lambda *news, to=heard[capture]: to.append(news)
        )
    assert heard[True] == heard[False]


@pytest.mark.parametrize("draft", [False, True])
def test_after_eviction_rows_and_positions_differ(draft, tapes):  # noqa: F811
    target = micro()
    prompts = prompts_of(40, 40, 40)
    parts = Parts(draft=noisy_longspec(target) if draft else None, evictor=snapkv(12), name="both")
    out = both(target, parts, prompts, max_new_tokens=20, ignore_eos=True)
    assert out.stats.kept_entries == [12.0] * 3
    whole = Engine(target, Parts(evictor=snapkv(400)), capture=True).generate(prompts, max_new_tokens=20)
    same(Engine(target, capture=False).generate(prompts, max_new_tokens=20), whole)


@pytest.mark.parametrize(
    ("across", "shape", "sampling"),
    [
        ("heads", PLAIN, Sampling()),
        ("layers", CHAIN, WARM),
        ("layers", TREE, Sampling()),
        ("none", TREE, WARM),
    ],
    ids=str,
)
def test_after_eviction_heads_may_differ(across, shape, sampling, tapes):  # noqa: F811
    """Prompts of other lengths too, one of them within its budget; text is read after the eviction."""
    target, prompts = micro(), prompts_of(40, 9, 31)
    evictor = Ragged() if across == "none" else AdaKV(Budget(12), over=snapkv(12), across=across)
    parts = Parts(draft=noisy_longspec(target), evictor=evictor, name="both")
    how = {"max_new_tokens": 12, "shape": shape, "sampling": sampling, "ignore_eos": True}
    out = both(target, parts, prompts, **how, after=prompts_of(2, 3, 1))
    assert out.kept.n_LBG.unique().numel() > 3 and len(tapes) == 1
    texts = [tokens[:8] for tokens in out.tokens]
    recalled = Parts(draft=Recall(texts), evictor=evictor, name="recall")
    assert both(target, recalled, prompts, **how, after=prompts_of(2, 3, 1)).tokens == out.tokens


def test_one_graph_serves_evicted_prompts_of_other_lengths(tapes):  # noqa: F811
    """The buffer grows once; prompts within the budget are in it as well."""
    target = micro()
    evictor = AdaKV(Budget(12), over=snapkv(12), across="layers")
    static = Engine(target, Parts(evictor=evictor), capture=True)
    plain = Engine(target, Parts(evictor=evictor), capture=False)
    for prompts in (prompts_of(40, 31), prompts_of(60, 12), prompts_of(10, 3), prompts_of(25, 41)):
        how = {"max_new_tokens": 12, "ignore_eos": True}
        ours, theirs = static.generate(prompts, **how), plain.generate(prompts, **how)
        same(theirs, ours)
        entries = theirs.stats.cache_bytes - ours.stats.cache_bytes
        assert abs(entries) < 4000 and ours.stats.cache_bytes_full == theirs.stats.cache_bytes_full
    assert len(tapes) == 1


def test_bytes_are_those_of_the_slots_asked_for():
    target = micro()
    plain = Engine(target, capture=False).generate(ONE, max_new_tokens=20).stats
    static = Engine(target, capture=True).generate(ONE, max_new_tokens=20).stats
    assert static.cache_bytes == static.cache_bytes_full == plain.cache_bytes + 8  # one more length


def test_what_cannot_be_captured_is_refused_or_left(monkeypatch):
    target = micro()
    thinned = attached("kvzap", target, {"budget_tokens": 12, "decoding": True}, hidden_dim=8)
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "prefill", None)  # refused before it
        with pytest.raises(ConflictError, match="'kvzap' evicts during decoding"):
            Engine(target, thinned, capture=True).generate(prompts_of(40), max_new_tokens=4)
    toy = Parts(draft=OracleDraft(target), name="toy")
    with pytest.raises(ConflictError, match="draft of 'toy' does not update its state in place"):
        Engine(target, toy, capture=True).generate(ONE, max_new_tokens=4)
    big = Parts(draft=noisy_longspec(target))
    with pytest.raises(ConflictError, match="151 nodes, and at most 128"):
        Engine(target, big, capture=True, limits=Limits(nodes=200)).generate(
            ONE, max_new_tokens=4, shape=TreeShape((50, 100))
        )
    assert Engine(target)._static_buffers(None, [PLAIN], 100) is None  # a CPU has no graphs


def test_a_taped_cycle_that_asks_the_host_is_found():
    with pytest.raises(AssertionError, match="asks the host"):
        Tape(lambda: torch.ones(2).sum().item())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [PLAIN, CHAIN, TREE, TreeShape((2, 4), ChildChoice.IID)], ids=str)
@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama_micro", "qwen3_micro"])
def test_cuda_graphs_give_the_same_texts(family, sampling, shape):
    """In fp32: kernels that sum in another order move logits by 1e-6, and texts of 48 tokens stay."""
    target = random_target(family, dtype=torch.float32, device="cuda")
    draft = noisy_longspec(target)
    draft.draft.to("cuda")
    parts = Parts(draft=draft, name="longspec")
    for prompts in (ONE, THREE):
        both(target, parts, prompts, max_new_tokens=48, sampling=sampling, shape=shape, ignore_eos=True)
    auto = Engine(target, parts)
    auto.generate(ONE, max_new_tokens=48, shape=shape, ignore_eos=True)
    assert auto._kept.arena is not None


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("shape", [PLAIN, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_cuda_graphs_after_eviction_give_the_same_texts(shape, fused):
    """In fp32, as above; heads have different numbers of entries."""
    target = random_target("qwen3_micro", dtype=torch.float32, device="cuda")
    target = target.fuse() if fused else target.unfuse()
    draft = noisy_longspec(target)
    draft.draft.to("cuda")
    parts = Parts(draft=draft, evictor=AdaKV(Budget(20), over=snapkv(20), across="layers"), name="both")
    for prompts in (prompts_of(90), prompts_of(60, 10, 45), prompts_of(70)):
        how = {"max_new_tokens": 48, "shape": shape, "ignore_eos": True}
        both(target, parts, prompts, **how)
        assert Engine(target, parts).generate(prompts, **how).stats.capture_s > 0


@pytest.mark.corners
@pytest.mark.parametrize("shape", [PLAIN, TREE], ids=["plain", "tree"])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_experts_and_sinks_ask_the_host_for_nothing(family, shape, tapes):  # noqa: F811
    target = random_target(usual(family))
    parts = Parts(draft=noisy_longspec(target), name="longspec")
    both(target, parts, THREE, max_new_tokens=12, shape=shape, ignore_eos=True)
    assert len(tapes) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_cuda_graphs_of_experts_give_the_same_texts(family, dtype, monkeypatch):
    """A graph repeats the kernels of the steps before it, to the bit. In fp32 the texts are also those of
    uncaptured steps, whose attention is another implementation: in bf16 its rounding changes texts.
    """
    target = random_target(usual(family), dtype=dtype, device="cuda").fuse()
    draft = noisy_longspec(target)
    draft.draft.to("cuda")
    parts = Parts(draft=draft, name="longspec")
    for shape in (PLAIN, TREE):
        settings = {"max_new_tokens": 48, "shape": shape, "ignore_eos": True}
        replayed = Engine(target, parts, capture=True).generate(THREE, **settings)
        with monkeypatch.context() as patch:
            patch.setattr(captured, "has_graphs", lambda device: False)
            launched = Engine(target, parts, capture=True).generate(THREE, **settings)
        assert replayed.stats.capture_s > 0 == launched.stats.capture_s
        same(launched, replayed)
        if dtype == torch.float32:
            both(target, parts, THREE, **settings)


@pytest.mark.gpu
def test_graphs_are_made_anew_where_the_arena_grew():
    """The first arena's graphs go, and their memory with them; the next ones start a pool of their own."""
    target = random_target("llama_micro", dtype=torch.float32, device="cuda")
    static = Engine(target, capture=True)
    for prompts in (ONE, THREE, ONE):
        both_ways = [
            engine.generate(prompts, max_new_tokens=48, ignore_eos=True).tokens
            for engine in (static, Engine(target, capture=False))
        ]
        assert both_ways[0] == both_ways[1]


@pytest.mark.gpu
def test_a_graph_is_made_anew_where_weights_moved():
    target = random_target("llama_micro", dtype=torch.float32, device="cuda")
    static = Engine(target, capture=True)
    settings = {"max_new_tokens": 32, "ignore_eos": True}
    first = static.generate(THREE, **settings)
    for change in (target.fuse, target.unfuse):
        change()
        torch.cuda.empty_cache()
        assert static.generate(THREE, **settings).tokens == first.tokens

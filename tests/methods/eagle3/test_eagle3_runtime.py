"""The draft at work against its own module, step by step from scratch; texts are the target's own."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from longtrain.cache.ring import DraftRing
from longtrain.decoding.engine import AUTO, PLAIN, Engine
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import ChildChoice, Parts, TreeShape
from longtrain.decoding.sampling import HashRng, Sampling
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.runtime import Eagle3Runtime
from longtrain.methods.eagle3.spec import SPEC
from longtrain.methods.policies.adakv import AdaKV
from longtrain.methods.policies.snapkv import SnapKV
from longtrain.methods.rope import ModuleRope
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.step import OutputRequest
from tests.methods.drafts import accept, path_to, path_tokens, prefilled, texts_of

WARM = Sampling(temperature=1.0)
SMALL = {"layers": [0, 1], "draft_vocab_size": 40, "depths": 4}
CONFIGS = {
    "as published": Config(**SMALL),
    "window": Config(**SMALL, window=6),
    "window and sinks": Config(**SMALL, window=6, sinks=3),
    "3.1": Config(**SMALL, fc_norm=True, norm_output=True),
    "gpt-oss": Config(**SMALL, norm_before_fc=True, norm_before_residual=True),
    "its own shape": Config(
        layers=[1],
        draft_vocab_size=0,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        qk_norm=True,
        attention_bias=True,
        own_embeddings=True,
        intermediate_size=32,
        rope={"rope_type": "default", "rope_theta": 500.0},
    ),
}


@torch.no_grad()
def law_of(draft, target, config, text, path):
    """The law after some drafted tokens, over the target's vocabulary, by the module's own functions.

    Every row of the text has the target's own features; the chain goes on below its last row. `path` begins
    with the root.
    """
    ids, n = torch.tensor([*text, path[0]]), len(text)
    states = target.packed(
        ids, torch.arange(n + 1), (0, n + 1), OutputRequest("none", hidden=draft.layers)
    ).hidden
    feature = draft.feature([states[layer][:n] for layer in draft.layers])
    embed = target.embed if draft.embed_tokens is None else draft.embed_tokens
    rope, attention = ModuleRope(config, target), draft.self_attn
    entry, residual = draft.enter(embed(ids[1:]), feature)
    keys, values = attention.keys_values(entry, rope(torch.arange(n)))
    entry, residual = entry[-1:], residual[-1:]
    for depth, following in enumerate([*path[1:], None]):
        turn = rope(torch.tensor([n - 1 + depth]))
        if depth:
            key, value = attention.keys_values(entry, turn)
            keys, values = torch.cat((keys, key)), torch.cat((values, value))
        place = torch.arange(len(keys))
        near = place >= n - 1 + depth - config.window if config.window else place >= 0
        seen = near | (place < config.sinks)
        q_HD = attention.query(entry, turn)[0]
        groups = q_HD.shape[0] // keys.shape[1]
        k, v = (part[seen].repeat_interleave(groups, 1) for part in (keys, values))
        share = (torch.einsum("hd,thd->ht", q_HD, k) * draft.scale).softmax(-1)
        out, carried = draft.after_attention(residual, torch.einsum("ht,thd->hd", share, v)[None])
        if following is None:
            children = torch.zeros(target.info.vocab_size, dtype=out.dtype)
            children[draft.draft_ids_K] = draft.lm_head(out)[0].softmax(-1)
            return children
        entry, residual = draft.enter(embed(torch.tensor([following])), carried)


@pytest.mark.corners
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("widths", [(1, 1, 1, 1), (2, 4, 3)], ids=str)
@torch.no_grad()
def test_every_node_has_the_law_of_the_recursion_from_scratch(name, widths, llama, make_draft):
    """Prompts shorter and longer than the window; far more tokens than a ring holds; a row that is over."""
    config = CONFIGS[name]
    draft = make_draft(llama, config)
    runtime = Eagle3Runtime(draft, llama, config)
    texts = texts_of(29, 1, 5)
    ids, n_B, cache, step = prefilled(llama, texts, runtime.outputs)
    runtime.start(ids, n_B, step, cache)
    rng, roots = HashRng(1, torch.arange(3)), torch.tensor([5, 6, 7])
    inner = 1 + sum(widths[:-1])
    for cycle in range(4):
        tree = runtime.propose(roots, TreeShape(widths, ChildChoice.IID), WARM, rng)
        for row, node in itertools.product(range(3), range(inner)):
            path = path_tokens(tree, row, node)
            children = law_of(draft, llama, config, texts[row], path)
            torch.testing.assert_close(tree.q_BNV[row, node], children, rtol=1e-6, atol=1e-9)
        leaf = inner + cycle % widths[-1]
        paths = [path_to(tree, row, leaf)[: len(widths) + 1 - (row + cycle) % 3] for row in range(3)]
        if cycle == 2:
            paths[1] = []
        accept(llama, cache, runtime, tree, paths)
        for row, path in enumerate(paths):
            texts[row] += [int(tree.tokens_BN[row, i]) for i in path]
        roots = (roots * 7 + 1) % 97
        if cycle == 2:
            roots[1] = tree.tokens_BN[1, 0]


@pytest.mark.parametrize("name", ["as published", "window and sinks"])
@pytest.mark.parametrize("keep", [None, 2], ids=["", "as many nodes as a chain"])
@torch.no_grad()
def test_after_many_cycles_its_state_is_that_of_a_fresh_start(name, keep, llama, make_draft):
    config = CONFIGS[name]
    runtime = Eagle3Runtime(make_draft(llama, config), llama, config)
    texts = texts_of(4, 17)
    ids, n_B, cache, step = prefilled(llama, texts, runtime.outputs)
    runtime.start(ids, n_B, step, cache)
    rng, roots = HashRng(1, torch.arange(2)), torch.tensor([5, 6])
    for cycle in range(8):
        tree = runtime.propose(roots, TreeShape((2, 2), keep=keep), Sampling(), rng)
        paths = [path_to(tree, row, keep or 3)[: 1 + (row + cycle) % 3] for row in range(2)]
        accept(llama, cache, runtime, tree, paths, levels=2)
        for row, path in enumerate(paths):
            texts[row] += [int(tree.tokens_BN[row, i]) for i in path]
        roots = (roots * 7 + 1) % 97
    fresh = Eagle3Runtime(runtime.draft, llama, config)
    ids, n_B, cache, step = prefilled(llama, texts, fresh.outputs)
    fresh.start(ids, n_B, step, cache)
    torch.testing.assert_close(runtime._feature_BE, fresh._feature_BE, rtol=1e-9, atol=1e-12)
    for row, text in enumerate(texts):
        held = len(text) - 1
        if isinstance(runtime.rows, DraftRing):
            slots = [*range(3), *(3 + (p - 3) % 6 for p in range(held - 6, held))]
        else:
            slots = list(range(held))
        for mine, other in zip(runtime.rows.tensors()[:2], fresh.rows.tensors()[:2], strict=True):
            torch.testing.assert_close(mine[row][:, slots], other[row][:, slots], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [0, 7])
def test_a_long_prompt_is_read_in_chunks(size, llama, make_draft, monkeypatch):
    config = replace(CONFIGS["window and sinks"], window=size) if size else CONFIGS["as published"]
    prompts = texts_of(50, 21)
    outputs = Engine(llama, SPEC.attach(make_draft(llama, config), llama, config, {}))
    rows = outputs.generate(prompts, max_new_tokens=12, ignore_eos=True, shape=TreeShape((3, 3)))
    monkeypatch.setattr("longtrain.methods.eagle3.runtime.CHUNK", 8)
    engine = Engine(llama, SPEC.attach(make_draft(llama, config), llama, config, {}))
    again = engine.generate(prompts, max_new_tokens=12, ignore_eos=True, shape=TreeShape((3, 3)))
    for mine, other in zip(outputs.parts.draft.tensors(), engine.parts.draft.tensors(), strict=True):
        torch.testing.assert_close(mine, other)
    assert again.stats.rows == rows.stats.rows


@torch.no_grad()
def test_beam_is_the_joint_top_k_of_the_drafts_vocabulary(llama, make_draft):
    config = CONFIGS["3.1"]
    draft = make_draft(llama, config)
    runtime = Eagle3Runtime(draft, llama, config)
    text = list(range(10, 30))
    ids, n_B, cache, step = prefilled(llama, [text], runtime.outputs)
    runtime.start(ids, n_B, step, cache)
    tree = runtime.propose(torch.tensor([3]), TreeShape((4, 6, 5)), Sampling(), HashRng(0, torch.zeros(1)))
    level, first = {(): 0.0}, 1
    for width in (4, 6, 5):
        scores = {}
        for path in level:
            children = law_of(draft, llama, config, text, [3, *path]).log()
            scores |= {(*path, t): level[path] + float(children[t]) for t in draft.draft_ids_K.tolist()}
        best = sorted(scores, key=lambda p: -scores[p])[:width]
        level = {p: scores[p] for p in best}
        nodes = [path_to(tree, 0, i)[1:] for i in range(first, first + width)]
        assert [tuple(int(tree.tokens_BN[0, j]) for j in path) for path in nodes] == best
        first += width


@torch.no_grad()
def test_what_is_kept_of_a_tree_is_the_most_probable_of_all_that_was_seen(llama, make_draft):
    """Against all candidates by the recursion: the best of a level are looked below, the best of all kept."""
    config = CONFIGS["window and sinks"]
    draft = make_draft(llama, config)
    runtime = Eagle3Runtime(draft, llama, config)
    texts, roots, keep = texts_of(20, 4), [3, 9], 9
    ids, n_B, cache, step = prefilled(llama, texts, runtime.outputs)
    runtime.start(ids, n_B, step, cache)
    shape = TreeShape((3, 4, 2), keep=keep)
    tree = runtime.propose(torch.tensor(roots), shape, Sampling(), HashRng(0, torch.zeros(2)))
    depths = []
    for row, (text, root) in enumerate(zip(texts, roots, strict=True)):
        level, seen = {(): 0.0}, {}
        for width in shape.widths:
            scores = {}
            for path in level:
                children = law_of(draft, llama, config, text, [root, *path]).log()
                scores |= {(*path, t): level[path] + float(children[t]) for t in draft.draft_ids_K.tolist()}
            best = sorted(scores, key=lambda p: -scores[p])
            seen |= {p: scores[p] for p in best[:keep]}
            level = {p: scores[p] for p in best[:width]}
        paths = [path_to(tree, row, node)[1:] for node in range(1, 1 + keep)]
        found = [tuple(int(tree.tokens_BN[row, node]) for node in path) for path in paths]
        assert sorted(found) == sorted(sorted(seen, key=lambda p: -seen[p])[:keep])
        assert tree.depth_N[row].tolist() == [0, *map(len, found)] == sorted(tree.depth_N[row].tolist())
        depths.append(tree.depth_N[row].tolist())
    assert depths[0] != depths[1]  # rows spend their nodes at other depths
    with pytest.raises(ConfigError, match=r"41 nodes kept of a tree whose children .*; allowed: 1 to 40"):
        runtime.check_shape(TreeShape((2, 2), keep=41))
    with pytest.raises(ConfigError, match="kept of a tree whose children are 'iid'"):
        runtime.check_shape(TreeShape((2, 2), ChildChoice.IID, keep=4))


def even(budget):
    return SnapKV(Budget(budget), window=8, kernel=5)


def uneven(budget):
    return AdaKV(Budget(budget), over=even(budget))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("as published", "llama_micro"),
        ("window and sinks", "llama_micro"),
        ("its own shape", "qwen3_micro"),
        ("window and sinks", "gemma3_micro"),
    ],
)
def test_greedy_output_is_the_targets_own(name, family, make_draft):
    target = random_target(family, seed=1, dtype=torch.float64)
    parts = SPEC.attach(make_draft(target, CONFIGS[name]), target, CONFIGS[name], {})
    prompts = texts_of(1, 5, 33, seed=2)
    plain = Engine(target).generate(prompts, max_new_tokens=16, ignore_eos=True)
    engine = Engine(target, parts)
    shapes = (TreeShape((1, 1, 1, 1)), TreeShape((4, 6, 6)), AUTO, TreeShape((4, 4, 4, 4), keep=12))
    for shape, order in zip(shapes, (1, -1, 1, 1), strict=True):
        drafted = engine.generate(prompts[::order], max_new_tokens=16, ignore_eos=True, shape=shape)
        assert drafted.tokens == plain.tokens[::order]
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=3)  # a deterministic draft repeats the plain draws
    outputs = Engine(target).generate(prompts, max_new_tokens=16, sampling=sampling, ignore_eos=True)
    got = engine.generate(
        prompts, max_new_tokens=16, sampling=sampling, ignore_eos=True, shape=TreeShape((3, 4))
    )
    assert got.tokens == outputs.tokens


@pytest.mark.corners
@pytest.mark.parametrize("name", ["as published", "window and sinks"])
@pytest.mark.parametrize("evictor", [even, uneven])
def test_evicted_caches(name, evictor, llama, make_draft):
    parts = SPEC.attach(make_draft(llama, CONFIGS[name]), llama, CONFIGS[name], {})
    evicted = Parts(evictor=evictor(12), name="evictor")
    prompts = texts_of(40, 31)
    options = {"max_new_tokens": 20, "ignore_eos": True, "after": texts_of(3, 6, seed=4)}
    drafted = Engine(llama, parts.merge(evicted)).generate(prompts, shape=TreeShape((2, 3)), **options)
    assert drafted.tokens == Engine(llama, evicted).generate(prompts, **options).tokens


@pytest.mark.corners
@pytest.mark.parametrize("name", ["as published", "window and sinks"])
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_quantised_cache(name, bits, make_draft):
    """Blocks of 128 tokens: the draft sees hidden states alone, whatever the target reads."""
    from longtrain.cache.named import cache_maker

    shape = {**SHAPES["llama_micro"], "head_dim": 64, "hidden_size": 64, "intermediate_size": 96}
    target = random_target(shape, seed=4, dtype=torch.float64)
    info = target.info
    sizes = {key: getattr(info, key) for key in ("n_layers", "n_heads", "n_kv_heads", "head_dim")}
    quantised = Parts(
        cache=cache_maker(bits, {}, **sizes, device=target.device, dtype=target.dtype), name=bits
    )
    parts = SPEC.attach(make_draft(target, CONFIGS[name]), target, CONFIGS[name], {}).merge(quantised)
    prompts = texts_of(300, 140)
    options = {"max_new_tokens": 16, "ignore_eos": True}
    plain = Engine(target, quantised).generate(prompts, **options)
    for capture, widths in ((False, (1, 1, 1)), (True, (2, 3))):
        drafted = Engine(target, parts, capture=capture).generate(prompts, shape=TreeShape(widths), **options)
        assert drafted.tokens == plain.tokens


@torch.no_grad()
def test_sampled_children_follow_the_law_they_come_with(llama, make_draft):
    config = CONFIGS["as published"]
    runtime = Eagle3Runtime(make_draft(llama, config), llama, config)
    B = 400
    ids, n_B, cache, step = prefilled(llama, [list(range(5, 20))] * B, runtime.outputs)
    runtime.start(ids, n_B, step, cache)
    sampling, rng = Sampling(temperature=0.7, top_k=5), HashRng(0, torch.arange(B))
    tree = runtime.propose(torch.full((B,), 3), TreeShape((1, 1), ChildChoice.IID), sampling, rng)
    children = tree.q_BNV[0, 0]
    assert int((children > 0).sum()) == 5 and not set(children.nonzero()[:, 0].tolist()) - set(
        runtime.draft.draft_ids_K.tolist()
    )
    seen = torch.bincount(tree.tokens_BN[:, 1], minlength=97) / B
    assert (seen - children).abs().max() < 4 * (0.25 / B) ** 0.5


def test_its_memory_is_constant_with_a_window_and_grows_without(llama, make_draft):
    held = {}
    for name in ("window and sinks", "as published"):
        engine = Engine(llama, SPEC.attach(make_draft(llama, CONFIGS[name]), llama, CONFIGS[name], {}))
        held[name] = [
            engine.generate([texts_of(n)[0]], max_new_tokens=8, ignore_eos=True).stats.draft_bytes
            for n in (4, 40, 700)
        ]
    info = llama.info
    row = 2 * info.n_kv_heads * info.head_dim * 8
    assert set(held["window and sinks"]) == {row * (3 + 6 + 5) + 2 * 8 + info.hidden_size * 8}
    assert held["as published"][0] == held["as published"][1] < held["as published"][2]


def test_refusals(llama, make_draft):
    config = CONFIGS["window"]
    draft = make_draft(llama, config)
    runtime = Eagle3Runtime(draft, llama, config)
    for shape, why in (
        (TreeShape((2,), ChildChoice.NO_REPLACE), "no_replace"),
        (TreeShape((1,) * 6), "depth 6"),
        (TreeShape((41,)), "41 nodes"),
    ):
        with pytest.raises(ConfigError, match=why):
            runtime.check_shape(shape)
    with pytest.raises(ConfigError, match="no inference keys; got: head_bits"):
        SPEC.attach(draft, llama, config, {"head_bits": 4})
    other = random_target({**SHAPES["llama_micro"], "hidden_size": 64}, dtype=torch.float64)
    with pytest.raises(TargetMismatchError, match=r"\(48, 48, 16\); target .* asks for \(64, 64, 16\)"):
        SPEC.attach(draft, other, config, {})
    with pytest.raises(
        TargetMismatchError, match=r"\(48, 48, 16\); target qwen3_micro asks for \(48, 48, 32\)"
    ):
        SPEC.attach(draft, random_target("qwen3_micro"), config, {})
    few = random_target({**SHAPES["llama_micro"], "vocab_size": 50}, dtype=torch.float64)
    with pytest.raises(TargetMismatchError, match=r"reaches token \d+; target .* has 50 tokens"):
        SPEC.attach(draft, few, config, {})


def test_a_draft_of_another_dtype_is_copied(llama, make_draft):
    config = CONFIGS["3.1"]
    draft = make_draft(llama, config, torch.float32)
    runtime = SPEC.attach(draft, llama, config, {}).draft
    assert draft.fc.weight.dtype == torch.float32 and runtime.draft.fc.weight.dtype == torch.float64
    same = make_draft(llama, config)
    assert SPEC.attach(same, llama, config, {}).draft.draft is same
    prompts, how = texts_of(9), {"max_new_tokens": 8, "ignore_eos": True}
    assert (
        Engine(llama, Parts(draft=runtime)).generate(prompts, **how).tokens
        == Engine(llama).generate(prompts, shape=PLAIN, **how).tokens
    )

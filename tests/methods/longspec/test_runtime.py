"""The draft at work against the draft in training: same tokens, same logits, whatever the ring forgot."""

from __future__ import annotations

import itertools

import pytest
import torch

from longtrain.cache.ring import DraftRing
from longtrain.data.packing import packed_sequences
from longtrain.decoding.engine import Engine
from longtrain.decoding.roles import ChildChoice, Parts, TreeShape
from longtrain.decoding.sampling import HashRng, Sampling
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.kernels.fused_layer import write_rows
from longtrain.kernels.int4_linear import Int4Linear
from longtrain.methods.longspec import indices
from longtrain.methods.longspec.config import Config
from longtrain.methods.longspec.runtime import LongSpecRuntime
from longtrain.methods.longspec.spec import SPEC
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.step import OutputRequest
from tests.methods.drafts import accept, path_to, path_tokens, prefilled, texts_of

WINDOW = 6
CONFIG = Config(window=WINDOW)
WARM = Sampling(temperature=1.0)


@torch.no_grad()
def trained_law(draft, target, tokens, depth, window=WINDOW):
    """What training makes of the last of these tokens, seen as a node at this depth: probabilities."""
    ids, n = torch.tensor(tokens), len(tokens)
    pos = packed_sequences.positions((0, n))
    last = target.info.full_layers[-1]
    kv = target.packed(ids, pos, (0, n), OutputRequest("none", kv=(last,))).kv[last]
    chunk = indices.make_chunk((0, n), [depth + 1], n - 1, n, window=window)
    part = slice(chunk.halo, n)
    cos, sin = target.rope(pos[None, part])
    hidden = draft(target.embed(ids[part]), (cos[0], sin[0]), kv, chunk)
    return target.head(hidden)[0].softmax(-1)


@pytest.mark.corners
@pytest.mark.parametrize("widths", [(2, 4, 3), (3, 1, 5)])
def test_every_node_has_the_law_training_gives_its_path(target, make_draft, widths):
    draft = make_draft(target, CONFIG)
    runtime = LongSpecRuntime(draft, target, CONFIG)
    texts = texts_of(29, 3, 14)
    ids, n_B, cache, step = prefilled(target, texts)
    runtime.start(ids, n_B, step, cache)
    shape, rng = TreeShape(widths, ChildChoice.IID), HashRng(1, torch.arange(3))
    roots = torch.tensor([5, 6, 7])
    inner = 1 + sum(widths[:-1])
    for cycle in range(5):  # far more tokens than the ring holds
        tree = runtime.propose(roots, shape, WARM, rng)
        assert tree.q_BNV[:, inner:].abs().max() == 0
        for row, node in itertools.product(range(3), range(inner)):
            tokens = texts[row] + path_tokens(tree, row, node)
            children = trained_law(draft, target, tokens, int(tree.depth_N[node]))
            torch.testing.assert_close(tree.q_BNV[row, node], children, rtol=1e-9, atol=1e-12)
        leaf = inner + cycle % widths[-1]
        paths = [path_to(tree, row, leaf)[: len(widths) + 1 - (row + cycle) % 3] for row in range(3)]
        if cycle == 3:
            paths[1] = []  # over: nothing committed, the draft must not move
        accept(target, cache, runtime, tree, paths)
        for row, path in enumerate(paths):
            texts[row] += [int(tree.tokens_BN[row, i]) for i in path]
        roots = (roots * 7 + 1) % 97
        if cycle == 3:
            roots[1] = tree.tokens_BN[1, 0]
        assert cache.len_B.tolist() == [len(t) for t in texts]


def test_anchor_offset_moves_nothing_but_positions(llama, make_draft):
    """Attention is relative: with anchors=0 an offset changes no logit, with anchors it does."""
    draft = make_draft(llama, CONFIG)
    ids = torch.arange(2, 32)

    def hidden(pos):
        kv = llama.packed(ids, pos, (0, 30), OutputRequest("none", kv=(1,))).kv[1]
        cos, sin = llama.rope(pos[None])
        chunk = indices.make_chunk((0, 30), [2], 0, 30, window=WINDOW)
        return draft(llama.embed(ids), (cos[0], sin[0]), kv, chunk)

    vanilla = hidden(packed_sequences.positions((0, 30)))
    moved = hidden(packed_sequences.positions((0, 30), offsets=[50], anchors=0))
    anchored = hidden(packed_sequences.positions((0, 30), offsets=[50], anchors=4))
    torch.testing.assert_close(moved, vanilla, rtol=1e-4, atol=1e-5)  # rotary angles are computed in fp32
    assert (anchored - vanilla)[10:].abs().max() > 1e-3


def test_beam_is_the_joint_top_k(llama, make_draft):
    draft = make_draft(llama, CONFIG)
    runtime = LongSpecRuntime(draft, llama, CONFIG)
    text = list(range(10, 30))
    ids, n_B, cache, step = prefilled(llama, [text])
    runtime.start(ids, n_B, step, cache)
    tree = runtime.propose(torch.tensor([3]), TreeShape((4, 6, 5)), Sampling(), HashRng(0, torch.zeros(1)))
    assert tree.children is ChildChoice.POINT
    assert tree.q_BNV is None
    level = {(): 0.0}
    nodes = [()]
    first = 1
    for depth, width in enumerate((4, 6, 5)):
        scores = {}
        for path in level:
            children = trained_law(draft, llama, [*text, 3, *path], depth).log()
            scores |= {(*path, t): level[path] + float(children[t]) for t in range(97)}
        best = sorted(scores, key=lambda p: -scores[p])[:width]
        level = {p: scores[p] for p in best}
        got = [tuple(path_tokens(tree, 0, i)[1:]) for i in range(first, first + width)]
        assert got == best
        nodes += best
        first += width
    assert tree.depth_N.tolist() == [len(p) for p in nodes]


def test_sampled_chain_follows_its_own_law(llama, make_draft):
    runtime = LongSpecRuntime(make_draft(llama, CONFIG), llama, CONFIG)
    B = 400
    ids, n_B, cache, step = prefilled(llama, [list(range(5, 20))] * B)
    runtime.start(ids, n_B, step, cache)
    sampling = Sampling(temperature=0.7, top_k=5)
    tree = runtime.propose(
        torch.full((B,), 3), TreeShape((1, 1), ChildChoice.IID), sampling, HashRng(0, torch.arange(B))
    )
    children = tree.q_BNV[0, 0]
    assert int((children > 0).sum()) == 5
    seen = torch.bincount(tree.tokens_BN[:, 1], minlength=97) / B
    assert (seen - children).abs().max() < 4 * (0.25 / B) ** 0.5


def test_ring_equals_full_history():
    gen = torch.Generator().manual_seed(0)
    B, W, G, H, D = 3, 5, 2, 4, 8
    ring = DraftRing(B, W, torch.zeros(G, D, dtype=torch.float64))
    ring.reserve(4)
    draw = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)  # noqa: E731
    history = [[] for _ in range(B)]
    length = torch.zeros(B, dtype=torch.int64)
    for _ in range(12):
        n = torch.randint(0, W + 1, (B,), generator=gen)
        k, v = draw(B, W, G, D), draw(B, W, G, D)
        write_rows(k.transpose(1, 2), v.transpose(1, 2), ring.positions(length, n))
        for b in range(B):
            history[b] += [(k[b, i], v[b, i]) for i in range(int(n[b]))]
        length += n
        nodes_k, nodes_v = draw(B, 4, G, D), draw(B, 4, G, D)
        write_rows(nodes_k.transpose(1, 2), nodes_v.transpose(1, 2), ring.tree(0, length))
        q, ahead = draw(B, 1, H, D), int(torch.randint(0, 3, (1,), generator=gen))
        sees = torch.tensor([[[True, False, True, True]]]).expand(B, 1, 4)
        got = ring.attend(q, length, sees, ahead=ahead, scale=0.3)
        for b in range(B):
            past = history[b][max(0, len(history[b]) + ahead - W) :] if ahead < W else []
            keys = torch.stack([x[0] for x in past] + [nodes_k[b, i] for i in (0, 2, 3)])
            values = torch.stack([x[1] for x in past] + [nodes_v[b, i] for i in (0, 2, 3)])
            for h in range(H):
                weight = (keys[:, h // 2] @ q[b, 0, h] * 0.3).softmax(0)
                torch.testing.assert_close(got[b, 0, h], weight @ values[:, h // 2])


def test_draft_memory_does_not_grow_with_the_context(llama, make_draft):
    held = set()
    for n in (4, 40, 400, 1500):
        engine = Engine(llama, SPEC.attach(make_draft(llama, CONFIG), llama, CONFIG, {}))
        out = engine.generate([[2 + i % 90 for i in range(n)]], max_new_tokens=12, ignore_eos=True)
        held.add(out.stats.draft_bytes)
    info = llama.info
    rows = WINDOW + 5
    assert held == {2 * rows * info.n_kv_heads * info.head_dim * 8 + 2 * 8}


@pytest.mark.corners
@pytest.mark.parametrize(
    "shape",
    [TreeShape((1,) * 5), TreeShape((4, 6, 6)), TreeShape((3, 3, 3), keep=5)],
)
def test_greedy_output_is_the_targets_own(target, make_draft, shape):
    draft = make_draft(target, CONFIG)
    gen = torch.Generator().manual_seed(2)
    prompts = [torch.randint(2, 97, (n,), generator=gen).tolist() for n in (1, 5, 33)]
    plain = Engine(target).generate(prompts, max_new_tokens=18, ignore_eos=True)
    engine = Engine(target, SPEC.attach(draft, target, CONFIG, {}))
    drafted = engine.generate(prompts, max_new_tokens=18, ignore_eos=True, shape=shape)
    assert drafted.tokens == plain.tokens
    again = engine.generate(prompts[::-1], max_new_tokens=18, ignore_eos=True, shape=shape)
    assert again.tokens == plain.tokens[::-1]


def test_sampled_point_output_is_the_targets_own(llama, make_draft):
    """A deterministic draft under temperature emits the very tokens that plain sampling draws."""
    engine = Engine(llama, SPEC.attach(make_draft(llama, CONFIG), llama, CONFIG, {}))
    prompts = [[5, 6, 7], [9] * 20]
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=3)
    plain = Engine(llama).generate(prompts, max_new_tokens=24, sampling=sampling, ignore_eos=True)
    tree = engine.generate(
        prompts, max_new_tokens=24, sampling=sampling, ignore_eos=True, shape=TreeShape((3, 4))
    )
    assert tree.tokens == plain.tokens


def test_refusals(llama, make_draft):
    draft = make_draft(llama, CONFIG)
    runtime = LongSpecRuntime(draft, llama, CONFIG)
    rng, root = HashRng(0, torch.zeros(1)), torch.tensor([3])
    ids, n_B, cache, step = prefilled(llama, [[4, 5, 6]])
    runtime.start(ids, n_B, step, cache)
    with pytest.raises(ConfigError, match="no_replace"):
        runtime.propose(root, TreeShape((2,), ChildChoice.NO_REPLACE), Sampling(), rng)
    with pytest.raises(ConfigError, match="depth 6"):
        runtime.propose(root, TreeShape((1,) * 6), Sampling(), rng)
    with pytest.raises(ConfigError, match="98 nodes"):
        runtime.propose(root, TreeShape((98,)), Sampling(), rng)
    for shape, why in (
        (TreeShape((2,), ChildChoice.NO_REPLACE), "no_replace"),
        (TreeShape((1,) * 6), "depth 6"),
        (TreeShape((1, 98)), "98 nodes"),
    ):
        with pytest.raises(ConfigError, match=why):  # before anything is read
            Engine(llama, Parts(draft=LongSpecRuntime(draft, llama, CONFIG))).limits.check_shape(
                shape, runtime
            )
    with pytest.raises(ConfigError, match="budget_tokens"):
        SPEC.attach(draft, llama, CONFIG, {"budget_tokens": 3})
    with pytest.raises(TargetMismatchError, match=r"\(48, 4, 2, 16\); target .* asks for \(48, 4, 2, 32\)"):
        SPEC.attach(draft, random_target("qwen3_micro"), CONFIG, {})


def test_attach_casts_a_copy(llama, make_draft):
    draft = make_draft(llama, CONFIG, torch.float32)
    runtime = SPEC.attach(draft, llama, CONFIG, {}).draft
    assert runtime.draft is not draft
    assert draft.input_layernorm.weight.dtype == torch.float32
    assert runtime.draft.input_layernorm.weight.dtype == torch.float64
    same = make_draft(llama, CONFIG)
    assert SPEC.attach(same, llama, CONFIG, {}).draft.draft is same


def test_weights_are_joined_once_and_only_where_nothing_trains(llama, make_draft):
    draft = make_draft(llama, CONFIG)
    weight = draft.self_attn.k_proj.weight
    training = LongSpecRuntime(draft, llama, CONFIG)
    assert draft.self_attn.k_proj.weight is weight and weight.requires_grad
    draft.requires_grad_(False)
    first, second = (LongSpecRuntime(draft, llama, CONFIG) for _ in range(2))
    whole = first.layer.qkv.weight
    assert torch.equal(whole, training.layer.qkv.weight)
    assert second.layer.qkv.weight.data_ptr() == whole.data_ptr() != training.layer.qkv.weight.data_ptr()
    assert draft.self_attn.q_proj.weight.data_ptr() == whole.data_ptr()
    size = sum(p.nbytes for p in draft.parameters())
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in draft.parameters()}
    assert sum(storages.values()) == size


@pytest.mark.parametrize("trains", [False, True])
def test_a_draft_that_is_moved_is_joined_again(llama, make_draft, trains):
    draft = make_draft(llama, CONFIG).requires_grad_(trains)
    runtime = LongSpecRuntime(draft, llama, CONFIG)
    draft.to(torch.float16)
    draft.to(llama.dtype)
    with torch.no_grad():
        for param in draft.parameters():
            param.mul_(1.5)
    prompts, how = (
        [[5, 6, 7, 8, 9]],
        {"max_new_tokens": 12, "shape": TreeShape((1, 1, 1)), "ignore_eos": True},
    )
    got = Engine(llama, Parts(draft=runtime)).generate(prompts, **how)
    fresh = LongSpecRuntime(draft, llama, CONFIG)
    outputs = Engine(llama, Parts(draft=fresh)).generate(prompts, **how)
    assert torch.equal(runtime.layer.qkv.weight, fresh.layer.qkv.weight)
    assert runtime.layer.holds()
    assert (got.tokens, got.stats.rows) == (outputs.tokens, outputs.stats.rows)


def test_a_head_in_four_bits_drafts_and_changes_no_text(make_draft, monkeypatch):
    """Its drafts follow the law of the rounded head; texts are the target's own."""
    target = random_target({**SHAPES["llama_micro"], "hidden_size": 64}, seed=1, dtype=torch.float64)
    config = Config(window=WINDOW, head_bits=4)
    draft = make_draft(target, config)
    prompts = [[5, 6, 7], [9] * 20]
    plain = Engine(target).generate(prompts, max_new_tokens=30, ignore_eos=True)
    few = Engine(target, SPEC.attach(draft, target, config, {}))
    drafted = few.generate(prompts, max_new_tokens=30, ignore_eos=True, shape=TreeShape((2, 3)))
    assert drafted.tokens == plain.tokens
    same = Engine(target, SPEC.attach(draft, target, CONFIG, {"head_bits": 4}))
    again = same.generate(prompts, max_new_tokens=30, ignore_eos=True, shape=TreeShape((2, 3)))
    whole = Engine(target, SPEC.attach(draft, target, CONFIG, {}))
    exact = whole.generate(prompts, max_new_tokens=30, ignore_eos=True, shape=TreeShape((2, 3)))
    copy = Int4Linear(target.model.lm_head, 128).bytes()
    assert again.stats.draft_bytes == drafted.stats.draft_bytes == exact.stats.draft_bytes + copy

    runtime = LongSpecRuntime(draft, target, config)
    ids, n_B, cache, step = prefilled(target, prompts)
    runtime.start(ids, n_B, step, cache)
    shape, rng = TreeShape((1,), ChildChoice.IID), HashRng(1, torch.arange(2))
    children = runtime.propose(torch.tensor([5, 6]), shape, WARM, rng).q_BNV[:, 0]
    assert (children[0] - trained_law(draft, target, [*prompts[0], 5], 0)).abs().max() > 1e-3
    rounded = Int4Linear(target.model.lm_head, 128)
    monkeypatch.setattr(target, "head", lambda hidden: rounded(hidden))
    for row, text in enumerate(prompts):
        near = trained_law(draft, target, [*text, 5 + row], 0)
        torch.testing.assert_close(children[row], near, rtol=1e-9, atol=1e-12)
    with pytest.raises(ConfigError, match="head_bits=8"):
        Config(head_bits=8)


@pytest.mark.parametrize(
    ("large", "gpu", "dtype", "narrow"),
    [
        (True, True, torch.bfloat16, True),
        (False, True, torch.bfloat16, False),
        (True, False, torch.bfloat16, False),
        (True, True, torch.float32, False),
    ],
)
def test_which_head_drafts_read_by_default(large, gpu, dtype, narrow, make_draft, monkeypatch):
    """A copy in 4 bits of a large one, where its kernels run; a key decides first."""
    target = random_target({**SHAPES["llama_micro"], "hidden_size": 64}, seed=1, dtype=dtype)
    least = target.info.vocab_size + (0 if large else 1)
    monkeypatch.setattr("longtrain.methods.longspec.config.LARGE_VOCABULARY", least)
    monkeypatch.setattr("longtrain.methods.longspec.runtime.int4_runs_on", lambda device: gpu)
    draft = make_draft(target, CONFIG).to(dtype)
    for bits, copied in ((0, narrow), (4, True), (16, False)):
        runtime = LongSpecRuntime(draft, target, Config(window=WINDOW, head_bits=bits))
        assert (runtime.bytes() > 0) == copied


@pytest.mark.parametrize(("bits", "copied"), [(0, [True, True, False]), (4, [True] * 3), (16, [False] * 3)])
def test_levels_of_many_rows_read_the_targets_own_head(bits, copied, make_draft, monkeypatch):
    """By default the copy is for one launch of its kernel: more rows would read it twice."""
    target = random_target({**SHAPES["llama_micro"], "hidden_size": 64}, seed=1, dtype=torch.bfloat16)
    monkeypatch.setattr("longtrain.methods.longspec.config.LARGE_VOCABULARY", 1)
    monkeypatch.setattr("longtrain.methods.longspec.runtime.int4_runs_on", lambda device: True)
    found, read, own = [], Int4Linear.forward, target.head
    monkeypatch.setattr(Int4Linear, "forward", lambda one, x: found.append(True) or read(one, x))
    monkeypatch.setattr(target, "head", lambda x: found.append(False) or own(x))
    draft = make_draft(target, CONFIG).to(torch.bfloat16)
    runtime = LongSpecRuntime(draft, target, Config(window=WINDOW, head_bits=bits))
    ids, n_B, cache, step = prefilled(target, [[5, 6, 7], [9] * 20])
    runtime.start(ids, n_B, step, cache)
    found.clear()
    shape, rng = TreeShape((8, 9, 1)), HashRng(1, torch.arange(2))
    runtime.propose(torch.tensor([5, 6]), shape, Sampling(), rng)
    assert found == copied, "levels of 2, 16 and 18 rows"

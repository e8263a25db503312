"""Layers with a window store the last entries only: every step is that over a cache of all entries."""

import random

import pytest
import torch

from longtrain.cache.arena import ArenaCache, LayeredArena, arena_over
from longtrain.cache.base import PrefixOnly, Tree
from longtrain.cache.dense import DenseCache
from longtrain.cache.layered import LayeredCache
from longtrain.cache.window import WindowCache
from longtrain.costs import model
from longtrain.costs.model import window_slots
from longtrain.decoding.captured import CaptureBuffers
from longtrain.decoding.engine import AUTO, Engine
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.errors import ConfigError, ConflictError
from longtrain.methods.policies.snapkv import SnapKV
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.step import OutputRequest, TokenBatch
from tests.helpers import Recall, token_ids

WINDOW, PROMPT, NODES = 8, 50, 8
MIXED = {
    **SHAPES["gemma3_micro"],
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    "query_pre_attn_scalar": 16,
}
ALL = {**SHAPES["mistral_micro"], "sliding_window": WINDOW}
TARGETS = {"mixed": MIXED, "all layers": ALL}
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 6]
"""A tree of five levels."""


@pytest.fixture(autouse=True)
def _small_tiles(request, monkeypatch):
    """Entries are dropped often; the kernels' tiles are larger."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(model, "TILE", 4)


@pytest.fixture(scope="module", params=TARGETS)
def target(request):
    return random_target(TARGETS[request.param], seed=1, dtype="float64")


def visible(parents=PARENTS):
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def ids(*shape, seed=1):
    return torch.randint(2, 97, shape, generator=torch.Generator().manual_seed(seed))


def near_of(cache):
    """The cache of the layers with a window."""
    near = cache.near if isinstance(cache, LayeredCache) else cache
    return near.store if isinstance(near, ArenaCache) else near


def caches(target, batch, tokens=900, nodes=NODES):
    """A cache of all entries, and one that drops those of its layers with a window."""
    both = target.plain_cache(batch, tokens, nodes), target.new_cache(batch, tokens, nodes)
    assert near_of(both[1]).capacity == window_slots(WINDOW, nodes) < near_of(both[1]).limit
    return both


@torch.no_grad()
def logits(target, cache, ids_BT, mask=None, n_B=None):
    T = ids_BT.shape[1]
    ahead = torch.arange(T) if mask is None else mask.visible_BNN[0].sum(-1) - 1
    rows = TokenBatch(cache.len_B[:, None] + ahead, ids_BT, n_B=n_B, **({"mask": mask} if mask else {}))
    return target(rows, cache, outputs=OutputRequest("all")).logits_BTV


def same(target, both, ids_BT, mask=None, n_B=None):
    """One step on both caches: logits of the valid tokens are equal to rounding."""
    one, other = (logits(target, cache, ids_BT, mask, n_B) for cache in both)
    if n_B is not None:
        inside_BT = torch.arange(ids_BT.shape[1]) < n_B[:, None]
        one, other = one[inside_BT], other[inside_BT]
    torch.testing.assert_close(other, one, atol=1e-12, rtol=1e-12)


def commit(both, path_BP, n_B):
    for cache in both:
        cache.commit(path_BP, n_B)
    assert torch.equal(both[0].len_B, both[1].len_B)


def seen_later(target, cache, layer, b):
    """Keys that tokens after the committed ones of a sequence see, of one layer with a window."""
    windows = [at for at, window in enumerate(target.info.windows) if window]
    if not isinstance(cache, DenseCache) or isinstance(cache, WindowCache):
        cache, layer = near_of(cache), windows.index(layer)
    rows, length = int(cache.rows_B[b]), int(cache.len_B[b])
    return cache.k_LBGSD[layer, b, :, max(0, rows - min(length, WINDOW - 1)) : rows]


def agree(target, both):
    """What later tokens see is stored in both, and the same to the last bit."""
    for layer, window in enumerate(target.info.windows):
        for b in range(len(both[0].len_B)):
            if window:
                one, other = (seen_later(target, cache, layer, b) for cache in both)
                torch.testing.assert_close(other, one, atol=1e-12, rtol=1e-12)


@pytest.mark.corners
@pytest.mark.parametrize("size", [1, 7, 8, 9, PROMPT])
@pytest.mark.parametrize("accepted", [0, 1, "all"])
def test_prompts_in_chunks_and_trees_across_the_edge(target, size, accepted):
    """Chunks smaller and larger than the room; then trees of which nothing, the root or a path stays."""
    both, prompt, seen = caches(target, 2), ids(2, PROMPT), visible()
    for first in range(0, PROMPT, size):
        chunk = prompt[:, first : first + size]
        same(target, both, chunk)
        commit(both, None, torch.full((2,), chunk.shape[1]))
        agree(target, both)
    mask = Tree(seen.expand(2, -1, -1))
    deepest = seen[-1].nonzero()[:, 0]
    n = len(deepest) if accepted == "all" else accepted
    for step in range(6):
        same(target, both, ids(2, len(seen), seed=step), mask)
        commit(both, deepest.expand(2, -1), torch.tensor([n, n]))
        agree(target, both)


def test_what_is_stored(target):
    cache, prompt = target.new_cache(1, 4000, NODES), ids(1, 3000)
    near = near_of(cache)
    layers = sum(window > 0 for window in target.info.windows)
    assert near.k_LBGSD.shape[0] == layers
    assert near.k_LBGSD.shape[3] == WINDOW - 1 + 2 * model.TILE + NODES
    logits(target, cache, prompt)
    cache.commit(None, torch.tensor([3000]))
    assert (
        near.dropped_B.tolist() == [2992] and near.rows_B.tolist() == [8] and cache.len_B.tolist() == [3000]
    )
    assert near.kept == WINDOW - 1 + 3
    entry = 2 * target.info.n_kv_heads * target.info.head_dim * 8
    full = (target.info.n_layers - layers) * 4008
    assert cache.bytes() - entry * (full + layers * near.capacity) in (2 * 8, 3 * 8)
    assert cache.room_left() == 1008


def test_unequal_prompts_of_a_batch(target):
    """One of them is read in chunks of which some are empty, others padded, and is then far behind."""
    both, text = caches(target, 3), ids(3, 60)
    for first, counts in ((0, (30, 3, 12)), (30, (1, 0, 9)), (12, (25, 2, 1)), (40, (1, 1, 1))):
        n_B = torch.tensor(counts)
        same(target, both, text[:, first : first + max(counts)], n_B=n_B)
        commit(both, None, n_B)
        agree(target, both)
    mask = Tree(visible().expand(3, -1, -1))
    for step in range(8):
        same(target, both, ids(3, NODES, seed=step), mask)
        commit(both, torch.tensor([[0, 2, 5], [0, 1, 3], [0, 1, 4]]), torch.tensor([3, 0, step % 3]))
        agree(target, both)


@pytest.mark.corners
@pytest.mark.parametrize("arena", [False, True])
def test_random_accepted_and_rejected_tokens_leave_what_a_fresh_cache_has(target, arena):
    """Steps of tokens, chains and trees in turn; a fresh cache reads the text at once."""
    rng, seen = random.Random(0), visible()
    paths = [row.nonzero()[:, 0].tolist() for row in seen]
    both, texts = caches(target, 2), [[], []]
    prompt, n_B = ids(2, 20), torch.tensor([20, 3])
    same(target, both, prompt, n_B=n_B)
    commit(both, None, n_B)
    texts = [row[:n].tolist() for row, n in zip(prompt, n_B.tolist(), strict=True)]
    if arena:
        store = both[1]
        taken = arena_over(store)
        taken.take(store, room=800)
        places = [one.data_ptr() for one in taken.tensors()]
        both = both[0], taken
    for step in range(110):
        T = rng.choice((1, 4, len(seen)))
        node_BN = ids(2, T, seed=step)
        mask = Tree(seen.expand(2, -1, -1)) if len(seen) == T else None
        same(target, both, node_BN, mask)
        if mask:
            taken_by = [path[: rng.randint(0, len(path))] for path in rng.choices(paths, k=2)]
            path_BP = torch.tensor([path + [0] * (5 - len(path)) for path in taken_by])
        else:
            taken_by, path_BP = [list(range(rng.randint(0, T))) for _ in range(2)], None
        commit(both, path_BP, torch.tensor([len(path) for path in taken_by]))
        for text, row, path in zip(texts, node_BN.tolist(), taken_by, strict=True):
            text += [row[node] for node in path]
    if arena:
        assert [one.data_ptr() for one in both[1].tensors()] == places
    assert both[1].len_B.tolist() == [len(text) for text in texts] and min(map(len, texts)) > 9 * WINDOW
    next_B1 = ids(2, 1, seed=999)
    got = logits(target, both[1], next_B1)
    for b, text in enumerate(texts):
        fresh = target.new_cache(1, 900, NODES)
        logits(target, fresh, torch.tensor([text]))
        fresh.commit(None, torch.tensor([len(text)]))
        alone = logits(target, fresh, next_B1[b : b + 1])
        torch.testing.assert_close(got[b : b + 1], alone, atol=1e-12, rtol=1e-12)


def test_entries_of_an_arena_are_dropped_between_recorded_cycles_only(target):
    """As a graph does: the host only says how many tokens a cycle may commit, and makes room before it."""
    both, prompt = caches(target, 1), ids(1, 20)
    same(target, both, prompt)
    commit(both, None, torch.tensor([20]))
    store = both[1]
    arena = arena_over(store)
    arena.take(store, room=500)
    near = arena.near if isinstance(arena, LayeredArena) else arena
    moves = []
    real = near.store.to_front
    near.store.to_front = lambda start_B: moves.append(int(start_B)) or real(start_B)
    for step in range(40):
        arena.foresee(3)
        known = len(moves)
        same(target, (both[0], arena), ids(1, 5, seed=step))
        high = near._high
        commit((both[0], arena), None, torch.tensor([step % 4]))
        near._high = high
        assert len(moves) == known
    assert 5 < len(moves) < 40 and {start % 4 for start in moves} == {0} and max(moves) > 0


def test_steps_that_cannot_be_served_are_refused_in_one_line(target):
    cache, both = target.new_cache(2, 400, NODES), (2, 400)
    near = near_of(cache)
    logits(target, cache, ids(2, 40))
    with pytest.raises(ConflictError, match=r"of 40 tokens was not committed, .* the last 23 entries"):
        logits(target, cache, ids(2, 1))
    with pytest.raises(ConflictError, match=r"40 tokens of which \[40, 39\] are committed"):
        cache.commit(None, torch.tensor([40, 39]))
    cache = target.new_cache(*both, NODES)
    near = near_of(cache)
    logits(target, cache, ids(2, 40))
    cache.commit(None, torch.tensor([40, 40]))
    with pytest.raises(ConflictError, match=r"cannot go back to \[20, 20\]"):
        near.rewind([20, 20])
    near.rewind([0, 0])
    assert near.rows_B.tolist() == [0, 0] and near.room_left() == 408
    q = torch.zeros(2, target.info.n_heads, 1, target.info.head_dim, dtype=torch.float64)
    with pytest.raises(ConflictError, match="read a layer that sees the whole text"):
        near.attend(0, q, mask=PrefixOnly(), scale=1.0)
    arena = ArenaCache(near)
    arena.take(near, room=100)
    with pytest.raises(ConfigError, match="a step of 30 tokens for static buffers"):
        arena.tail_slots(0, 30)


def test_a_short_text_drops_nothing(target):
    cache = target.new_cache(1, 6, 1)
    near = near_of(cache)
    assert near.capacity == near.limit == 7
    for _ in range(7):
        logits(target, cache, ids(1, 1))
        cache.commit(None, torch.tensor([1]))
    assert near.rows_B.tolist() == [7]
    with pytest.raises(ConfigError, match="cache is full: 7 tokens committed"):
        logits(target, cache, ids(1, 1))


@pytest.mark.corners
@pytest.mark.parametrize("capture", [False, True])
def test_texts_are_those_of_the_plain_cache(target, capture, monkeypatch):
    """Plain decoding, chains and trees, of batches; with buffers that the engine keeps from call to call."""
    prompts, how = token_ids(150, 7, 201, least=2), {"max_new_tokens": 60, "ignore_eos": True}
    with monkeypatch.context() as patch:
        patch.setattr(target, "new_cache", target.plain_cache)
        plain = Engine(target, capture=capture).generate(prompts, **how)
    small = Engine(target, capture=capture).generate(prompts, **how)
    assert small.tokens == plain.tokens
    assert small.stats.cache_bytes < (0.9 if capture else 0.6) * plain.stats.cache_bytes
    draft = Recall(plain.tokens)
    draft.offers = ((1,), (2, 3, 3))
    engine = Engine(target, Parts(draft=draft, name="recall"), capture=capture)
    for shape in (TreeShape((1, 1, 1, 1)), TreeShape((2, 3, 3)), AUTO):
        assert engine.generate(prompts, shape=shape, **how).tokens == plain.tokens
    assert engine.generate(prompts[::-1], **how).tokens == plain.tokens[::-1]


@pytest.mark.parametrize("window", [8, pytest.param(100, marks=pytest.mark.slow)])
@torch.no_grad()
def test_evicted_prompts_move_to_static_buffers(window):
    """Prompts longer than the buffers, whose size follows from the entries that are left."""
    target = random_target({**MIXED, "sliding_window": window}, seed=1, dtype="float64")
    parts = Parts(evictor=SnapKV(Budget(20), window=4, kernel=3), name="snapkv")
    engine = Engine(target, parts, capture=True)
    for lengths, new_tokens in (((130, 450), 110), ((390, 97), 50)):
        prompts, how = token_ids(*lengths, least=2), {"max_new_tokens": new_tokens, "ignore_eos": True}
        plain = Engine(target, parts, capture=False).generate(prompts, **how)
        assert engine.generate(prompts, **how).tokens == plain.tokens


@pytest.mark.gpu
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("fused", [False, True])
def test_graphs_give_the_texts_of_uncaptured_steps(name, fused):
    """In fp32, since tiles round otherwise in bf16."""
    target = random_target(TARGETS[name], seed=1, dtype="float32").cuda()
    if fused and name == "all layers":
        target.fuse()
    prompts, how = token_ids(150, 7, 201, least=2), {"max_new_tokens": 60, "ignore_eos": True}
    plain = Engine(target, capture=False).generate(prompts, **how).tokens
    for parts, shape in (
        (Parts(), None),
        (Parts(draft=Recall(plain, device="cuda"), name="recall"), TreeShape((1, 1, 1, 1))),
        (Parts(draft=Recall(plain, device="cuda"), name="recall"), TreeShape((2, 3, 3))),
    ):
        engine = Engine(target, parts, capture=True)
        for _ in range(2):
            assert engine.generate(prompts, shape=shape, **how).tokens == plain
    assert CaptureBuffers(target).new_cache(1, 4000, 8).bytes() < target.plain_cache(1, 4000, 8).bytes()


@pytest.mark.gpu
@pytest.mark.parametrize("name", TARGETS)
def test_in_bf16_graphs_give_the_texts_of_a_cache_of_all_entries(name, monkeypatch):
    """What is dropped leaves every other key in its tile, so that no bit of a result changes."""
    target = random_target(TARGETS[name], seed=1, dtype="bfloat16").cuda()
    prompts, how = token_ids(150, 7, 201, least=2), {"max_new_tokens": 400, "ignore_eos": True}
    for shape in (None, TreeShape((1, 1, 1, 1)), TreeShape((2, 3, 3))):
        with monkeypatch.context() as patch:
            patch.setattr(target, "new_cache", target.plain_cache)
            texts = Engine(target, capture=True).generate(prompts, **how).tokens
            parts = Parts(draft=Recall(texts, device="cuda"), name="recall") if shape else Parts()
            whole = Engine(target, parts, capture=True).generate(prompts, shape=shape, **how)
        last = Engine(target, parts, capture=True).generate(prompts, shape=shape, **how)
        assert last.tokens == whole.tokens
        assert last.stats.cache_bytes < whole.stats.cache_bytes

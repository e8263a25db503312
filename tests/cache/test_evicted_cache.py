"""The cache after eviction against explicit masks over the whole prompt."""

import pytest
import torch

from longtrain.cache.base import Causal, PrefixOnly, Tree
from longtrain.cache.dense import DenseCache
from longtrain.cache.evicted import compact
from longtrain.decoding.evict import Keep
from longtrain.errors import ConfigError
from tests.kernels import plain_attention as reference

B, H, G, D, LAYERS = 3, 4, 2, 8, 2
SCALE = 0.3
LENGTHS = (12, 5, 9)
EVEN = [[[4, 4], [4, 4], [4, 4]]] * LAYERS
BY_LAYER = [[[4, 4]] * 3, [[2, 2]] * 3]
RAGGED = [[[1, 7], [5, 2], [9, 3]], [[12, 1], [3, 3], [1, 1]]]


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def full():
    """A prefilled cache with rows after the prompts forgotten again, and what it was filled with."""
    cache = DenseCache(
        n_layers=LAYERS, n_kv_heads=G, head_dim=D, batch=B, max_tokens=20, max_nodes=8, device="cpu",
        dtype=torch.float64,
    )  # fmt: skip
    kv = randn(LAYERS, 2, B, G, max(LENGTHS), D, seed=0)
    for layer in range(LAYERS):
        cache.write(layer, kv[layer, 0], kv[layer, 1])
    cache.commit(None, torch.tensor(LENGTHS))
    return cache, kv


def random_keep(counts):
    """So many random positions of each prompt."""
    rng = torch.Generator().manual_seed(1)
    n = torch.tensor(counts)
    idx = torch.zeros(*n.shape, int(n.max()), dtype=torch.int64)
    for at in torch.cartesian_prod(*map(torch.arange, n.shape)).tolist():
        at = tuple(at)
        some = torch.randperm(LENGTHS[at[1]], generator=rng)[: n[at]].sort().values
        idx[at][: n[at]] = some
    return Keep(idx, n)


class Model:
    """Prompt and tail of each layer and head, attended under explicit masks."""

    def __init__(self, kv, keep):
        self.kv, self.keep = kv, keep
        self.tail = torch.zeros(LAYERS, 2, B, G, 0, D, dtype=torch.float64)
        self.valid = torch.zeros(B, 0, dtype=torch.bool)

    def attend(self, layer, q, new, visible_BTT):
        T = q.shape[2]
        out = torch.zeros_like(q)
        for b in range(B):
            for g in range(G):
                rows = self.keep.idx_LBGK[layer, b, g][: self.keep.n_LBG[layer, b, g]]
                parts = [self.kv[layer, :, b, g][:, rows], self.tail[layer, :, b, g], new[:, b, g]]
                k, v = torch.cat(parts, 1)[:, None, None]
                seen = torch.ones(1, T, len(rows), dtype=torch.bool)
                seen = torch.cat([seen, self.valid[b].expand(1, T, -1), visible_BTT[b][None]], 2)
                heads = slice(g * H // G, (g + 1) * H // G)
                out[b, heads] = reference.masked_attention(q[b, heads][None], k, v, seen, scale=SCALE)[0]
        return out

    def commit(self, new, path_BP, n_B):
        rows = torch.stack([new[:, :, b, :, path_BP[b]] for b in range(B)], 2)
        self.tail = torch.cat([self.tail, rows], 4)
        self.valid = torch.cat([self.valid, torch.arange(path_BP.shape[1]) < n_B[:, None]], 1)


def step(store, model, mask, T, visible_BTT, path_BP, n_B, *, path_given=True, seed):
    q, new = randn(LAYERS, B, H, T, D, seed=seed), randn(LAYERS, 2, B, G, T, D, seed=seed + 1000)
    before = store.len_B
    for layer in range(LAYERS):
        store.write(layer, new[layer, 0], new[layer, 1])
        out, _ = store.attend(layer, q[layer], mask=mask, scale=SCALE)
        expected = model.attend(layer, q[layer], new[layer], visible_BTT)
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    store.commit(path_BP if path_given else None, n_B)
    model.commit(new, path_BP, n_B)
    assert torch.equal(store.len_B, before + n_B)
    nothing = torch.zeros(2, B, G, 0, D, dtype=torch.float64)
    for layer in range(LAYERS):  # a draft that reads what is committed
        out, _ = store.attend(layer, q[layer], mask=PrefixOnly(), scale=SCALE)
        expected = model.attend(layer, q[layer], nothing, torch.ones(B, T, 0, dtype=torch.bool))
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)


def causal(T):
    return torch.ones(B, T, T, dtype=torch.bool).tril()


def arange(T):
    return torch.arange(T).expand(B, T)


TREE = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1, 1, 0, 0, 1]]) > 0


@pytest.mark.parametrize("counts", [EVEN, BY_LAYER, RAGGED], ids=["even", "by layer", "ragged"])
def test_chains_and_trees_after_eviction(counts):
    cache, kv = full()
    keep = random_keep(counts)
    store, model = compact(cache, keep, LENGTHS, room=24), Model(kv, keep)
    del cache
    assert store.len_B.tolist() == list(LENGTHS)
    step(store, model, Causal(), 3, causal(3), arange(3), torch.tensor([3, 1, 2]), path_given=False, seed=1)
    step(store, model, Causal(), 1, causal(1), arange(1), torch.ones(B, dtype=torch.int64), seed=2)
    paths = torch.tensor([[0, 2, 3], [0, 1, 4], [0, 0, 0]])
    tree = TREE.expand(B, -1, -1)
    for seed in (3, 4):
        step(store, model, Tree(tree), 5, tree, paths, torch.tensor([3, 2, 1]), seed=seed)
    step(store, model, Causal(), 2, causal(2), arange(2), torch.tensor([0, 2, 1]), seed=5)


def every_row(lengths):
    """What evicts nothing."""
    n_B, slot_K = torch.tensor(lengths), torch.arange(max(lengths))
    idx_BK = torch.where(slot_K < n_B[:, None], slot_K, 0)
    shape = (LAYERS, len(lengths), G)
    return Keep(idx_BK[:, None].expand(*shape, -1), n_B[:, None].expand(shape))


@pytest.mark.parametrize("counts", ["even", "ragged"])
def test_evicting_nothing_is_the_dense_cache(counts):
    cache, _ = full()
    keep = every_row(LENGTHS)
    if counts == "even":  # one length, so that the rows share a buffer with the tail
        cache.rewind((5, 5, 5))
        keep = every_row((5, 5, 5))
    lengths = tuple(cache.len_B.tolist())
    store = compact(cache, keep, lengths, room=8)
    assert (store.prefixes is None) == (counts == "even")
    for seed, (mask, T) in enumerate([(Causal(), 4), (Tree(TREE.expand(B, -1, -1)), 5), (Causal(), 1)]):
        q, new = randn(LAYERS, B, H, T, D, seed=seed), randn(LAYERS, 2, B, G, T, D, seed=seed + 50)
        for layer in range(LAYERS):
            for one in (cache, store):
                one.write(layer, new[layer, 0], new[layer, 1])
            out, expected = (one.attend(layer, q[layer], mask=mask, scale=SCALE)[0] for one in (store, cache))
            torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
        for one in (cache, store):
            one.commit(None, torch.tensor([1, 2, 1]) if T > 1 else torch.ones(B, dtype=torch.int64))
        assert torch.equal(cache.len_B, store.len_B)


@pytest.mark.parametrize("counts", [EVEN, RAGGED], ids=["even", "ragged"])
def test_bytes_are_those_of_the_kept_rows_and_the_room(counts):
    cache, _ = full()
    keep = random_keep(counts)
    store = compact(cache, keep, LENGTHS, room=6)
    rows = sum(n for layer in counts for row in layer for n in row) + LAYERS * B * G * 6
    index = 3 * B * 8  # lengths
    if counts is RAGGED:  # start, count, owner, piece of each segment, and the bounds in int32
        index += LAYERS * (4 * B * G * 8 + (B * G + 1) * 4)
    assert store.bytes() == rows * 2 * D * 8 + index
    assert store.bytes() < cache.bytes()


def test_a_full_tail_says_so():
    cache, _ = full()
    store = compact(cache, random_keep(EVEN), LENGTHS, room=3)
    row = torch.zeros(B, G, 4, D, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"4 tokens committed and 4 new tokens, room for 7"):
        store.write(0, row, row)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", ["even", "ragged"])
def test_memory_of_evicted_rows_is_given_back(counts):
    shape = {"n_layers": 8, "n_kv_heads": 8, "head_dim": 128, "batch": 1, "max_tokens": 32768, "max_nodes": 8}
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    cache = DenseCache(**shape, device="cuda", dtype=torch.bfloat16)
    n = torch.full((8, 1, 8), 128)
    if counts == "ragged":
        n[::2] = 64
    keep = Keep(torch.arange(128, device="cuda").expand(8, 1, 8, 128).contiguous(), n)
    whole = torch.cuda.memory_allocated() - start
    torch.cuda.reset_peak_memory_stats()
    store = compact(cache, keep, (32768,), room=64)
    peak = torch.cuda.max_memory_allocated() - start
    del cache
    left = torch.cuda.memory_allocated() - start
    assert whole >= 8 * 8 * 32768 * 128 * 2 * 2
    assert left <= store.bytes() + (4 << 20) and left < whole / 100
    assert peak <= whole + 3 * store.bytes() + (8 << 20)

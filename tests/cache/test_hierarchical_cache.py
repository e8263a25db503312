"""The hierarchical cache against a list of rows: prompts, commits, flushes, views, and what it refuses."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from longtrain.cache import room
from longtrain.cache.base import Causal, PrefixOnly, Tree
from longtrain.cache.dense import DenseCache
from longtrain.cache.evicted import compact
from longtrain.cache.hierarchical import HierarchicalCache
from longtrain.decoding.evict import Keep
from longtrain.errors import ConfigError, ConflictError, DataError
from longtrain.kernels.hierarchical.layout import BLOCK, RING, Split
from longtrain.kernels.hierarchical.reference import dequantise, quantise
from longtrain.kernels.tree_attention.reference import masked_attention

L, G, H, D = 2, 1, 2, 64


def new_cache(batch=1, max_tokens=1024, *, strict=True, split=Split.FLOOR, **changed) -> HierarchicalCache:
    sizes = {"n_layers": L, "n_heads": H, "n_kv_heads": G, "head_dim": D, "max_nodes": 16, **changed}
    return HierarchicalCache(
        batch=batch,
        max_tokens=max_tokens,
        device="cpu",
        dtype=torch.float32,
        split=split,
        strict=strict,
        **sizes,
    )


@dataclass
class Model:
    """What one sequence should hold: its rows, and how many of its blocks are quantised."""

    rows: list = field(default_factory=list)  # [L, 2, G, D] each
    blocks: int = 0

    def prompt(self, rows) -> None:
        self.rows, self.blocks = list(rows), max(0, len(rows) // BLOCK - 1)

    def commit(self, rows) -> None:
        self.rows += list(rows)
        if len(self.rows) - BLOCK * self.blocks >= 2 * BLOCK:
            self.blocks += 1

    def stored(self, layer: int, bits: int, split: Split):
        """K and V [G, S, D] as they should be read."""
        k, v = torch.stack(self.rows)[:, layer].unbind(1)
        k, v = k.transpose(0, 1).clone(), v.transpose(0, 1).clone()
        for block in range(self.blocks):
            at = slice(BLOCK * block, BLOCK * block + BLOCK)
            k[:, at], v[:, at] = read(k[:, at], -2, bits, split), read(v[:, at], -1, bits, split)
        return k, v


def read(x, dim, bits, split):
    upper, lower, step, zero = (part.float() for part in quantise(x, dim, split))
    if bits == 4:
        return zero + step * (upper + split.upper_offset)
    return zero + step / 16 * (16 * upper + lower - split.lower_offset)


def fresh(T: int, gen) -> torch.Tensor:
    """Rows [T, L, 2, G, D]."""
    return torch.randn(T, L, 2, G, D, generator=gen) + 3


def write(cache, rows_BT) -> None:
    """Rows [B, T, L, 2, G, D] into every layer."""
    for layer in range(L):
        k, v = rows_BT[:, :, layer].unbind(2)
        cache.write(layer, k.transpose(1, 2), v.transpose(1, 2))


def check(cache: HierarchicalCache, models, *, tail=None, bits=8, view=None) -> None:
    """Lengths, block counts, every stored row, and attention over prefix and `tail` rows [B, T, ...]."""
    assert cache.len_B.tolist() == [len(m.rows) for m in models]
    assert cache.blocks_B.tolist() == [m.blocks for m in models]
    for layer in range(L):
        k8, v8 = dequantise(cache.planes.layer(layer), bits)
        for b, model in enumerate(models):
            k, v = model.stored(layer, bits, cache.planes.split)
            old = BLOCK * model.blocks
            assert torch.equal(k8[b, :, :old], k[:, :old]) and torch.equal(v8[b, :, :old], v[:, :old])
            slots = torch.arange(old, len(model.rows)) % RING
            assert torch.equal(cache.ring.k[layer, b][:, slots], k[:, old:])
            assert torch.equal(cache.ring.v[layer, b][:, slots], v[:, old:])
            if tail is None:
                continue
            own_k, own_v = tail[b, :, layer].transpose(0, 2).unbind(1)
            T, S = tail.shape[1], len(model.rows)
            q = torch.randn(1, H, T, D)
            seen = torch.cat((torch.ones(T, S, dtype=torch.bool), torch.ones(T, T).tril().bool()), 1)[None]
            expected, expected_lse = masked_attention(
                q, torch.cat((k, own_k), 1)[None], torch.cat((v, own_v), 1)[None], seen, scale=0.125
            )
            q_B = q.expand(len(models), -1, -1, -1)
            out, lse = (view or cache).attend(layer, q_B, mask=Causal(), scale=0.125)
            torch.testing.assert_close(out[b : b + 1], expected, atol=2e-5, rtol=2e-5)
            torch.testing.assert_close(lse[b : b + 1], expected_lse, atol=2e-5, rtol=2e-5)


def started(lengths, gen, **options):
    """A cache with prompts of these lengths, right-padded, and its model."""
    longest = max(lengths)
    cache = new_cache(len(lengths), **options)
    rows = fresh(len(lengths) * longest, gen).view(len(lengths), longest, L, 2, G, D)
    n_B = torch.tensor(lengths)
    cache.expect(n_B)
    write(cache, rows)
    cache.commit(None, n_B)
    models = [Model() for _ in lengths]
    for model, own, length in zip(models, rows, lengths, strict=True):
        model.prompt(own[:length])
    return cache, models


@pytest.mark.parametrize("length", [1, 127, 128, 129, 255, 256, 257, 383, 384, 511, 512, 640])
@pytest.mark.parametrize("split", Split)
def test_a_prompt_leaves_one_to_two_blocks_as_they_are(length, split):
    gen = torch.Generator().manual_seed(length)
    cache, models = started([length], gen, split=split)
    check(cache, models)
    left = length - BLOCK * models[0].blocks
    assert left < 2 * BLOCK and (length < BLOCK or left >= BLOCK)


@pytest.mark.parametrize("seed", range(4))
def test_random_commits_follow_the_list(seed):
    """Chains and trees of random accept lengths, over several flushes, with sequences out of step."""
    coin, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    cache, models = started([coin.randint(1, 300) for _ in range(3)], gen, strict=bool(seed % 2))
    flushed = 0
    for cycle in range(60):
        T = coin.randint(1, 16)
        tail = fresh(3 * T, gen).view(3, T, L, 2, G, D)
        draft = cache.draft_view()
        for row in range(min(T, 3)):  # a draft's rows, which the target's overwrite
            write(draft, fresh(3, gen).view(3, 1, L, 2, G, D))
            draft.commit(None, torch.ones(3).long())
            assert draft.len_B.tolist() == [len(m.rows) + row + 1 for m in models]
        write(cache, tail)
        if cycle % 20 == 0:
            check(cache, models, tail=tail)
        most = [T] * 3
        if cache.strict:
            most = [min(T, limit) for limit in cache.commit_limit().tolist()]
            assert min(most) >= 1
        n = [coin.randint(0, m) for m in most]
        path = None
        taken = [range(x) for x in n]
        if coin.random() < 0.5:
            P = max(1, *n)
            taken = [sorted(coin.sample(range(T), x)) for x in n]
            path = torch.tensor([[*rows, *[0] * (P - len(rows))] for rows in taken])
        cache.commit(path, torch.tensor(n))
        before = sum(m.blocks for m in models)
        for model, rows, own in zip(models, tail, taken, strict=True):
            model.commit(rows[list(own)])
        flushed += sum(m.blocks for m in models) - before
        assert all(len(m.rows) - BLOCK * m.blocks < 2 * BLOCK for m in models)
        if cycle % 10 == 9:
            check(cache, models)
    assert flushed >= 3


def test_it_flushes_at_every_multiple_of_the_block_and_nowhere_else():
    gen = torch.Generator().manual_seed(0)
    cache, models = started([250], gen)
    flushes = []
    while len(models[0].rows) < 400:
        row = fresh(1, gen)
        write(cache, row[None])
        before = int(cache.blocks_B)
        assert int(cache.commit_limit()) == BLOCK * before + 256 - len(models[0].rows) >= 1
        cache.commit(None, torch.tensor([1]))
        models[0].commit(row)
        if int(cache.blocks_B) > before:
            flushes.append(int(cache.len_B))
    check(cache, models)
    assert flushes == [256, 384]


@pytest.mark.parametrize("bits", [4, 8])
def test_the_draft_reads_its_own_rows_and_the_upper_half(bits):
    gen = torch.Generator().manual_seed(0)
    cache, models = started([300, 40], gen)
    view = cache.draft_view(bits)
    for _ in range(2):
        rows = [fresh(2, gen).view(2, 1, L, 2, G, D) for _ in range(3)]
        view.restart()
        for at, row in enumerate(rows):
            write(view, row)
            extended = [
                Model([*m.rows, *[r[b, 0] for r in rows[:at]]], m.blocks) for b, m in enumerate(models)
            ]
            q = torch.randn(2, H, 1, D)
            out, _ = view.attend(0, q, mask=Causal(), scale=0.125)
            k, v = extended[0].stored(0, bits, cache.planes.split)
            own_k, own_v = row[0, :, 0].transpose(0, 2).unbind(1)
            k, v = torch.cat((k, own_k), 1)[None], torch.cat((v, own_v), 1)[None]
            expected, _ = masked_attention(
                q[:1], k, v, torch.ones(1, 1, k.shape[2], dtype=torch.bool), scale=0.125
            )
            torch.testing.assert_close(out[:1], expected, atol=2e-5, rtol=2e-5)
            view.commit(None, torch.ones(2).long())
    check(cache, models)
    assert view.bytes() == 0


def test_trees_and_prefix_only_masks():
    gen = torch.Generator().manual_seed(0)
    cache, models = started([300], gen)
    tail = fresh(3, gen)[None]
    write(cache, tail)
    visible = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]).bool()
    q = torch.randn(1, H, 3, D)
    out, _ = cache.attend(0, q, mask=Tree(visible), scale=0.125)
    none, _ = cache.attend(0, q, mask=PrefixOnly(), scale=0.125)
    k, v = models[0].stored(0, 8, Split.FLOOR)
    own_k, own_v = tail[0, :, 0].transpose(0, 2).unbind(1)
    both = torch.cat((k, own_k), 1)[None], torch.cat((v, own_v), 1)[None]
    seen = torch.cat((torch.ones(1, 3, 300, dtype=torch.bool), visible), 2)
    torch.testing.assert_close(out, masked_attention(q, *both, seen, scale=0.125)[0], atol=2e-5, rtol=2e-5)
    seen = torch.ones(1, 3, 300, dtype=torch.bool)
    expected, _ = masked_attention(q, k[None], v[None], seen, scale=0.125)
    torch.testing.assert_close(none, expected, atol=2e-5, rtol=2e-5)


def test_a_prompt_attends_in_full_precision():
    rows = fresh(300, torch.Generator().manual_seed(0))[None]
    cache = new_cache()
    dense = DenseCache(
        n_layers=L,
        n_kv_heads=G,
        head_dim=D,
        batch=1,
        max_tokens=300,
        max_nodes=0,
        device="cpu",
        dtype=torch.float32,
    )
    q = torch.randn(1, H, 300, D)
    for one in (cache, dense):
        write(one, rows)
    out, _ = cache.attend(L - 1, q, mask=Causal(), scale=0.125)
    expected, _ = dense.attend(L - 1, q, mask=Causal(), scale=0.125)
    assert torch.equal(out, expected)
    with pytest.raises(ConflictError, match="causally"):
        cache.attend(0, q, mask=PrefixOnly(), scale=0.125)


def test_storage_stays_where_it_is_and_is_counted():
    gen = torch.Generator().manual_seed(0)
    cache, _ = started([600], gen, max_tokens=4096)
    before = [x.data_ptr() for x in cache.tensors()]
    for _ in range(70):
        write(cache, fresh(4, gen)[None])
        cache.commit(None, torch.tensor([4]).minimum(cache.commit_limit()))
    assert int(cache.blocks_B) >= 5 and [x.data_ptr() for x in cache.tensors()] == before
    assert sum(x.nbytes for x in cache.tensors()) == cache.bytes()
    per_token = (cache.bytes() - cache.ring.bytes() - 16) / (4096 - BLOCK) / (L * G)
    assert per_token == 2 * D + 4 * D / BLOCK + 4  # nibbles, K's step and zero a block, V's a token
    cache.clear()
    assert [x.data_ptr() for x in cache.tensors()] == before and int(cache.len_B) == int(cache.blocks_B) == 0
    assert cache.serves(1, 4096, cache.len_B.device, torch.float32)
    assert not cache.serves(1, 4097, cache.len_B.device, torch.float32)


def test_at_128k_it_takes_half_the_bytes_of_bf16():
    """Everything counted, Llama-3.1-8B's heads; on the meta device."""
    info = {"n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128}
    cache = HierarchicalCache(
        **info, batch=1, max_tokens=131072, max_nodes=8, device="meta", dtype=torch.bfloat16
    )
    assert 0.51 < cache.bytes() / (131072 * 32 * 8 * 128 * 2 * 2) < 0.53


def test_its_bytes_are_known_before_it_is_made(monkeypatch):
    lengths = (1, 300, 5000)
    sizes = {"n_layers": L, "n_kv_heads": G, "head_dim": D, "itemsize": 4}
    known = [room.hierarchical_bytes(**sizes, batch=2, max_tokens=length) for length in lengths]
    assert known == [new_cache(2, length).bytes() for length in lengths]
    monkeypatch.setattr(room, "free_bytes", lambda device: known[2] - 1)
    new_cache(2, 300)
    with pytest.raises(ConfigError, match=r"2 sequences of 5000 tokens .* about 4999 tokens would fit"):
        new_cache(2, 5000)
    with pytest.raises(torch.OutOfMemoryError):
        new_cache(2, 5000)


def test_what_it_refuses():
    gen = torch.Generator().manual_seed(0)
    for changed in ({"head_dim": 96}, {"n_heads": 3, "n_kv_heads": 2}, {"max_nodes": 129}, {"batch": 0}):
        with pytest.raises(ConfigError, match="allowed"):
            new_cache(**changed)
    cache = new_cache(max_tokens=256)
    with pytest.raises(ConfigError, match="room for 256"):
        write(cache, fresh(257, gen)[None])
    bad = fresh(200, gen)[None]
    bad[0, 100, 1, 0, 0, 7] = float("nan")
    write(cache, bad)
    with pytest.raises(DataError, match=r"keys of layer 1 hold NaN.*\(1 of 2 layers do\)"):
        cache.commit(None, torch.tensor([200]))
    assert not cache.len_B.any()
    write(cache, fresh(200, gen)[None])
    with pytest.raises(ConflictError, match=r"\[200\].*\[199\]"):
        cache.commit(None, torch.tensor([199]))
    cache.commit(None, torch.tensor([200]))
    with pytest.raises(ConfigError, match="129 new tokens"):
        write(cache, fresh(129, gen)[None])
    for _ in range(80):
        write(cache, fresh(1, gen)[None])
        cache.commit(None, torch.tensor([1]))
        if int(cache.len_B) > 256:
            break
    with pytest.raises(ConfigError, match="full"):
        write(cache, fresh(1, gen)[None])
    view = cache.draft_view()
    with pytest.raises(ConfigError, match="129 drafted"):
        for _ in range(129):
            write(view, fresh(1, gen)[None])
            view.commit(None, torch.ones(1).long())
    keep = Keep(torch.zeros(L, 1, G, 1).long(), torch.ones(L, 1, G).long())
    with pytest.raises(ConflictError, match="HierarchicalCache cannot be evicted"):
        compact(cache, keep, [200], room=1)

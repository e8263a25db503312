"""Run by test_interpreted.py under TRITON_INTERPRET=1: dropped entries change no bit of later attention."""

import pytest
import torch

from longtrain.cache.arena import ArenaCache
from longtrain.cache.base import Causal, Tree
from longtrain.cache.dense import DenseCache
from longtrain.cache.layered import last_entries
from longtrain.cache.window import WindowCache
from longtrain.kernels import fused_layer
from longtrain.kernels.tree_attention import launch

SEEN = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]])
PATHS = torch.tensor([[0, 1, 3], [0, 2, 4]])


def entries(layers, T, dtype):
    """Random keys and values of some new tokens, [layers, 2, B, 1, T, D]."""
    return torch.randn(layers, 2, 2, 1, T, 16).to(dtype)


def read(cache, kv, n_B):
    """Write a prompt, or a chunk of one."""
    cache.expect(n_B)
    for layer, both in enumerate(kv):
        cache.write(layer, *both)
    cache.commit(None, n_B)


@pytest.mark.parametrize(
    ("windows", "splits", "dtype"), [((8,), 3, torch.float32), ((70,), 1, torch.float16)]
)
def test_bits_are_those_of_a_cache_of_all_entries(windows, splits, dtype, monkeypatch):
    """Prompts of two lengths, then single tokens and trees; entries are dropped again and again."""
    monkeypatch.setattr(launch, "splits_for", lambda *args, **how: splits)
    # torch writes the entries: what is tested reads them, and the interpreter is slow
    monkeypatch.setattr(fused_layer, "kernels_serve", lambda x: False)
    layers, lengths = len(windows), [20, 233]
    size = {"n_kv_heads": 1, "head_dim": 16, "batch": 2, "device": "cpu", "dtype": dtype}
    size |= {"n_layers": layers, "windows": windows, "max_tokens": 900, "max_nodes": 40}
    whole, at_once, chunked = DenseCache(**size), WindowCache(**size), WindowCache(**size)
    prompt, n_B = entries(layers, max(lengths), dtype), torch.tensor(lengths)
    for cache in (whole, at_once):
        read(cache, prompt, n_B)
    for begin, end in ((0, 100), (100, 120), (120, 233)):
        read(chunked, prompt[..., begin:end, :], (n_B - begin).clamp(0, end - begin))
    copied = last_entries(whole, range(layers), lengths, room=500, nodes=40)
    arenas = [ArenaCache(cache) for cache in (whole, at_once, chunked, copied)]
    for arena, cache in zip(arenas, (whole, at_once, chunked, copied), strict=True):
        arena.take(cache, room=500)
    moves, real = [], at_once.to_front
    monkeypatch.setattr(at_once, "to_front", lambda start_B: moves.append(start_B.tolist()) or real(start_B))
    steps = [(40, [40, 31], None), (1, [1, 1], None)] * 5
    steps[2:2] = steps[9:9] = [(5, [3, 2], PATHS)]
    for number, (T, kept_B, path_BP) in enumerate(steps):
        mask = Causal() if path_BP is None else Tree(SEEN.bool().expand(2, -1, -1))
        used = arenas[: 4 if number < 3 else 2]
        for layer, window in enumerate(windows):
            q, (k, v) = torch.randn(2, 2, T, 16).to(dtype), entries(1, T, dtype)[0]
            outs = []
            for arena in used:
                arena.write(layer, k, v)
                if T < 40:  # longer steps make place for others; the interpreter is slow
                    outs += arena.attend_window(layer, q, mask=mask, scale=0.3, window=window)
            for at, found in enumerate(outs):
                assert torch.equal(found, outs[at % 2])
        for arena in used:
            arena.commit(path_BP, torch.tensor(kept_B))
    assert len(moves) >= 2 and {start % 64 for both in moves for start in both} == {0}
    assert max(max(both) for both in moves) > 0

"""Which positions a thinning cache holds: found by the keys that were written at each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longtrain.decoding.prefill import prefill


@torch.no_grad()
def decoded(target: Any, evictor: Any, prompts: list[list[int]], answers: list[list[int]]) -> Any:
    """Prompts, and answers (of one length) a token a step: the cache, keys k_LBGND and scores s_LBGN of all.

    Only of the newest rows are keys in the tail, so those are noted after every step.
    """
    from longtrain.targets.step import TokenBatch

    noted: dict[str, list[Tensor]] = {"k": [], "s": []}
    hook = evictor.hook

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(evictor, name)

        decoding = True

        def hook(self, lengths: Any) -> Any:
            return hook(lengths)

        def thinning(self, run: Any, keep: Any, *, nodes: int) -> Any:
            noted["k"].append(run.cache.k_LBGSD[:, :, :, : max(run.lengths)].clone())
            noted["s"].append(torch.stack(run.watched.scores))
            return evictor.thinning(run, keep, nodes=nodes)

    most = len(answers[0])
    cache = prefill(target, target.plain_cache, prompts, max_new_tokens=most, nodes=1, evictor=Spy()).cache
    write = cache.write
    for token_B in torch.tensor(answers).T:
        keys: list[Tensor] = []
        cache.write = lambda layer, k, v, keys=keys: (keys.append(k.clone()), write(layer, k, v))
        target.forward(TokenBatch(cache.len_B[:, None].clone(), token_B[:, None]), cache)
        noted["k"].append(torch.stack(keys))
        noted["s"].append(torch.stack([cache._fresh[layer] for layer in range(len(keys))]))
        cache.commit(None, torch.ones_like(token_B))
    return cache, torch.cat(noted["k"], 3), torch.cat(noted["s"], 3)


def positions(cache: Any, k_LBGND: Tensor, b: int) -> list[list[list[int]]]:
    """Positions held of a sequence, [layer][KV head]; every row held must be one that was written."""
    L, _, G = k_LBGND.shape[:3]
    found = []
    for layer in range(L):
        counts = cache._held_LBG[layer].flatten().tolist()
        parts = cache.prefixes[layer].k_ND.split(counts)
        heads = []
        for head in range(G):
            tail = cache.tail.k_LBGSD[layer, b, head, : int(cache.tail.len_B[b])]
            rows = torch.cat((parts[b * G + head], tail))
            same = (rows[:, None] == k_LBGND[layer, b, head][None]).all(-1)
            assert (same.sum(1) == 1).all()
            heads.append(same.int().argmax(1).tolist())
        found.append(heads)
    return found

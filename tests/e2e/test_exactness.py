"""Speculative text is plain text, token for token, on real model families with their real caches.

A method adds its draft to `DRAFTS`; everything below then holds it to the same standard.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as once

import pytest
import torch
from torch import Tensor

from longtrain.cache.base import KVCache
from longtrain.decoding.engine import Engine
from longtrain.decoding.roles import ChildChoice, Parts, TokenTree, TreeShape
from longtrain.decoding.sampling import Rng, Sampling
from longtrain.decoding.stats import Stats
from longtrain.decoding.tree import depths
from longtrain.targets.loading import random_target
from longtrain.targets.model import Target
from longtrain.targets.step import OutputRequest, TargetStep, TokenBatch

TARGETS = ("llama_micro", "qwen3_micro")
CHAIN, TREE = TreeShape((1, 1, 1, 1)), TreeShape((3, 4, 4, 2))


class Crib:
    """Knows the plain text and copies it with mistakes, more of them in some rows than in others.

    In a tree the right token may stand at any sibling, and every other node is wrong on purpose.
    """

    def __init__(self, target: Target, prompts: list[list[int]], plain: list[list[int]]) -> None:
        self.outputs = OutputRequest()
        self.vocab = target.info.vocab_size
        longest = max(len(p) + len(t) for p, t in zip(prompts, plain, strict=True)) + 32
        texts = [(p + t + [0] * longest)[:longest] for p, t in zip(prompts, plain, strict=True)]
        self.text_BS = torch.tensor(texts)
        self.gen = torch.Generator().manual_seed(0)

    def start(self, tokens_BS: Tensor, n_B: Tensor, step: TargetStep, cache: KVCache) -> None:
        self.cache = cache
        self.right_B = torch.linspace(0.3, 0.95, len(n_B))

    def propose(self, root_B: Tensor, shape: TreeShape, sampling: Sampling, rng: Rng) -> TokenTree:
        batch, pos_B = len(root_B), self.cache.len_B
        row_B = torch.arange(batch)
        tokens, parents = [root_B[:, None]], [torch.full((batch, 1), -1)]
        on_track_B, first, wide = torch.zeros(batch, dtype=torch.int64), 0, 1
        for depth, width in enumerate(shape.widths, 1):
            token = torch.randint(self.vocab, (batch, width), generator=self.gen)
            parent = first + torch.randint(wide, (batch, width), generator=self.gen)
            at_B = torch.randint(width, (batch,), generator=self.gen)
            right_B = torch.rand(batch, generator=self.gen) < self.right_B
            token[row_B, at_B] = torch.where(right_B, self.text_BS[row_B, pos_B + depth], token[row_B, at_B])
            parent[row_B, at_B] = on_track_B
            first, wide = first + wide, width
            on_track_B = first + at_B
            tokens.append(token)
            parents.append(parent)
        return TokenTree(torch.cat(tokens, 1), torch.cat(parents, 1), depths(shape), ChildChoice.POINT)

    def observe(self, tree: TokenTree, verdict: object, step: TargetStep) -> None:
        pass

    def bytes(self) -> int:
        return 0

    def tensors(self) -> None:
        return None


Factory = Callable[[Target, list[list[int]], list[list[int]]], Parts]
DRAFTS: dict[str, Factory] = {
    "crib": lambda target, prompts, plain: Parts(draft=Crib(target, prompts, plain), name="crib"),
}


@once
def target(name: str, dtype: torch.dtype) -> Target:
    return random_target(name, seed=0, dtype=dtype)


def prompts_of(count: int) -> list[list[int]]:
    gen = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 70, (count,), generator=gen).tolist()
    return [torch.randint(97, (n,), generator=gen).tolist() for n in lengths]


@once
def plain(name: str, dtype: torch.dtype, count: int, new: int, sampling: Sampling) -> list[list[int]]:
    settings = {"max_new_tokens": new, "sampling": sampling, "ignore_eos": True}
    return Engine(target(name, dtype)).generate(prompts_of(count), **settings).tokens


def check(
    name: str, dtype: torch.dtype, count: int, new: int, sampling: Sampling, shape: TreeShape, draft: str
) -> Stats:
    """Decode with a draft, compare with plain decoding, and give back what it took."""
    model, prompts = target(name, dtype), prompts_of(count)
    expected = plain(name, dtype, count, new, sampling)
    parts = DRAFTS[draft](model, prompts, expected)
    settings = {"max_new_tokens": new, "sampling": sampling, "shape": shape, "ignore_eos": True}
    out = Engine(model, parts).generate(prompts, **settings)
    assert out.tokens == expected
    assert [len(t) for t in out.tokens] == [new] * count
    return out.stats


# With these seeds no two best logits are nearer than 9e-5, so fp32 rounding cannot decide a token.
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(
    ("name", "shape"), zip(TARGETS, (CHAIN, TREE), strict=True), ids=["llama-chain", "qwen3-tree"]
)
def test_greedy_text_of_512_tokens(name, shape, draft):
    stats = check(name, torch.float32, 6, 512, Sampling(), shape, draft)
    if draft == "crib":
        taus = [sum(c.accepted + 1 for c in row) / len(row) for row in stats.rows]
        assert min(taus) < 1.8 and max(taus) > 3.5  # rows advance at very different speeds


@pytest.mark.corners
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", TARGETS)
def test_greedy_text_in_double_precision(name, shape, draft):
    check(name, torch.float64, 5, 64, Sampling(), shape, draft)


@pytest.mark.corners
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", TARGETS)
def test_sampled_text_of_deterministic_drafts(name, shape, draft):
    check(name, torch.float64, 5, 64, Sampling(temperature=0.9, top_p=0.95, seed=2), shape, draft)


@pytest.mark.parametrize("name", TARGETS)
def test_plain_text_is_the_argmax_of_one_long_forward(name):
    """Ties the engine to the model itself: no cache, no padding, no neighbours."""
    model, prompts = target(name, torch.float64), prompts_of(5)
    for prompt, tokens in zip(prompts, plain(name, torch.float64, 5, 64, Sampling()), strict=True):
        ids = torch.tensor([prompt + tokens])
        cache = model.new_cache(1, ids.shape[1], 1)
        rows = TokenBatch(torch.arange(ids.shape[1])[None], ids)
        logits = model.forward(rows, cache, outputs=OutputRequest(logits="all")).logits_BTV
        assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == tokens

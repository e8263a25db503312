"""Greedy text of DSpark is plain decoding's, over many prompts, targets, shapes, and beside look-up."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from longtrain.decoding.engine import PLAIN, Engine
from longtrain.decoding.roles import TreeShape
from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.spec import SPEC
from longtrain.methods.prompt_lookup.joined import with_lookup
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES

LAYERS = {"num_hidden_layers": 4, "vocab_size": 97}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
TARGETS = {
    "llama": {**SHAPES["llama_micro"], **LAYERS},
    "qwen3": {**SHAPES["qwen3_micro"], **LAYERS},
    "windows": {**SHAPES["gemma3_micro"], **LAYERS, "layer_types": WINDOWS},
}
CONFIG = Config(layers=[0, 2], n_layers=2, block_size=5, markov_rank=97, intermediate_size=40)
SHAPES_OF = {"chain": TreeShape((1,) * 5), "tree": TreeShape((4, 6, 6)), "kept": TreeShape((4, 4, 4), keep=9)}
BATCH = 25


def prompts_of(count):
    """Prompts of 1 to 60 tokens; every other one repeats a part of itself, for look-up."""
    gen = torch.Generator().manual_seed(7)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=gen))

    found = []
    for number in range(count):
        part = torch.randint(2, LAYERS["vocab_size"], (draw(1, 61),), generator=gen).tolist()
        found.append((part * 4)[: max(len(part), draw(20, 61))] if number % 2 else part)
    return found


def taught(draft, texts):
    """The draft whose Markov head adds the pairs of these texts: right often, at every depth, not always."""
    head = draft.markov_head
    with torch.no_grad():
        head.markov_w1.weight.copy_(torch.eye(97))
        table = torch.zeros_like(head.markov_w2.weight)
        for text in texts:
            for before, after in pairwise(text):
                table[after, before] += 4.0
        head.markov_w2.weight.copy_(table)
    return draft


@pytest.mark.parametrize(
    ("count", "new", "shapes"),
    [
        (4, 12, ("chain", "tree")),
        *(pytest.param(200, 24, (kind,), marks=pytest.mark.slow) for kind in SHAPES_OF),
    ],
    ids=["a few", *SHAPES_OF],
)
@pytest.mark.parametrize("name", TARGETS)
def test_greedy_text_is_plain_decodings(name, count, new, shapes, make_draft):
    """In fp64, in batches of mixed lengths, and where a sequence ends before the others do."""
    target = random_target(TARGETS[name], seed=1, dtype=torch.float64)
    prompts = prompts_of(count)
    batches = [prompts[first : first + BATCH] for first in range(0, count, BATCH)]
    whole = Engine(target).generate(batches[0], max_new_tokens=new, shape=PLAIN, ignore_eos=True).tokens
    how = {"max_new_tokens": new, "stop_ids": [whole[0][new // 2]]}
    plain = [Engine(target).generate(some, shape=PLAIN, **how) for some in batches]
    draft = taught(make_draft(target, CONFIG), whole)
    parts = SPEC.attach(draft, target, CONFIG, {})
    assert {end for out in plain for end in out.finish} == {"stop_id", "length"}
    for kind in shapes:
        for lookup in ("off", "auto"):
            engine, accepted, copied = Engine(target, with_lookup(parts, lookup)), 0, 0.0
            for some, own in zip(batches, plain, strict=True):
                got = engine.generate(some, shape=SHAPES_OF[kind], **how)
                assert got.tokens == own.tokens and got.finish == own.finish
                accepted += sum(map(sum, got.drafted))
                copied += got.stats.copied_share
            assert accepted > count  # more than a token of each answer
            assert copied == 0 if lookup == "off" else copied > 0 or count < 200

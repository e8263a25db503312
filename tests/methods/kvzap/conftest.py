"""A sharp random target behind the bundled tokenizer, a module with weights that matter, packed rows."""

from __future__ import annotations

import pytest
import torch

from longtrain.data.packing.batch import Batch
from longtrain.methods.kvzap.config import Config
from longtrain.methods.kvzap.modules import KVzap
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.tokenizer import read_tokenizer


@pytest.fixture
def target(request):
    """Llama's, or of the family in a test's indirect parameter."""
    tokenizer, family = read_tokenizer("tiny")[0], getattr(request, "param", "llama")
    found = random_target({**SHAPES[f"{family}_micro"], "vocab_size": len(tokenizer)}, dtype=torch.float64)
    found.tokenizer = tokenizer
    with torch.no_grad():
        for layer in found.model.model.layers:
            layer.self_attn.q_proj.weight.mul_(3.0)  # a uniform attention would hide faults
    return found


@pytest.fixture
def config():
    return Config(hidden_dim=8, chunk=16, sinks=2, window=6)


@pytest.fixture
def module(target, config):
    torch.manual_seed(3)
    return KVzap(config, target.info).double()


@pytest.fixture
def make_batch():
    """A packed row of (context, response) lengths; a response of 0 is a document without labels."""

    def make(pairs, *, seed=3, header=()) -> Batch:
        gen = torch.Generator().manual_seed(seed)
        bounds, learn = [0], []
        for context, response in pairs:
            bounds.append(bounds[-1] + context + response)
            learn += [False] * context + [True] * response
        ids = torch.randint(10, 4000, (bounds[-1],), generator=gen)
        for start in bounds[:-1]:
            ids[start : start + len(header)] = torch.tensor(header, dtype=ids.dtype)
        mask = torch.tensor(learn)
        return Batch(ids, tuple(bounds), mask, seed=1, tokens_in_step=int(mask.sum()), documents_in_step=2)

    return make

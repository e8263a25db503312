"""Packed rows for the tests of drafts."""

from __future__ import annotations

import pytest
import torch

from longtrain.data.packing.batch import Batch


@pytest.fixture
def make_batch():
    """A packed row of random documents."""

    def make(target, lengths, *, seed=3, mask=None) -> Batch:
        gen = torch.Generator().manual_seed(seed)
        bounds = [0]
        for n in lengths:
            bounds.append(bounds[-1] + n)
        ids = torch.randint(2, target.info.vocab_size, (bounds[-1],), generator=gen)
        learn = torch.ones(bounds[-1], dtype=torch.bool)
        if mask is not None:
            learn = mask(bounds[-1])
        learn[bounds[:-1]] = False
        return Batch(ids, tuple(bounds), learn, seed=seed, tokens_in_step=int(learn.sum()))

    return make

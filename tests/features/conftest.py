"""Small targets in bf16, whose features bf16 holds without rounding, and packed rows."""

from __future__ import annotations

import pytest
import torch
from feature_rows import BOUNDS, WANT, Reader

from longtrain.data.packing.batch import Batch
from longtrain.features.forms import Form
from longtrain.features.shards import FeatureFiles
from longtrain.features.target import StoredTarget
from longtrain.targets.loading import random_target


@pytest.fixture(scope="session", params=["llama_micro", "qwen3_micro", "qwen2_micro"])
def family(request):
    return random_target(request.param, seed=1, dtype=torch.bfloat16)


@pytest.fixture(scope="session")
def target():
    return random_target("llama_micro", seed=1, dtype=torch.bfloat16)


@pytest.fixture
def batch():
    """The last document is padding: it has no labels."""
    rng = torch.Generator().manual_seed(3)
    ids_T = torch.randint(2, 97, (BOUNDS[-1],), generator=rng)
    mask_T = torch.ones(len(ids_T), dtype=torch.bool)
    mask_T[list(BOUNDS[:-1])] = False
    mask_T[BOUNDS[-2] :] = False
    names = ("one", "two", "three", "padding")
    return Batch(ids_T, BOUNDS, mask_T, seed=3, tokens_in_step=int(mask_T.sum()), names=names)


@pytest.fixture
def ask(tmp_path):
    """`ask(target, batch)`: the row by features in a folder, which is closed afterwards."""

    def make(target, batch, *, form=Form(), compute=True, outputs=WANT, pos_T=None, folder=tmp_path / "f"):  # noqa: B008
        shards = FeatureFiles(folder)
        stand_in = StoredTarget(target, shards, form, compute=compute)
        reader = Reader(stand_in, outputs, pos_T)
        stand_in.follow(reader)
        try:
            return reader(batch)
        finally:
            if compute:
                shards.close()

    return make

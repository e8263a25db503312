"""Random targets and prompts for the tests of eviction."""

from __future__ import annotations

from functools import cache as once

import torch

from longtrain.decoding.evict import Budget
from longtrain.methods.policies.snapkv import SnapKV
from longtrain.targets.loading import random_target
from longtrain.targets.model import Target

TARGETS = ("llama_micro", "qwen3_micro")


@once
def target(name: str = "llama_micro", dtype: torch.dtype = torch.float64) -> Target:
    return random_target(name, seed=0, dtype=dtype)


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randint(97, (n,), generator=rng).tolist() for n in lengths]


def snapkv(budget: int, **options) -> SnapKV:
    return SnapKV(Budget(budget), **{"window": 8, "kernel": 5, **options})

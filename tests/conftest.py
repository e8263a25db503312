"""Shared by all tests: no network, one thread, no writing outside a test's own folder."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
    MPLBACKEND="Agg",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "LONGTRAIN_HOME", "HYDRA_FULL_ERROR"):
    os.environ.pop(name, None)

import pytest  # noqa: E402 (the environment comes first)
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return Path(__file__).parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests, saying why, where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

"""The environment with kvpress, which needs an older transformers than longtrain."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from environments import Environment

KVPRESS = "0.5.5"


@pytest.fixture(scope="session")
def interpreter() -> Path:
    """A Python with kvpress: made once, or the one that LONGTRAIN_KVPRESS_PYTHON names."""
    if given := os.environ.get("LONGTRAIN_KVPRESS_PYTHON"):
        return Path(given)
    needs = (f"torch=={torch.__version__.split('+')[0]}", f"kvpress=={KVPRESS}")
    return Environment("kvpress", needs).python()

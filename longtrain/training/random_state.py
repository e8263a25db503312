"""The state of every random generator of a process, as tensors and plain values."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def get() -> dict[str, Any]:
    """The state of Python's, numpy's and torch's generators, loadable without running pickled code."""
    state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, gauss = state
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_(state: dict[str, Any]) -> None:
    """Restore what `get` gave."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())

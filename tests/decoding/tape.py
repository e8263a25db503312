"""A CUDA graph's semantics on a CPU: the operators of one run, done again on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
"""Operators that make the host wait, or whose result has a size that only the values tell."""


class Tape(TorchDispatchMode):
    """Runs some work and records it; `replay` does it again, each result written to where it was then.

    Raises:
        AssertionError: the host was asked for a value.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        self._first = True
        with self:
            work()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::").split(".")[0]
        assert name not in HOST, f"{name} asks the host"
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        """Once more; the recording itself was the first time."""
        if self._first:
            self._first = False
            return
        for func, args, kwargs, before in self.calls:
            now = func(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(now), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

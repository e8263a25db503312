"""A CUDA graph's semantics on a CPU: the operators of one run, done again on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longtrain.decoding import captured
from longtrain.decoding.engine import Engine
from longtrain.decoding.roles import Parts
from tests.helpers import everywhere

HOST = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
"""Operators that make the host wait, or whose result has a size that only the values tell."""


class Tape(TorchDispatchMode):
    """Runs some work and records it; `replay` does it again, each result written to where it was then.

    Raises:
        AssertionError: the host was asked for a value.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, list[torch.Tensor]]] = []
        self._first = True
        with self:
            work()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::").split(".")[0]
        assert name not in HOST, f"{name} asks the host"
        out = func(*args, **kwargs)
        results = tensors_of(out)
        if not (func.is_view and all(memory(one) == memory(args[0]) for one in results)):
            self.calls.append((func, args, kwargs, results))  # what a view shows is written by others
        return out

    def replay(self) -> None:
        """Once more; the recording itself was the first time."""
        if self._first:
            self._first = False
            return
        for func, args, kwargs, before in self.calls:
            now = func(*args, **kwargs)
            for old, new in zip(before, tensors_of(now), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def memory(tensor: torch.Tensor) -> int:
    """Where the numbers begin of which a tensor shows all or some."""
    return tensor.untyped_storage().data_ptr()


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors of an operator's result; most give just one."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


class Graph:
    """A tape with the memory of its results, as CUDA graphs have it."""

    def __init__(self, tape: Tape, pool: object) -> None:
        self.replay, self._pool = tape.replay, pool

    def pool(self) -> object:
        return self._pool


@pytest.fixture
def tapes(monkeypatch) -> list[Tape]:
    """Cycles are recorded as on a GPU: the second one of a kind, and every later one is that record again."""
    made, living = [], WeakSet()

    def record(work, device, pool) -> Graph:
        assert pool is None or pool in {graph.pool() for graph in living}, "nothing holds this pool any more"
        made.append(Tape(work))
        graph = Graph(made[-1], pool or object())
        living.add(graph)
        return graph

    monkeypatch.setattr(captured, "has_graphs", lambda device: True)
    monkeypatch.setattr(captured, "record", record)
    for place in ("arena", "history"):
        monkeypatch.setattr(f"longtrain.cache.{place}.tree_attention", everywhere)
    return made


def same(plain, other) -> None:
    assert other.tokens == plain.tokens and other.finish == plain.finish and other.texts == plain.texts
    assert other.stats.rows == plain.stats.rows
    assert other.stats.output_tokens == plain.stats.output_tokens


def both(target, parts: Parts | None, prompts, **settings):
    """One call by each way, then that call again from the buffers of the first."""
    plain = Engine(target, parts, capture=False).generate(prompts, **settings)
    static = Engine(target, parts, capture=True)
    same(plain, static.generate(prompts, **settings))
    same(plain, static.generate(prompts, **settings))
    return plain

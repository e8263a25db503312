"""Accumulates metrics on the device, over micro-batches and ranks, until they are read from time to time.

Every optimiser step gives one record. Reading synchronises with the device, so it happens every `log_every`
steps and not at every step; a loss that is not finite is still found in the record of its own step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor

from longtrain.data.packing.batch import Batch
from longtrain.methods.spec import Loss

Number = Tensor | float


@dataclass(frozen=True)
class StepRecord:
    """Metrics of one optimiser step (or one validation), over all micro-batches and ranks.

    Args:
        step: optimiser steps done, 1 after the first.
        metrics: name -> sum / count over all micro-batches and ranks; NaN where the count is 0.
        tokens: labels that the loss summed over.
        documents: number of documents.
        rows: number of micro-batches.
        sequence_tokens: tokens of all packed sequences, labels or not.
        offending: names of the documents in micro-batches whose loss is not finite.
    """

    step: int
    metrics: dict[str, float]
    tokens: int
    documents: int
    rows: int
    sequence_tokens: int
    offending: tuple[str, ...] = ()


@dataclass
class _Micro:
    """One micro-batch: sums and counts by name, and its facts on the host."""

    sums: dict[str, tuple[Number, Number]]
    tokens: int
    documents: int
    sequence_tokens: int
    names: tuple[str, ...]


@dataclass
class _Step:
    step: int
    micros: list[_Micro]
    extra: dict[str, Number] = field(default_factory=dict)


class Pool:
    """Collects losses by micro-batch and returns them as one `StepRecord` a step."""

    def __init__(self) -> None:
        self._open: list[_Micro] = []
        self._closed: list[_Step] = []

    def add(self, loss: Loss, batch: Batch) -> None:
        """Add one micro-batch; nothing is read from the device."""
        sums: dict[str, tuple[Number, Number]] = {"loss": (loss.total.detach(), float(loss.tokens))}
        sums.update({name: (total.detach(), count.detach()) for name, (total, count) in loss.metrics.items()})
        documents = len(batch.names) or len(batch.bounds) - 1
        self._open.append(_Micro(sums, loss.tokens, documents, batch.ids_T.numel(), batch.names))

    def close(self, step: int, extra: dict[str, Number] | None = None) -> None:
        """End a step, made of what was added since the last call; `extra` is equal on every rank."""
        self._closed.append(_Step(step, self._open, extra or {}))
        self._open = []

    def read(self, gather: Callable[[Any], list[Any]]) -> list[StepRecord]:
        """Return the records of all closed steps, the same on every rank. Synchronises with the device once.

        Args:
            gather: an object of this rank -> the objects of all ranks, in rank order.
        """
        mine, self._closed = [_on_host(step) for step in self._closed], []
        if not mine:
            return []
        return [_pooled(parts) for parts in zip(*gather(mine), strict=True)]


def _on_host(step: _Step) -> dict[str, Any]:
    """Convert one rank's part of a step to plain numbers."""
    pairs = [pair for micro in step.micros for pair in micro.sums.values()]
    numbers = _read([number for pair in pairs for number in pair] + list(step.extra.values()))
    sums: dict[str, list[float]] = {}
    offending: list[str] = []
    for micro in step.micros:
        for name in micro.sums:
            total, count = next(numbers), next(numbers)
            pooled = sums.setdefault(name, [0.0, 0.0])
            pooled[0] += total
            pooled[1] += count
            if name == "loss" and not math.isfinite(total):
                offending.extend(micro.names)
    return {
        "step": step.step,
        "sums": sums,
        "extra": {name: next(numbers) for name in step.extra},
        "tokens": sum(micro.tokens for micro in step.micros),
        "documents": sum(micro.documents for micro in step.micros),
        "rows": len(step.micros),
        "sequence_tokens": sum(micro.sequence_tokens for micro in step.micros),
        "offending": offending,
    }


def _read(numbers: list[Number]) -> Iterator[float]:
    """Read device scalars as Python floats, in one transfer; with offload some are on the host already."""
    tensors = [number.reshape(()).double() for number in numbers if _far(number)]
    values = iter(torch.stack(tensors).tolist() if tensors else [])
    return iter([next(values) if _far(number) else float(number) for number in numbers])


def _far(number: Number) -> TypeGuard[Tensor]:
    """True for a tensor on a GPU (reading it synchronises)."""
    return isinstance(number, Tensor) and number.device.type != "cpu"


def _pooled(parts: tuple[dict[str, Any], ...]) -> StepRecord:
    """Sum the ranks' parts of one step, in rank order."""
    sums: dict[str, list[float]] = {}
    for part in parts:
        for name, (total, count) in part["sums"].items():
            pooled = sums.setdefault(name, [0.0, 0.0])
            pooled[0] += total
            pooled[1] += count
    means = {name: total / count if count else math.nan for name, (total, count) in sums.items()}
    return StepRecord(
        step=parts[0]["step"],
        metrics={**means, **parts[0]["extra"]},
        offending=tuple(name for part in parts for name in part["offending"]),
        **{
            key: sum(part[key] for part in parts)
            for key in ("tokens", "documents", "rows", "sequence_tokens")
        },
    )

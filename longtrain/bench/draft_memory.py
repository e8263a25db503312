"""Peak memory and speed of a LongSpec training step by row length, the target's pass and the draft's apart.

A random target of a published shape reads one document as long as the row. The draft's step is then measured
on the recorded outputs of that pass, so that its peak is its own; the whole step as training runs it.

Shapes: T tokens of the row.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longtrain import methods
from longtrain.bench.report import gib, spread
from longtrain.data.rows.batch import Batch
from longtrain.log import get_logger
from longtrain.targets.loading import random_target
from longtrain.targets.step import Want

if TYPE_CHECKING:
    from longtrain.targets.model import Target
    from longtrain.targets.step import PackedStep

log = get_logger(__name__)

COLUMNS = {
    "row tokens": "row_tokens",
    "target tok/s": "target.tokens_per_s",
    "target peak GiB": "target.peak_gib",
    "draft tok/s": "draft.tokens_per_s",
    "draft peak GiB": "draft.peak_gib",
    "inputs GiB": "inputs.total_gib",
    "growth of draft peak / of inputs": "growth",
    "step tok/s": "step.tokens_per_s",
    "step peak GiB": "step.peak_gib",
    "failed": "failed",
}


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Args:
        shape: name of a shape of `longtrain.targets.shapes`.
        dtype: of the target; bfloat16 trains the draft under autocast, with fp32 weights.
        device: cuda or cpu; a CPU has times only.
        lengths: row lengths, tokens, ascending.
        method: keys of LongSpec's Config.
        warmup: steps not counted.
        repeats: steps counted.
        seed: of weights and tokens.
    """

    shape: str
    dtype: str
    device: str
    lengths: tuple[int, ...]
    method: dict[str, Any]
    warmup: int = 1
    repeats: int = 3
    seed: int = 0

    @property
    def keys(self) -> dict[str, Any]:
        """Of LongSpec's Config; there is nothing to warm-start from in a random target."""
        return {**self.method, "warm_start": False}


class Replay:
    """A target whose packed pass is recorded; everything else is the real one's."""

    def __init__(self, target: Target, step: PackedStep) -> None:
        self._target, self._step = target, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def packed(self, *_: Any, **__: Any) -> PackedStep:
        """What the real target gave for this row."""
        return self._step


def measure(settings: Settings) -> list[dict[str, Any]]:
    """One entry a row length; a length that does not fit in memory says so and the next one is tried."""
    torch.manual_seed(settings.seed)
    log.info("building a random target shape=%s dtype=%s", settings.shape, settings.dtype)
    target = random_target(
        settings.shape, seed=settings.seed, dtype=settings.dtype, device=torch.device(settings.device)
    )
    spec = methods.get("longspec")
    config = spec.config(**settings.keys)
    module = spec.build(config, target.info).to(target.device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=target.device.type == "cuda")
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # so that its state is there before anything is measured
    rows: list[dict[str, Any]] = []
    for length in settings.lengths:
        optimizer.zero_grad(set_to_none=True)
        try:
            row = _measure_row(settings, target, module, optimizer, length)
        except torch.OutOfMemoryError as error:
            row = {"row_tokens": length, "failed": f"out of memory: {str(error).partition('.')[0]}"}
        _add_growth(rows, row)
        rows.append(row)
        log.info("measured %s", row)
        gc.collect()
        if target.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def _measure_row(
    settings: Settings, target: Target, module: nn.Module, optimizer: torch.optim.Optimizer, length: int
) -> dict[str, Any]:
    spec = methods.get("longspec")
    if spec.objective is None:
        raise RuntimeError("longspec has no objective")
    config, device = spec.config(**settings.keys), target.device
    batch = _row(length, target.info.vocab_size, settings.seed).to(device)
    pos_T = torch.arange(length, device=device)
    layer = config.kv_source_layer % target.info.n_layers
    kl = config.objective == "kl"
    want = Want("none", (-1,) if kl else (), None if kl else layer, kv=(layer,))

    def read() -> PackedStep:
        with torch.no_grad():
            return target.packed(batch.ids_T, pos_T, batch.bounds, want)

    def train(objective: nn.Module, *, update: bool) -> None:
        with _autocast(target):
            loss = objective(batch)
        (loss.total / loss.tokens).backward()
        if update:
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    base = _allocated(device)
    result: dict[str, Any] = {"row_tokens": length, "weights_and_optimizer_gib": gib(base)}
    log.info("row_tokens=%d target pass", length)
    result["target"] = _timed(settings, device, length, read)
    step = read()
    result["inputs"] = _inputs(step, batch)
    log.info("row_tokens=%d draft step", length)
    recorded: Any = Replay(target, step)
    draft = partial(train, spec.objective(module, recorded, config), update=False)
    result["draft"] = _timed(settings, device, length, draft)
    del step, recorded, draft
    log.info("row_tokens=%d whole step", length)
    whole = partial(train, spec.objective(module, target, config), update=True)
    result["step"] = _timed(settings, device, length, whole)
    return result


def _timed(
    settings: Settings, device: torch.device, length: int, work: Callable[[], object]
) -> dict[str, Any]:
    """Seconds of a piece of work, and the most memory allocated while it ran (CUDA)."""
    cuda = device.type == "cuda"
    for _ in range(settings.warmup):
        work()
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before, seconds = _allocated(device), []
    for _ in range(settings.repeats):
        start = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) if cuda else None
    reserved = torch.cuda.max_memory_reserved(device) if cuda else None
    times = spread(seconds)
    return {
        "seconds": times,
        "tokens_per_s": length / times["median"],
        "peak_bytes": peak,
        "peak_gib": gib(peak),
        "before_bytes": before,
        "reserved_gib": gib(reserved),
    }


def _inputs(step: PackedStep, batch: Batch) -> dict[str, Any]:
    """Bytes of what the draft's step reads of the whole row. Embeddings are looked up a chunk at a time."""
    ((k_TGD, v_TGD),) = step.kv.values()
    tensors = {"k": k_TGD, "v": v_TGD, "hidden": step.hidden.get(-1), "ids": batch.ids_T}
    tensors["loss_mask"] = batch.loss_mask_T
    sizes = {f"{name}_bytes": 0 if x is None else x.numel() * x.element_size() for name, x in tensors.items()}
    total = sum(sizes.values())
    return {**sizes, "embeddings_bytes": 0, "total_bytes": total, "total_gib": gib(total)}


def _add_growth(before: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Growth of the draft step's peak since the first length, over the growth of its inputs."""
    first = next((old for old in before if "draft" in old), None)
    if first is None or "draft" not in row or row["draft"]["peak_bytes"] is None:
        return
    inputs = row["inputs"]["total_bytes"] - first["inputs"]["total_bytes"]
    if inputs:
        row["growth"] = (row["draft"]["peak_bytes"] - first["draft"]["peak_bytes"]) / inputs


def _row(length: int, vocab_size: int, seed: int) -> Batch:
    """One random document as long as the row; every token but the first is a label."""
    coins = torch.Generator().manual_seed(seed)
    ids_T: Tensor = torch.randint(vocab_size, (length,), generator=coins)
    mask_T = torch.ones(length, dtype=torch.bool)
    mask_T[0] = False
    return Batch(ids_T, (0, length), mask_T, seed=seed, tokens_in_step=length - 1)


def _autocast(target: Target) -> Any:
    if target.dtype in (torch.bfloat16, torch.float16):
        return torch.autocast(target.device.type, dtype=target.dtype)
    return nullcontext()


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None

"""Time and peak memory of a training step of any method, and apart the target's pass and the module's step.

A random target of a published shape reads one random document as long as the row. The target's pass is that
of the method, without what watches it. Where the method's step follows it, the step is also measured alone,
on the recorded outputs of the pass, so that its peak is its own. Passes and whole steps run in turns, so that
a clock that drifts meets both.
Shapes: T tokens of the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch
from torch import Tensor

from longtrain import methods
from longtrain.bench import clock
from longtrain.bench.clock import Timing, gib
from longtrain.bench.suites import Auto, Bench, Context, Dtype, Row, shape_keys
from longtrain.data.rows.batch import Batch
from longtrain.errors import ConfigError
from longtrain.log import get_logger
from longtrain.methods.spec import MethodSpec, Objective
from longtrain.settings import Count, CountOrZero, Lengths, Seconds, read
from longtrain.targets.model import Target
from longtrain.targets.step import PackedStep

log = get_logger(__name__)

COLUMNS = {
    "row tokens": "row_tokens",
    "response": "response_tokens",
    "target tok/s": "target.tokens_per_s",
    "target peak GiB": "target.peak_gib",
    "draft tok/s": "draft.tokens_per_s",
    "draft peak GiB": "draft.peak_gib",
    "inputs GiB": "inputs.total_gib",
    "growth of draft peak / of inputs": "growth",
    "step tok/s": "step.tokens_per_s",
    "step / target": "ratio",
    "step peak GiB": "step.peak_gib",
    "weights GiB": "before_gib",
    "failed": "failed",
}


@dataclass(frozen=True)
class TrainingSettings:
    """The keys of `suite=training` and `suite=draft_memory`.

    Args:
        shape: the random target's shape, a name of `targets.shapes` or the keys of a `config.json`.
        dtype: the target's numbers; in 16 bits a module trains under autocast, with fp32 weights.
        lengths: tokens of the rows.
        method: what is trained where `method=` chooses nothing.
        chunk_tokens: rows of a chunk, for methods that have a setting of this name; None: their own.
        response_tokens: labels at the end of a row; None: as the method says, 0: all tokens but the first.
        warmup: steps not counted.
        repeats: most steps counted.
        min_repeats: steps counted whatever the time.
        seconds: of a length; no further step starts after it.
    """

    shape: Annotated[str | dict[str, Any], Auto("llama31_8b", "llama_micro")]
    lengths: Lengths
    dtype: Dtype = "float32"
    method: str | None = None
    chunk_tokens: CountOrZero | None = None
    response_tokens: CountOrZero | None = None
    warmup: CountOrZero = 1
    repeats: Count = 3
    min_repeats: Count = 3
    seconds: Seconds = 600.0


@dataclass
class Trained:
    """A method's module with its optimizer on a target.

    Args:
        spec: the method.
        target: the frozen target, or what stands for it.
        objective: the loss.
        optimizer: its state is there before anything is measured.
    """

    spec: MethodSpec
    target: RecordedTarget
    objective: Objective
    optimizer: torch.optim.Optimizer

    @property
    def parameters(self) -> list[Tensor]:
        """The trained tensors."""
        return [value for group in self.optimizer.param_groups for value in group["params"]]

    def step(self, batch: Batch, *, update: bool = True) -> None:
        """Forward and backward, and unless `update` is false clipping and the optimizer."""
        dtype = self.target.real.dtype
        low = dtype in (torch.bfloat16, torch.float16)
        with torch.autocast(batch.ids_T.device.type, dtype=dtype) if low else nullcontext():
            loss = self.objective(batch)
        labels = batch.documents_in_step if self.objective.per_document else loss.tokens
        (loss.total / labels).backward()
        if update:
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class RecordedTarget:
    """A target whose packed pass can be recorded and given again; everything else is the real one's."""

    def __init__(self, target: Target) -> None:
        self.real = target
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """The arguments of the last pass."""
        self.recorded: PackedStep | None = None
        """What is given instead of a pass; None: a pass is run."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def packed(self, *args: Any, **kwargs: Any) -> PackedStep:
        """As `Target.packed`."""
        self.call = (args, kwargs)
        return self.recorded or self.real.packed(*args, **kwargs)

    @torch.no_grad()
    def again(self) -> PackedStep:
        """The last pass once more, with nothing that watches it."""
        assert self.call is not None, "the objective runs no packed pass"
        args, kwargs = self.call
        return self.real.packed(*args, **{key: value for key, value in kwargs.items() if key != "watch"})

    @property
    def is_watched(self) -> bool:
        """Whether the objective works while the target's pass runs."""
        return self.call is not None and self.call[1].get("watch") is not None


def run(settings: TrainingSettings, context: Context) -> Iterator[Row]:
    """One row a length, as they are ready; a length that does not fit in memory says so.

    Raises:
        ConfigError: no method is chosen, or one that trains nothing against a target.
    """
    spec, config = chosen(settings, context)
    shape_keys(settings.shape)
    named = settings.shape if isinstance(settings.shape, str) else "that of target.path"
    log.info("building a random target shape=%s dtype=%s", named, settings.dtype)
    target = context.random_target(settings.shape, dtype=settings.dtype)
    yield from measure(settings, prepared(spec, config, target, seed=context.seed), seed=context.seed)


def chosen(settings: TrainingSettings, context: Context) -> tuple[MethodSpec, Any]:
    """The method that is trained, and its settings.

    Raises:
        ConfigError: none is chosen, or it trains nothing against a target.
    """
    keys: Mapping[str, Any] = context.method or {"name": settings.method}
    if keys["name"] is None:
        raise ConfigError("no method is chosen; pass method=NAME, one that is trained against a target")
    spec = methods.get(str(keys["name"]))
    if spec.objective is None or spec.export is not None:
        raise ConfigError(f"method={spec.name} trains nothing against a target; pass another")
    values = {key: value for key, value in keys.items() if key != "name"}
    if settings.chunk_tokens is not None and any(one.name == "chunk_tokens" for one in fields(spec.config)):
        values["chunk_tokens"] = settings.chunk_tokens
    return spec, read(spec.config, values, "method")


def prepared(spec: MethodSpec, config: Any, target: Target, *, seed: int) -> Trained:
    """A module with random weights and an optimizer that has its state."""
    assert spec.objective is not None
    torch.manual_seed(seed)
    module = spec.build(config, target.info).to(target.device)
    stand_in: Any = RecordedTarget(target)
    objective = spec.objective(module, stand_in, config).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=target.device.type == "cuda")
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Trained(spec, stand_in, objective, optimizer)


def measure(settings: TrainingSettings, trained: Trained, *, seed: int) -> Iterator[Row]:
    """See `run`."""
    first: Row | None = None
    labels = settings.response_tokens
    for length in settings.lengths:
        usual = trained.spec.cost.response_tokens
        response = min(usual, length // 2) if labels is None else labels
        row: Row = {"row_tokens": length, "response_tokens": response or length - 1}
        row["prompt_tokens"] = length - row["response_tokens"]
        with clock.may_fail(row, trained.target.real.device):
            for part in _figures(settings, trained, row, seed):
                row |= part
        trained.target.recorded = trained.target.call = None
        trained.optimizer.zero_grad(set_to_none=True)
        clock.release(trained.target.real.device)
        if first is not None:
            row |= growth(first, row)
        first = first or (row if "draft" in row else None)
        yield row


def _figures(settings: TrainingSettings, trained: Trained, row: Row, seed: int) -> Iterator[Row]:
    """The parts of a row, one after the other."""
    target, length = trained.target, row["row_tokens"]
    device = target.real.device
    vocabulary = target.real.info.vocab_size
    batch = document(length, row["response_tokens"], vocabulary, seed).to(device)
    before = clock.allocated(device)
    yield {
        "trained_parameters": sum(value.numel() for value in trained.parameters),
        "before_bytes": before,
        "before_gib": gib(before),
        "weights_and_optimizer_gib": gib(before),
    }
    trained.step(batch)
    for _ in range(settings.warmup):
        target.again()
        trained.step(batch)
    clock.release(device)
    going = clock.rounds(settings.repeats, least=settings.min_repeats, seconds=settings.seconds)
    passes: list[Timing] = []
    steps: list[Timing] = []
    while going(len(steps)):
        passes.append(clock.timed(target.again, device))
        steps.append(clock.timed(lambda: trained.step(batch), device))
    yield {"target": speeds(passes, length, before), "step": speeds(steps, length, before)}
    yield clock.versus(passes, steps)
    if target.is_watched:  # what follows the pass cannot be told from it
        return
    target.recorded = target.again()
    yield {"inputs": inputs(target.recorded, batch)}
    before = clock.allocated(device)
    alone = clock.repeated(
        lambda: trained.step(batch, update=False), device, warmup=settings.warmup, repeats=len(steps)
    )
    yield {"draft": speeds(alone, length, before)}


def speeds(timings: list[Timing], tokens: int, before: int | None) -> Row:
    """Times, tokens a second and memory of a piece of work."""
    found = clock.summary(timings)
    seconds = clock.spread([one.wall_ms / 1e3 for one in timings])
    reserved = max((one.reserved_bytes for one in timings if one.reserved_bytes is not None), default=None)
    more = {"before_bytes": before, "reserved_gib": gib(reserved)}
    return {**found, "seconds": seconds, "tokens_per_s": tokens / seconds["median"], **more}


def inputs(step: PackedStep, batch: Batch) -> Row:
    """Bytes of what a step reads of the whole row; embeddings are looked up in parts."""
    tensors = {
        "k": [k for k, _ in step.kv.values()],
        "v": [v for _, v in step.kv.values()],
        "hidden": list(step.hidden.values()),
        "ids": [batch.ids_T],
        "loss_mask": [batch.loss_mask_T],
    }
    sizes = {f"{name}_bytes": sum(one.nbytes for one in found) for name, found in tensors.items()}
    total = sum(sizes.values())
    return {**sizes, "embeddings_bytes": 0, "total_bytes": total, "total_gib": gib(total)}


def growth(first: Row, row: Row) -> Row:
    """Growth of the module's peak since the first length, over the growth of its inputs."""
    if "draft" not in row or row["draft"]["peak_bytes"] is None:
        return {}
    more = row["inputs"]["total_bytes"] - first["inputs"]["total_bytes"]
    return {"growth": (row["draft"]["peak_bytes"] - first["draft"]["peak_bytes"]) / more} if more else {}


def document(length: int, response: int, vocab_size: int, seed: int) -> Batch:
    """One random document as long as the row; its last `response` tokens are the labels."""
    coins = torch.Generator().manual_seed(seed)
    ids_T = torch.randint(vocab_size, (length,), generator=coins)
    mask_T = torch.arange(length) >= length - response
    return Batch(ids_T, (0, length), mask_T, seed=seed, tokens_in_step=int(mask_T.sum()), documents_in_step=1)


BENCH = Bench(settings=TrainingSettings, run=run, columns=COLUMNS)

"""Time and peak memory of any method's training step, of the target's pass and of the module's step.

A random target of a published shape reads random documents of equal length that fill the packed sequence.
The target's pass is the method's, without its attention hook; a plain one of the same sequence if the method
runs the target on a cache instead (KVzap). If the module's step runs after the pass, it is
also measured alone, on recorded outputs of the pass, to obtain its own memory peak. Passes and whole steps
alternate, so that clock drift affects both.
Shapes: T tokens of the packed sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch
from torch import Tensor

from longtrain import methods
from longtrain.bench import clock, parts
from longtrain.bench.clock import Timing, gib
from longtrain.bench.suites import Auto, Bench, Context, Dtype, Row, shape_keys
from longtrain.bench.words import WordTokens
from longtrain.data.packing import packed_sequences
from longtrain.data.packing.batch import Batch
from longtrain.errors import ConfigError
from longtrain.log import get_logger
from longtrain.methods.spec import MethodSpec, Objective
from longtrain.settings import Count, CountOrZero, Lengths, Seconds, read
from longtrain.targets.model import Target
from longtrain.targets.step import OutputRequest, PackedStep, TargetStep

log = get_logger(__name__)

COLUMNS = {
    "row tokens": "sequence_tokens",
    "documents": "documents",
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
    "target %": "percent.target",
    "draft %": "percent.draft",
    "loss %": "percent.loss",
    "optimizer %": "percent.optimizer",
    "copies %": "percent.copies",
    "failed": "failed",
}


@dataclass(frozen=True)
class TrainingSettings:
    """The keys of `suite=training` and `suite=draft_memory`.

    Args:
        shape: the random target's shape, a name of `targets.shapes` or the keys of a `config.json`.
        dtype: the target's dtype; in 16 bits a module trains under autocast, with fp32 weights.
        lengths: lengths of the packed sequences in tokens.
        method: the method that is trained if `method=` is not given.
        chunk_tokens: tokens of a chunk, for methods that have a setting of this name; None: their default.
        documents: number of documents that fill the packed sequence.
        response_tokens: labels at the end of each document; None: the method's; 0: all tokens except the
            first.
        warmup: steps not counted.
        repeats: largest number of counted steps.
        min_repeats: smallest number of counted steps, whatever their time.
        seconds: time limit of a length, after which no further step starts.
    """

    shape: Annotated[str | dict[str, Any], Auto("llama31_8b", "llama_micro")]
    lengths: Lengths
    dtype: Dtype = "float32"
    method: str | None = None
    chunk_tokens: CountOrZero | None = None
    documents: Count = 1
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
        target: the frozen target, or a `RecordedTarget`.
        objective: the objective.
        optimizer: the optimizer, with its state already allocated.
    """

    spec: MethodSpec
    target: RecordedTarget
    objective: Objective
    optimizer: torch.optim.Optimizer

    @property
    def parameters(self) -> list[Tensor]:
        """Return the trained tensors."""
        return [value for group in self.optimizer.param_groups for value in group["params"]]

    def step(self, batch: Batch, *, update: bool = True) -> None:
        """Run forward and backward, and with `update` also clipping and the optimizer."""
        dtype = self.target.real.dtype
        low = dtype in (torch.bfloat16, torch.float16)
        with torch.autocast(batch.ids_T.device.type, dtype=dtype) if low else nullcontext():
            loss = self.objective(batch)
        labels = batch.documents_in_step if self.objective.per_document else loss.tokens
        (loss.total / labels).backward()
        if update:
            with parts.part(parts.OPTIMIZER):
                torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class RecordedTarget:
    """Target whose packed pass can be recorded and replayed; everything else is the real target's, except the
    tokenizer, which random weights lack.
    """

    def __init__(self, target: Target) -> None:
        self.real = target
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """Arguments of the last packed pass; None: the objective ran none."""
        self.recorded: PackedStep | None = None
        """Outputs returned instead of running a pass; None: a pass is run."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def packed(self, *args: Any, **kwargs: Any) -> PackedStep:
        """See `Target.packed`."""
        self.call = (args, kwargs)
        with parts.part(parts.TARGET):
            return self.recorded or self.real.packed(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> TargetStep:
        """See `Target.forward`."""
        with parts.part(parts.TARGET):
            return self.real.forward(*args, **kwargs)

    def require_tokenizer(self) -> WordTokens:
        """Return a stand-in for a tokenizer."""
        return WordTokens(self.real.info.vocab_size)

    @torch.no_grad()
    def again(self, batch: Batch) -> PackedStep:
        """Run the last packed pass again, without an attention hook; a plain one if there was none."""
        if self.call is None:
            pos_T = packed_sequences.to_device(packed_sequences.positions(batch.bounds), self.real.device)
            return self.real.packed(batch.ids_T, pos_T, batch.bounds, OutputRequest("none"))
        args, kwargs = self.call
        return self.real.packed(*args, **{key: value for key, value in kwargs.items() if key != "hook"})

    @property
    def is_watched(self) -> bool:
        """True if the objective observes the target's pass while it runs, or runs no packed pass."""
        return self.call is None or self.call[1].get("hook") is not None


def run(settings: TrainingSettings, context: Context) -> Iterator[Row]:
    """Yield one row for each length; one that does not fit in memory has `failed`.

    Raises:
        ConfigError: no method is chosen, or the method does not train against a target.
    """
    spec, config = chosen(settings, context)
    shape_keys(settings.shape)
    named = settings.shape if isinstance(settings.shape, str) else "that of target.path"
    log.info("building a random target shape=%s dtype=%s", named, settings.dtype)
    target = context.random_target(settings.shape, dtype=settings.dtype)
    yield from measure(settings, prepared(spec, config, target, seed=context.seed), seed=context.seed)


def chosen(settings: TrainingSettings, context: Context) -> tuple[MethodSpec, Any]:
    """Return the method that is trained, and its settings.

    Raises:
        ConfigError: no method is chosen, or the method does not train against a target.
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
    """Build a module with random weights and an optimizer with allocated state."""
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
        usual, each = trained.spec.cost.response_tokens, length // settings.documents
        response = min(usual, each // 2) if labels is None else labels
        row: Row = {"sequence_tokens": length, "documents": settings.documents}
        row["response_tokens"] = response or each - 1
        row["prompt_tokens"] = each - row["response_tokens"]
        with clock.may_fail(row, trained.target.real.device):
            for part in _metrics(settings, trained, row, seed):
                row |= part
        trained.target.recorded = trained.target.call = None
        trained.optimizer.zero_grad(set_to_none=True)
        clock.release(trained.target.real.device)
        if first is not None:
            row |= growth(first, row)
        first = first or (row if "draft" in row else None)
        yield row


def _metrics(settings: TrainingSettings, trained: Trained, row: Row, seed: int) -> Iterator[Row]:
    """Measure the parts of a row one after the other."""
    target, length = trained.target, row["sequence_tokens"]
    device = target.real.device
    vocabulary = target.real.info.vocab_size
    batch = random_batch(length, row["response_tokens"], vocabulary, seed, documents=settings.documents).to(
        device
    )
    before = clock.allocated(device)
    yield {
        "trained_parameters": sum(value.numel() for value in trained.parameters),
        "before_bytes": before,
        "before_gib": gib(before),
        "weights_and_optimizer_gib": gib(before),
    }
    trained.step(batch)
    for _ in range(settings.warmup):
        target.again(batch)
        trained.step(batch)
    clock.release(device)
    going = clock.rounds(settings.repeats, least=settings.min_repeats, seconds=settings.seconds)
    passes: list[Timing] = []
    steps: list[Timing] = []
    while going(len(steps)):
        passes.append(clock.timed(lambda: target.again(batch), device))
        steps.append(clock.timed(lambda: trained.step(batch), device))
    yield {"target": speeds(passes, length, before), "step": speeds(steps, length, before)}
    yield clock.versus(passes, steps)
    found = parts.shares(lambda: trained.step(batch), device)
    names = ("target", "draft", "loss", "optimizer", "copies")
    yield {"parts": found, "percent": {name: 100 * found[name]["share"] for name in names}}
    if target.is_watched:  # the module's step cannot be separated from the pass
        return
    target.recorded = target.again(batch)
    yield {"inputs": inputs(target.recorded, batch)}
    before = clock.allocated(device)
    alone = clock.repeated(
        lambda: trained.step(batch, update=False), device, warmup=settings.warmup, repeats=len(steps)
    )
    yield {"draft": speeds(alone, length, before)}


def speeds(timings: list[Timing], tokens: int, before: int | None) -> Row:
    """Return times, tokens per second and memory of timed work."""
    found = clock.summary(timings)
    seconds = clock.spread([one.wall_ms / 1e3 for one in timings])
    reserved = max((one.reserved_bytes for one in timings if one.reserved_bytes is not None), default=None)
    more = {"before_bytes": before, "reserved_gib": gib(reserved)}
    return {**found, "seconds": seconds, "tokens_per_s": tokens / seconds["median"], **more}


def inputs(step: PackedStep, batch: Batch) -> Row:
    """Return the bytes of a step's inputs for the whole sequence, without embeddings (looked up in parts)."""
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
    """Return the growth of the module's peak since the first length, divided by that of its inputs."""
    if "draft" not in row or row["draft"]["peak_bytes"] is None:
        return {}
    more = row["inputs"]["total_bytes"] - first["inputs"]["total_bytes"]
    return {"growth": (row["draft"]["peak_bytes"] - first["draft"]["peak_bytes"]) / more} if more else {}


def random_batch(length: int, response: int, vocab_size: int, seed: int, *, documents: int = 1) -> Batch:
    """Return a packed sequence of random documents of equal length.

    Args:
        length: tokens of the sequence; the last document also has what does not divide.
        response: labels at the end of each document.
        vocab_size: size of the vocabulary.
        seed: seed of the tokens.
        documents: number of documents.
    """
    rng = torch.Generator().manual_seed(seed)
    ids_T = torch.randint(vocab_size, (length,), generator=rng)
    bounds = (*(n * (length // documents) for n in range(documents)), length)
    mask_T = torch.zeros(length, dtype=torch.bool)
    for end in bounds[1:]:
        mask_T[end - response : end] = True
    labels = int(mask_T.sum())
    return Batch(ids_T, bounds, mask_T, seed=seed, tokens_in_step=labels, documents_in_step=documents)


BENCH = Bench(settings=TrainingSettings, run=run, columns=COLUMNS)

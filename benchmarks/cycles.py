"""Sets up captured decoding cycles after a context, and times them as a whole and by phase.

A cycle is a `DecodeStep`, captured as by the engine. To time phases, each is also captured in a separate CUDA
graph, so that the times between its events are the GPU's. On a CPU the phases run without capture. The
context is a prompt that is read, or a cache filled with random keys and values.
Source: LongSpec Fig. 5 (one step split into draft, target attention, target linear, verification).

Shapes: B batch, S cached tokens, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtrain.bench import clock
from longtrain.bench.suites import Row
from longtrain.decoding.captured import (
    CaptureBuffers,
    Cycles,
    Stopwatch,
    can_capture,
    has_graphs,
    record,
)
from longtrain.decoding.decode_step import DecodeStep, Judge
from longtrain.decoding.engine import Engine
from longtrain.decoding.output import TokenTransfer
from longtrain.decoding.prefill import pad, prefill
from longtrain.decoding.roles import Draft, Parts, TreeShape, attention_observer
from longtrain.decoding.sampling import HashRng, MinNewTokens, Sampling
from longtrain.errors import ConflictError
from longtrain.targets.step import TargetStep

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.decoding.retrieval.selector import Selector
    from longtrain.targets.attention import AttentionHook
    from longtrain.targets.model import Target

PHASES = ("propose_ms", "attention_ms", "linear_ms", "accept_ms", "commit_ms")
"""Keys of the results of `split`, in the order of plots and tables."""


def phase_columns(*headings: str, within: str = "") -> dict[str, str]:
    """Return table columns for the phases of a cycle.

    Args:
        headings: one for each phase, in the order of `PHASES`.
        within: key of a row, with a dot, that holds the results of `split`; empty: the row itself.
    """
    keys = (key if key == "linear_ms" else f"{key}.median" for key in PHASES)
    return {heading: f"{within}{key}" for heading, key in zip(headings, keys, strict=True)}


@dataclass(frozen=True)
class CycleCounts:
    """The number of cycles to run, and how their inputs are made.

    Args:
        cycles: number of counted cycles.
        warmup: cycles before them, at least 2: the first compiles, the second is captured.
        seed: seed of random inputs, of sampling and of the order of accepted lengths.
        sampling: sampling settings.
        read: True: the target reads the prompts; False: the cache is filled with random keys and values.
    """

    cycles: int = 32
    warmup: int = 4
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    read: bool = True

    def room(self, shape: TreeShape) -> int:
        """Return the largest number of tokens that the cycles of `whole` and `split` commit."""
        return 2 * (self.warmup + self.cycles + 2) * (shape.depth + 1)


@torch.no_grad()
def ready(
    target: Target,
    parts: Parts,
    prompts: Sequence[Sequence[int]],
    shape: TreeShape,
    counts: CycleCounts,
    judge: Judge | None = None,
) -> DecodeStep:
    """Return a decode step positioned after prompts of one length.

    Args:
        target: the model.
        parts: draft, cache and evictor; plain decoding does not use the draft.
        prompts: token ids.
        shape: shape of the drafted tree.
        counts: see `CycleCounts`.
        judge: overrides the accepted length after verification; None: the target decides.

    Raises:
        ConflictError: the cycles cannot be captured, or an evictor needs prompts that are read.
    """
    if parts.evictor is not None and not counts.read:
        raise ConflictError(
            f"a part of '{parts.name}' chooses among rows that were read, and rows are random here; pass "
            "suite.fill=prompt"
        )
    buffers = CaptureBuffers(target, selects=parts.selector is not None)
    draft = parts.draft if shape.widths else None
    room, batch = counts.room(shape), len(prompts)
    new_cache: Callable[..., KVCache] = target.plain_cache if parts.evictor else buffers.new_cache
    if parts.cache is not None:
        new_cache = Engine(target, parts).new_cache
    if counts.read:
        read = prefill(
            target,
            new_cache,
            prompts,
            max_new_tokens=room,
            nodes=shape.n_nodes,
            hidden=parts.hidden(drafts=draft is not None),
            evictor=parts.evictor,
            attention_observer=attention_observer(draft),
        )
        cache, step, tokens_BS, n_B = read.cache, read.step, read.tokens_BS, read.n_B
    else:
        tokens_BS, n_B = pad(prompts, target.device)
        context, looking = len(prompts[0]), attention_observer(draft)
        cache = new_cache(batch, context + room, shape.n_nodes)
        states = [
            random_states(target, role, batch, context, seed=counts.seed) for role in (draft, parts.selector)
        ]
        step = TargetStep(None, states[0] | states[1])
        hook = looking.prompt_hook([context] * batch) if looking else None
        fill(cache, target, n_B, context, seed=counts.seed, hook=hook)
    roles = [role for role in (draft, parts.selector) if role is not None]
    if not can_capture(cache) or any(role.tensors() is None for role in roles):
        raise ConflictError(
            f"the cycles of parts '{parts.name}' cannot be captured, and so not measured one by one; leave "
            "them out"
        )
    cache = buffers.take_in(cache, room=room + shape.n_nodes)
    if draft is not None:
        draft.start(tokens_BS, n_B, step, cache)
    if parts.selector is not None:
        parts.selector.start(tokens_BS, n_B, step, cache)
    min_new = MinNewTokens((), 0, target.device)
    phases = DecodeStep(
        target, cache, draft, shape, counts.sampling, min_new, judge=judge, selector=parts.selector
    )
    root_B = tokens_BS[:, -1] if step.logits_BTV is None else step.logits_BTV[:, -1].argmax(-1)
    phases.texts.begin(root_B, HashRng(counts.seed, torch.arange(batch, device=target.device)), room)
    return phases


def random_heads(target: Target, batch: int, rows: int, seed: int) -> Callable[[int], Tensor]:
    """Return a function: number of heads -> new random queries, keys or values of a layer."""
    rng = torch.Generator(device=target.device).manual_seed(seed)

    def random(heads: int) -> Tensor:
        size = (batch, heads, rows, target.info.head_dim)
        return torch.randn(size, generator=rng, device=target.device, dtype=target.dtype)

    return random


def random_states(
    target: Target, draft: Draft | Selector | None, batch: int, rows: int, seed: int
) -> dict[int, Tensor]:
    """Return random hidden states of the layers that a draft reads, the same for all layers."""
    layers = draft.outputs.hidden if draft else ()
    if not layers:
        return {}
    rng = torch.Generator(device=target.device).manual_seed(seed)
    size = (batch, rows, target.info.hidden_size)
    state_BTE = torch.randn(size, generator=rng, device=target.device, dtype=target.dtype)
    return dict.fromkeys(layers, state_BTE)


@torch.no_grad()
def fill(
    cache: KVCache, target: Target, n_B: Tensor, context: int, *, seed: int, hook: AttentionHook | None = None
) -> None:
    """Fill a cache with random keys and values of `context` tokens, the same in all layers.

    Args:
        cache: an empty cache.
        target: the model, for its heads.
        n_B: the context length, for each sequence.
        context: number of tokens.
        seed: seed of the keys and values.
        hook: attention hook that is called with them and with random queries.
    """
    info, random = target.info, random_heads(target, len(n_B), context, seed)
    k, v = random(info.n_kv_heads), random(info.n_kv_heads)
    q = None if hook is None else random(info.n_heads)
    cache.expect(None)
    for layer in range(info.n_layers):
        cache.write(layer, k, v)
        if hook is not None and q is not None:
            hook(layer, q, k, v)
    cache.commit(None, n_B)


@torch.no_grad()
def whole(phases: DecodeStep, counts: CycleCounts) -> Row:
    """Time consecutive cycles as the engine runs them: wall time, the GPU's busy and idle time, tokens.

    Args:
        phases: the decode step; warmup and counted cycles are run.
        counts: numbers of cycles.
    """
    device = phases.target.device
    cycles = Cycles(phases, captured=True)
    transfer = TokenTransfer(cycles.late)
    busy: list[Stopwatch] = []
    idle: list[Stopwatch] = []

    def go(count: int) -> int:
        tokens = 0
        for i in range(count):
            if idle:
                idle[-1].stop()
            busy.append(clock.watched(cycles.run, device))
            idle.append(Stopwatch(device))
            transfer.send(phases.news_BX)
            for emitted in transfer.arrived(rest=i == count - 1):
                tokens += sum(len(one.tokens) for one in emitted)
        return tokens

    go(counts.warmup)
    clock.wait(device)
    busy.clear()
    idle.clear()
    start = time.perf_counter()
    tokens = go(counts.cycles)
    clock.wait(device)
    wall_s = time.perf_counter() - start
    return {
        "cycle_ms": 1e3 * wall_s / counts.cycles,
        "busy_ms": clock.spread_of(busy),
        "idle_ms": clock.spread_of(idle[:-1]) if counts.cycles > 1 else None,
        "tokens_per_cycle": tokens / counts.cycles / len(phases.root_B),
        "tokens_per_s": tokens / wall_s,
    }


@torch.no_grad()
def split(phases: DecodeStep, counts: CycleCounts) -> Row:
    """Time each phase separately, and the target's attention and linear layers, in milliseconds.

    A selector adds `select_ms` to `PHASES`: scoring and selecting KV entries.

    Args:
        phases: the decode step.
        counts: numbers of cycles.
    """
    device = phases.target.device
    made: Row = {}  # outputs that phases pass on, at fixed addresses

    def propose() -> None:
        made["tree"] = phases.propose()

    def forward() -> None:
        made["step"] = phases.forward(made["tree"])

    def accept() -> None:
        made["verdict"] = phases.accept(made["tree"], made["step"])

    def commit() -> None:
        phases.commit(made["tree"], made["step"], made["verdict"])

    pool = torch.cuda.graph_pool_handle() if has_graphs(device) else None
    works = {"propose": propose, "forward": forward, "accept": accept, "commit": commit}
    if phases.selector is not None:
        works = {"select": phases.select} | works
    found = _timed(works, counts, device, pool)
    found |= _timed({"attention": _attention(phases)}, counts, device, None)
    found["linear_ms"] = found["forward_ms"]["median"] - found["attention_ms"]["median"]
    return found


def _timed(
    works: Mapping[str, Callable[[], None]], counts: CycleCounts, device: torch.device, pool: Any
) -> Row:
    """Return the spread of the milliseconds of each function; every cycle runs them in order."""
    for work in works.values():
        work()
    runs = {
        name: record(work, device, pool).replay if has_graphs(device) else work
        for name, work in works.items()
    }
    stopwatches: dict[str, list[Stopwatch]] = {name: [] for name in runs}
    for _ in range(counts.warmup + counts.cycles):
        for name, run in runs.items():
            stopwatches[name].append(clock.watched(run, device))
        clock.wait(device)
    return {f"{name}_ms": clock.spread_of(found[counts.warmup :]) for name, found in stopwatches.items()}


def _attention(phases: DecodeStep) -> Callable[[], None]:
    """Return the cache's part of the target's forward: writes and attention of all layers."""
    target, cache = phases.target, phases.cache
    info = target.info
    random = random_heads(target, len(phases.root_B), phases.shape.n_nodes, seed=0)
    q, k, v = random(info.n_heads), random(info.n_kv_heads), random(info.n_kv_heads)
    mask = phases.mask(phases.propose())

    def attend() -> None:
        for layer in range(info.n_layers):
            cache.write(layer, k, v)
            cache.attend(layer, q, mask=mask, scale=info.head_dim**-0.5)

    return attend

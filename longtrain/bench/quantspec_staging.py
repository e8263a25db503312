"""A cell of `bench suite=quantspec` ready to run: a cache that holds the context, a draft, given acceptance.

Shapes: B batch, S cached tokens, G KV heads, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.bench import steps
from longtrain.bench.quantspec_accept import Replay
from longtrain.bench.quantspec_cells import Cell, Settings, Way
from longtrain.decoding.captured import CaptureBuffers, can_capture
from longtrain.decoding.phases import Phases
from longtrain.decoding.prefill import pad, prefill
from longtrain.decoding.roles import Parts, onlooker
from longtrain.decoding.sampling import HashCoins, MinNewTokens
from longtrain.errors import ConflictError
from longtrain.targets.step import TargetStep

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.targets.attention import Watch
    from longtrain.targets.model import Target


@torch.no_grad()
def staged(target: Target, parts: Parts, cell: Cell, settings: Settings) -> Phases:
    """Cycles that stand right behind so many tokens.

    Args:
        target: the model.
        parts: draft and cache.
        cell: what to measure.
        settings: see `Settings`.

    Raises:
        ConflictError: such cycles cannot be captured, or a draft needs a prompt that was read.
    """
    way, context, batch = cell.way, cell.context, cell.batch
    shape, stage = way.shape, CaptureBuffers(target)
    draft = parts.draft if shape.widths else None
    room = steps_of(way, settings).room
    coins = torch.Generator().manual_seed(settings.seed + context)
    prompts = torch.randint(target.info.vocab_size, (batch, context), generator=coins).tolist()
    new_cache = parts.cache or stage.new_cache
    if settings.fill == "prompt":
        read = prefill(
            target,
            new_cache,
            prompts,
            max_new_tokens=room,
            nodes=shape.n_nodes,
            hidden=draft.want.hidden if draft else (),
            onlooker=onlooker(draft),
        )
        cache, step, tokens_BS, n_B = read.cache, read.step, read.tokens_BS, read.n_B
    else:
        if draft is not None and draft.want.hidden:
            raise ConflictError(
                f"the draft of '{parts.name}' starts from hidden states, which random rows do not have; pass "
                "suite.fill=prompt"
            )
        tokens_BS, n_B = pad(prompts, target.device)
        cache = new_cache(batch, context + room, shape.n_nodes)
        looking = onlooker(draft)
        watch = looking.watch_prompts([context] * batch) if looking else None
        fill(cache, target, n_B, context, seed=settings.seed, watch=watch)
        step = TargetStep(None, {})
    if not can_capture(cache) or (draft is not None and draft.tensors() is None):
        raise ConflictError(
            f"the cycles of parts '{parts.name}' cannot be captured, and so not measured here"
        )
    cache = stage.take_in(cache, room=room + shape.n_nodes)
    if draft is not None:
        draft.start(tokens_BS, n_B, step, cache)
    min_new = MinNewTokens((), 0, target.device)
    judge = _judge(way, batch, settings, target.device) if way.law is not None else None
    phases = Phases(target, cache, draft, shape, settings.sampling, min_new, judge=judge)
    rows_B = torch.arange(batch, device=target.device)
    phases.begin(tokens_BS[:, -1], HashCoins(settings.seed, rows_B), room)
    return phases


def _judge(way: Way, batch: int, settings: Settings, device: torch.device) -> Replay:
    """Numbers for each sequence, so that the counted cycles begin with the first."""
    assert way.law is not None
    seeds = [settings.seed + 1000003 * row for row in range(batch)]
    accepted = [*zip(*(way.law.lengths(settings.cycles, seed) for seed in seeds), strict=True)]
    first = -settings.warmup % len(accepted)
    return Replay(accepted[first:] + accepted[:first], way.shape, device)


def steps_of(way: Way, settings: Settings) -> steps.Settings:
    """The cycles of a cell."""
    return steps.Settings(way.shape, settings.sampling, settings.cycles, settings.warmup)


@torch.no_grad()
def fill(
    cache: KVCache, target: Target, n_B: Tensor, context: int, *, seed: int, watch: Watch | None = None
) -> None:
    """Random keys and values of `context` tokens, the same in all layers, as if prompts had been read.

    Args:
        cache: empty.
        target: for its sizes.
        n_B: the context, once a sequence.
        context: tokens.
        seed: of the rows.
        watch: sees them, and queries.
    """
    info = target.info
    coins = torch.Generator(device=target.device).manual_seed(seed)

    def random(heads: int) -> Tensor:
        size = (len(n_B), heads, context, info.head_dim)
        return torch.randn(size, generator=coins, device=target.device, dtype=target.dtype)

    k, v = random(info.n_kv_heads), random(info.n_kv_heads)
    q = None if watch is None else random(info.n_heads)
    cache.expect(None)
    for layer in range(info.n_layers):
        cache.write(layer, k, v)
        if watch is not None and q is not None:
            watch(layer, q, k, v)
    cache.commit(None, n_B)

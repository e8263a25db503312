"""Cycles of decoding that are ready to run: a cache that holds the context, a draft, given acceptance.

Shapes: B batch, S cached tokens, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.bench.acceptance_law import AcceptanceLaw, GivenAcceptance
from longtrain.decoding.captured import CaptureBuffers, can_capture
from longtrain.decoding.phases import Phases
from longtrain.decoding.prefill import pad, prefill
from longtrain.decoding.roles import Parts, TreeShape, onlooker
from longtrain.decoding.sampling import HashCoins, MinNewTokens, Sampling
from longtrain.errors import ConflictError
from longtrain.targets.step import TargetStep

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.targets.attention import Watch
    from longtrain.targets.model import Target


@dataclass(frozen=True)
class CycleCounts:
    """How cycles are run.

    Args:
        cycles: cycles counted.
        warmup: cycles before them, 2 or more: the first compiles, the second is recorded.
        seed: of random rows, of sampling and of the order of accepted numbers.
        sampling: processors.
        read: prompts are read by the target; False: the cache is filled with random rows instead.
    """

    cycles: int = 32
    warmup: int = 4
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    read: bool = True

    def room(self, shape: TreeShape) -> int:
        """Tokens that the cycles of both `steps.whole` and `steps.split` may commit."""
        return 2 * (self.warmup + self.cycles + 2) * (shape.depth + 1)


@torch.no_grad()
def ready(
    target: Target,
    parts: Parts,
    prompts: Sequence[Sequence[int]],
    shape: TreeShape,
    counts: CycleCounts,
    law: AcceptanceLaw | None = None,
) -> Phases:
    """Cycles that stand right behind prompts of one length.

    Args:
        target: the model.
        parts: what brings draft, cache and evictor; in plain decoding the draft is not asked.
        prompts: token ids.
        shape: what is drafted.
        counts: see `CycleCounts`.
        law: the numbers of drafts that are accepted; None: those that the target accepts.

    Raises:
        ConflictError: such cycles cannot be captured, or a part needs a prompt that was read.
    """
    buffers = CaptureBuffers(target)
    draft = parts.draft if shape.widths else None
    room, batch = counts.room(shape), len(prompts)
    new_cache = parts.cache or (target.new_cache if parts.evictor else buffers.new_cache)
    if counts.read:
        read = prefill(
            target,
            new_cache,
            prompts,
            max_new_tokens=room,
            nodes=shape.n_nodes,
            hidden=draft.want.hidden if draft else (),
            evictor=parts.evictor,
            onlooker=onlooker(draft),
        )
        cache, step, tokens_BS, n_B = read.cache, read.step, read.tokens_BS, read.n_B
    else:
        if parts.evictor is not None or (draft is not None and draft.want.hidden):
            raise ConflictError(
                f"a part of '{parts.name}' starts from hidden states or chooses among rows that were read, "
                "and rows are random here; pass suite.fill=prompt"
            )
        tokens_BS, n_B = pad(prompts, target.device)
        context, looking = len(prompts[0]), onlooker(draft)
        cache, step = new_cache(batch, context + room, shape.n_nodes), TargetStep(None, {})
        watch = looking.watch_prompts([context] * batch) if looking else None
        fill(cache, target, n_B, context, seed=counts.seed, watch=watch)
    if not can_capture(cache) or (draft is not None and draft.tensors() is None):
        raise ConflictError(
            f"the cycles of parts '{parts.name}' cannot be captured, and so not measured one by one; leave "
            "them out (suite=engine: pass suite.cycles=0)"
        )
    cache = buffers.take_in(cache, room=room + shape.n_nodes)
    if draft is not None:
        draft.start(tokens_BS, n_B, step, cache)
    judge = None if law is None else _judge(law, shape, batch, counts, target.device)
    min_new = MinNewTokens((), 0, target.device)
    phases = Phases(target, cache, draft, shape, counts.sampling, min_new, judge=judge)
    root_B = tokens_BS[:, -1] if step.logits_BTV is None else step.logits_BTV[:, -1].argmax(-1)
    phases.begin(root_B, HashCoins(counts.seed, torch.arange(batch, device=target.device)), room)
    return phases


def _judge(
    law: AcceptanceLaw, shape: TreeShape, batch: int, counts: CycleCounts, device: torch.device
) -> GivenAcceptance:
    """Numbers for each sequence, so that the counted cycles begin with the first."""
    seeds = [counts.seed + 1000003 * row for row in range(batch)]
    accepted = [*zip(*(law.lengths(counts.cycles, seed) for seed in seeds), strict=True)]
    first = -counts.warmup % len(accepted)
    return GivenAcceptance(accepted[first:] + accepted[:first], shape, device)


@torch.no_grad()
def fill(
    cache: KVCache, target: Target, n_B: Tensor, context: int, *, seed: int, watch: Watch | None = None
) -> None:
    """Random keys and values of `context` tokens, the same in all layers, as if prompts had been read.

    Args:
        cache: empty.
        target: the model whose heads they have.
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

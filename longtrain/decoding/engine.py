"""The engine: prefill (and eviction), then propose, verify and commit until every sequence is finished.

Each cycle (`decoding.decode_step`) reads one small tensor back to the host, its new tokens; everything else
stays on the device.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from longtrain.cache.base import KVCache
from longtrain.costs.model import Sizes, pass_growth
from longtrain.decoding.averages import Costs
from longtrain.decoding.captured import (
    CaptureBuffers,
    Cycles,
    ShapeCycles,
    Stopwatch,
    can_capture,
)
from longtrain.decoding.control import Control, ShapeChoice
from longtrain.decoding.decode_step import CycleState, DecodeStep
from longtrain.decoding.evict import Keep, goes_on
from longtrain.decoding.limits import Limits, cannot_gain
from longtrain.decoding.output import Ending, Output, Stream, run_cycles
from longtrain.decoding.prefill import pad, prefill
from longtrain.decoding.retrieval.selector import new_selected_cache
from longtrain.decoding.roles import Draft, Parts, TreeShape, attention_observer, completed
from longtrain.decoding.sampling import HashRng, MinNewTokens, Sampling, next_token
from longtrain.decoding.stats import Stats, counted
from longtrain.errors import ArtifactError, ConfigError, ConflictError
from longtrain.kernels.tree_attention import MAX_NODES, kernel_serves
from longtrain.targets.step import TargetStep

if TYPE_CHECKING:
    from longtrain.targets.model import Target

GREEDY = Sampling()
PLAIN = TreeShape(())
"""A root alone: plain decoding."""
CHAIN = TreeShape((1, 1, 1, 1))
"""The default shape with a draft."""
AUTO = ShapeChoice()
"""Chooses each cycle's shape among those that the draft offers, by measured times and acceptance."""
Capture: TypeAlias = Literal["auto"] | bool
_WORTH = 32
"""Fewest new tokens for which `capture="auto"` records CUDA graphs, which takes as long as some cycles."""


@dataclass(frozen=True)
class Generation:
    """Result of `Engine.generate`.

    Args:
        tokens: the new tokens of each prompt; the last may be a stop id or complete a stop string.
        stats: acceptance, times and memory.
        finish: reason that each sequence ended: `stop_id`, `stop_string` or `length`.
        texts: the new text of each prompt, without stop id and stop string; None without a tokenizer.
        drafted: for each token, True if it was drafted and accepted, False if the target chose it.
        kept: KV entries of the prompts that remain after eviction; None: nothing was evicted.
    """

    tokens: list[list[int]]
    stats: Stats
    finish: list[str]
    texts: list[str] | None
    drafted: list[list[bool]]
    kept: Keep | None


class Engine:
    """Decodes with a target, and with the draft, evictor, cache and selector of `parts`.

    Args:
        target: the frozen model.
        parts: components of a method (`MethodSpec.attach`); None: plain decoding.
        limits: upper bounds for a call.
        capture: decode from static buffers, which stay with the engine, and read tokens one cycle late; on
            CUDA each cycle is then one graph. "auto": on CUDA if draft and cache support it. True: an error
            if they do not; on a CPU the same code without graphs.

    Raises:
        ConflictError: `parts` has an evictor and a cache of its own or a selector, or a selector and a cache
            that cannot read selected entries.
        TargetMismatchError: all layers of the target have sliding windows, and `parts` a selector.
    """

    def __init__(
        self,
        target: Target,
        parts: Parts | None = None,
        *,
        limits: Limits | None = None,
        capture: Capture = "auto",
    ) -> None:
        self.target = target
        self.parts = parts or Parts()
        self.limits = limits or Limits()
        self.capture = capture
        self.costs = Costs()
        """Times, acceptance and losses measured by `decode=auto`; later calls start from them."""
        self._kept: CaptureBuffers | None = None
        if self.parts.evictor is not None and self.parts.cache is not None:
            raise ConflictError(
                f"parts '{self.parts.name}' bring a cache of their own and an evictor "
                f"({self.parts.evictor.name}), which cuts plain caches only; leave one out"
            )
        if self.parts.evictor is not None and self.parts.selector is not None:
            raise ConflictError(
                f"parts '{self.parts.name}' evict entries ({self.parts.evictor.name}) and select among all "
                f"({self.parts.selector.name}); leave one out"
            )
        if self.parts.selector is not None and not target.info.full_layers:
            target.info.require_full_layers(f"selection of KV entries ({self.parts.selector.name})")

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        shape: TreeShape | ShapeChoice | None = None,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
        min_new_tokens: int = 0,
        stream: Stream | None = None,
        sequence_ids: Sequence[int] | None = None,
        after: Sequence[Sequence[int]] | None = None,
    ) -> Generation:
        """Continue each prompt.

        Args:
            prompts: token ids, lengths may differ.
            max_new_tokens: most new tokens of each sequence.
            sampling: logits processors and seed; greedy by default.
            shape: shape of the drafted trees; None: a chain of 4 with a draft, plain decoding without one.
                `PLAIN`: plain decoding although there is a draft. `AUTO`, or another `ShapeChoice`: chosen
                cycle by cycle. The distribution of the text does not depend on it; with sampled chains the
                text itself may, since cycles then begin at other tokens.
            stop: strings that end a sequence; the text is cut right before them.
            stop_ids: token ids that end a sequence; None: the target's own.
            ignore_eos: let no token id end a sequence.
            min_new_tokens: number of first tokens that cannot be one of the ids that end a sequence: the
                target's probability of these ids is set to 0.
            stream: called with (index of the sequence, new tokens, flags of the drafted ones).
            sequence_ids: ids of the sequences in random draws; None: the indices of the prompts. With the
                same id, seed and settings a prompt gets the same text in any batch.
            after: tokens that follow each prompt but are read after eviction, unseen by the evictor (a
                question after a cached context, say); positions and text continue from them.

        Raises:
            ConfigError: a setting is wrong, or beyond the limits or the target's context.
            DataError: a prompt is empty or has an id outside the vocabulary.
            ArtifactError: the target's logits are not finite.
        """
        target = self.target
        shapes = self._shapes(shape, sampling)
        most_nodes = max(one.n_nodes for one in shapes)
        self.limits.check_prompts(prompts, max_new_tokens, target.info, after)
        draft = self.parts.draft if most_nodes > 1 else None
        ids = () if ignore_eos else target.info.eos_ids if stop_ids is None else stop_ids
        ending = Ending(max_new_tokens, frozenset(ids), stop, target.tokenizer)
        min_new = MinNewTokens(ids, min_new_tokens, target.device)
        out = Output(ending, len(prompts), stream)
        rng = self._rng(sampling.seed, sequence_ids, len(prompts))
        before = max(map(len, prompts)) + max(map(len, after or [()]))
        read_tokens = sum(map(len, prompts)) + sum(map(len, after or [()]))

        started_s = time.perf_counter()
        evictor, selector = self.parts.evictor, self.parts.selector
        buffers = self._static_buffers(draft, shapes, max_new_tokens)
        # what the time of a cycle depends on, and roughly what is accepted: not the temperature itself, or a
        # server would learn anew for each client
        cut = bool(sampling.top_k) or sampling.top_p < 1
        kind = (len(prompts), buffers is not None, sampling.greedy, cut)
        hopeless = cannot_gain(draft, len(prompts), before + max_new_tokens, chooses=len(shapes) > 1)
        growth = partial(pass_growth, Sizes.of(target.info), len(prompts))
        restarts = bool(getattr(draft, "begins_anew", False))
        control = Control(shapes, self.costs, kind, restarts=restarts, growth=growth)
        if draft and control.free:
            stays = control.begin(read_tokens, length=before, planned=max_new_tokens, hopeless=hopeless)
            if not stays:
                draft = None if control.paused else getattr(draft, "alone", None)
        plain = self.parts.cache is None and evictor is None
        read = prefill(
            target,
            buffers.new_cache if buffers and plain else self.new_cache,
            prompts,
            max_new_tokens=max_new_tokens,
            nodes=most_nodes,
            hidden=self.parts.hidden(drafts=draft is not None),
            evictor=evictor,
            attention_observer=attention_observer(draft),
            after=after,
            sequence_ids=sequence_ids,
        )
        buffers = self._usable(buffers, read.cache)
        if buffers:
            room = max_new_tokens + most_nodes
            taken = buffers.take_in(read.cache, room=room)
            read = replace(read, cache=taken)
        cache = read.cache

        def start(tokens_BS: Tensor, n_B: Tensor, step: TargetStep) -> None:
            assert draft is not None
            draft.start(tokens_BS, n_B, step, cache)
            if control.free and (reserve := getattr(draft, "reserve", None)):
                # for the largest shape at once, or graphs of smaller ones would not last
                reserve(max(one.n_expanded for one in control.shapes))

        watch, started = None, draft
        if draft and not control.paused:
            watch = Stopwatch(target.device)
            start(read.tokens_BS, read.n_B, read.step)
            watch.stop()
        if selector:
            selector.start(read.tokens_BS, read.n_B, read.step, cache)
        first_BV = min_new.at_first(_logits(read.step)[:, -1])
        root_B = next_token(first_BV, sampling, rng, cache.len_B)
        roots = root_B.tolist()
        refuse_not_finite(first_BV, target)
        over = out.begin(roots)
        prefilled_s = time.perf_counter()

        texts = buffers.texts(cache.len_B) if buffers else CycleState(cache.len_B)
        texts.begin(root_B, rng, max_new_tokens)
        texts.close(over)

        def cycles_of(one: TreeShape, drafts: bool) -> Cycles:
            own = draft if drafts else None
            decode_step = DecodeStep(
                target, cache, own, one, sampling, min_new, selector=selector, texts=texts
            )
            if buffers is None:
                return Cycles(decode_step, captured=False)
            return buffers.cycles(decode_step, (one, type(own), _constants(sampling, min_new)))

        def restart() -> None:
            nonlocal draft
            if draft is self.parts.draft and not restarts:  # look-up alone takes its place
                draft = getattr(draft, "alone", None)
                cycles.forget_drafts()
            heads = zip(prompts, after or [()] * len(prompts), out.tokens, strict=True)
            whole = [[*prompt, *more, *new[:-1]] for prompt, more, new in heads]
            start(*pad(whole, target.device), TargetStep(None, {}))

        cycles = ShapeCycles(cycles_of, target.device)
        if watch is not None and control.free and draft is self.parts.draft:
            control.learn_start(watch.seconds(), read_tokens)
        late = int(buffers is not None)
        used = run_cycles(cycles, control, out, texts, restart, before=before, late=late)
        done_s = time.perf_counter()

        stats = Stats(
            rows=out.cycles,
            prompt_tokens=[len(prompt) for prompt in prompts],
            kept_entries=read.kept_entries,
            output_tokens=[len(tokens) for tokens in out.tokens],
            prefill_s=prefilled_s - started_s,
            decode_s=done_s - prefilled_s - cycles.capture_s,
            capture_s=cycles.capture_s,
            cache_bytes=cache.bytes(),
            cache_bytes_full=read.full_bytes if evictor else cache.bytes(),
            draft_bytes=started.bytes() if started else 0,
            target_forwards=read.forwards + sum(used.values()),
            shapes=counted(used),
        )
        return Generation(out.tokens, stats, out.finish, out.texts(), out.drafted, read.kept)

    def new_cache(self, batch: int, max_tokens: int, max_nodes: int) -> KVCache:
        """An empty cache for these parts; same arguments as `Target.new_cache`."""
        if self.parts.cache is not None:
            cache = self.parts.cache(batch, max_tokens, max_nodes)
            return cache if self.parts.selector is None else self.parts.selector.serves(cache)
        if self.parts.selector is not None:
            return new_selected_cache(self.target, batch, max_tokens, max_nodes)
        if self.parts.evictor is not None:
            return self.target.plain_cache(batch, max_tokens, max_nodes)
        return self.target.new_cache(batch, max_tokens, max_nodes)

    def _shapes(self, asked: TreeShape | ShapeChoice | None, sampling: Sampling) -> tuple[TreeShape, ...]:
        """The shapes that cycles may have, smallest first."""
        draft = self.parts.draft
        if isinstance(asked, ShapeChoice):
            shapes = asked.shapes(draft, sampled=not sampling.greedy)
        else:
            shapes = (completed(asked or (CHAIN if draft else PLAIN), draft),)
        if isinstance(asked, ShapeChoice) and not asked.widths:  # nobody asked for one of these shapes
            shapes = self.limits.served(shapes, draft)
        for shape in shapes:
            self.limits.check_shape(shape, draft)
            if shape.depth and self.parts.selector is not None and self.parts.selector.budget.every == 1:
                raise ConfigError(
                    f"shape {list(shape.widths)} with select.every=1: entries are selected at each position, "
                    "so that no draft could be accepted; pass select.every=8, say, or draft nothing"
                )
        return shapes

    def _static_buffers(
        self, draft: Draft | None, shapes: Sequence[TreeShape], max_new_tokens: int
    ) -> CaptureBuffers | None:
        """The static buffers for captured cycles; None: the host launches every operator."""
        auto = self.capture == "auto"
        if not self.capture or (auto and (max_new_tokens < _WORTH or not gains(self.target))):
            return None
        reason = ""
        shape = max(shapes, key=lambda one: one.n_nodes)
        if goes_on(self.parts.evictor):
            reason = f"'{self.parts.name}' evicts during decoding (the host moves entries between cycles)"
        elif self.parts.selector is not None and self.parts.selector.tensors() is None:
            reason = f"the selector of '{self.parts.name}' does not update its state in place"
        elif self.target.shards is not None:
            reason = "the target's layers are split over ranks, which a graph cannot gather"
        elif draft is not None and draft.tensors() is None:
            reason = f"the draft of '{self.parts.name}' does not update its state in place"
        elif shape.n_nodes > MAX_NODES:
            reason = (
                f"shape {list(shape.widths)} has {shape.n_nodes} nodes, and at most {MAX_NODES} are served"
            )
        if reason and not auto:
            raise ConflictError(f"capture=True, but {reason}; pass capture=False or 'auto'")
        if not reason and self._kept is None:
            self._kept = CaptureBuffers(self.target, selects=self.parts.selector is not None)
        return None if reason else self._kept

    def _usable(self, buffers: CaptureBuffers | None, cache: KVCache) -> CaptureBuffers | None:
        """The static buffers, if this cache can be decoded from them, else None."""
        if buffers is None or can_capture(cache):
            return buffers
        if self.capture != "auto":
            raise ConflictError(
                f"capture=True, but this {type(cache).__name__} cannot be decoded from static buffers (the "
                "host moves its entries between cycles); pass capture=False or 'auto'"
            )
        return None

    def _rng(self, seed: int, ids: Sequence[int] | None, batch: int) -> HashRng:
        """Random draws keyed by one sequence id for each prompt."""
        ids = range(batch) if ids is None else ids
        if len(ids) != batch:
            raise ConfigError(f"{len(ids)} sequence_ids for {batch} prompts; pass one each")
        return HashRng(seed, torch.tensor(list(ids), dtype=torch.int64, device=self.target.device))


def _logits(step: TargetStep) -> Tensor:
    """The step's logits, which were requested."""
    assert step.logits_BTV is not None
    return step.logits_BTV


def refuse_not_finite(logits_BV: Tensor, target: Target) -> None:
    """Refuse logits that are NaN or infinite.

    Raises:
        ArtifactError: the target's weights are damaged, or its dtype too narrow for them.
    """
    if bool((logits_BV.isnan() | logits_BV.isposinf()).any()):
        raise ArtifactError(
            f"target {target.info.name} gives logits that are NaN or infinite after the prompt; its weights "
            "are damaged (fetch or convert them again), or too large for its type (pass target.dtype=float32)"
        )


def gains(target: Target) -> bool:
    """True if static buffers are faster: on CUDA with a kernel for attention over them, and not sharded."""
    if target.device.type != "cuda" or target.shards is not None:
        return False
    probe = torch.empty(1, 1, 1, target.info.head_dim, dtype=target.dtype, device=target.device)
    return kernel_serves(probe, probe, probe)


def _constants(sampling: Sampling, min_new: MinNewTokens) -> Hashable:
    """Constants of a cycle's graph beside its shape; the seed is not one."""
    ids = tuple(min_new.ids.tolist()) if min_new.tokens else ()
    return replace(sampling, seed=0), min_new.tokens, ids

"""The engine: prefill (and eviction), then propose, verify and commit until every sequence is over.

Each cycle (`decoding.phases`) reads one small tensor back to the host, the tokens emitted; everything else
stays on the device.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from longtrain.cache.base import KVCache
from longtrain.decoding.captured import (
    CaptureBuffers,
    Cycles,
    ShapeCycles,
    can_capture,
)
from longtrain.decoding.control import Control, ShapeChoice, run_cycles
from longtrain.decoding.evict import Keep
from longtrain.decoding.limits import Limits
from longtrain.decoding.output import Ending, Output, Stream
from longtrain.decoding.past import Costs
from longtrain.decoding.phases import CycleState, Phases
from longtrain.decoding.prefill import pad, prefill
from longtrain.decoding.retrieval.selector import new_selected_cache
from longtrain.decoding.roles import Draft, Parts, TreeShape, onlooker
from longtrain.decoding.sampling import Coins, HashCoins, MinNewTokens, Sampling, probs
from longtrain.decoding.stats import Stats
from longtrain.errors import ArtifactError, ConfigError, ConflictError
from longtrain.kernels.tree_attention import MAX_NODES, kernel_serves
from longtrain.targets.step import TargetStep

if TYPE_CHECKING:
    from longtrain.targets.model import Target

GREEDY = Sampling()
PLAIN = TreeShape(())
"""A root alone: nothing is drafted."""
CHAIN = TreeShape((1, 1, 1, 1))
"""What is drafted where a draft is there and no shape is asked for."""
AUTO = ShapeChoice()
"""The shapes that a draft offers, each cycle's chosen by what was measured and accepted before."""
Capture: TypeAlias = Literal["auto"] | bool
_WORTH = 32
"""New tokens from which on `auto` captures: making a graph costs as much as some cycles."""


@dataclass(frozen=True)
class Generation:
    """What `Engine.generate` gives back.

    Args:
        tokens: the new tokens of each prompt; a stop id or the token that completes a stop string comes last.
        stats: what it took.
        finish: why each sequence is over: `stop_id`, `stop_string` or `length`.
        texts: the new text of each prompt, without stop id and stop string; None without a tokenizer.
        drafted: of each token, whether it was drafted and then accepted, or chosen by the target.
        kept: the rows of the prompts that eviction kept; None where nothing was evicted.
    """

    tokens: list[list[int]]
    stats: Stats
    finish: list[str]
    texts: list[str] | None
    drafted: list[list[bool]]
    kept: Keep | None


class Engine:
    """Decodes with a target and, where `parts` brings them, a draft and an evictor.

    Args:
        target: the frozen model.
        parts: what a method brings (`MethodSpec.attach`); None decodes plainly.
        limits: bounds on what a call may ask for.
        capture: decode from static buffers, which stay with the engine, and read tokens one cycle late; on
            CUDA a cycle is then one graph. "auto": on CUDA, where draft and cache allow it. True: an error
            where they do not, and the same code without graphs on a CPU.

    Raises:
        ConflictError: `parts` brings an evictor beside a cache of its own or a selector, or a selector beside
            a cache that reads no chosen rows.
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
        """What cycles took where there was a choice of shapes; later calls start from it."""
        self._kept: CaptureBuffers | None = None
        if self.parts.evictor is not None and self.parts.cache is not None:
            raise ConflictError(
                f"parts '{self.parts.name}' bring a cache of their own and an evictor "
                f"({self.parts.evictor.name}), which cuts plain caches only; leave one out"
            )
        if self.parts.evictor is not None and self.parts.selector is not None:
            raise ConflictError(
                f"parts '{self.parts.name}' evict rows ({self.parts.evictor.name}) and choose among all rows "
                f"({self.parts.selector.name}); leave one out"
            )

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
            max_new_tokens: most new tokens of each.
            sampling: processors and seed; greedy by default.
            shape: what to draft each cycle; None is a chain of 4 with a draft and plain decoding without one.
                `PLAIN` decodes plainly although a draft is there. `AUTO`, or another `ShapeChoice`: as much
                as pays, cycle by cycle. The law of the text stays as it is; of a chain whose children are
                sampled, another text of that law may come out, since cycles then begin at other tokens.
            stop: strings that end a text; it is cut right before them.
            stop_ids: token ids that end a sequence; None takes the target's own.
            ignore_eos: let no token id end a sequence.
            min_new_tokens: the token ids that end a sequence are impossible among so many first tokens of
                each: target and draft are told apart as if the target gave them no probability.
            stream: called as (row, new tokens, whether each was drafted) whenever a sequence grows.
            sequence_ids: what the random coins know a sequence by; None numbers the prompts. With the same
                id, seed and settings a prompt gets the same text in any batch.
            after: tokens that follow each prompt but are read after eviction, out of the evictor's sight (a
                question, or what comes after a cached context); positions and text go on from them.

        Raises:
            ConfigError: a setting is wrong, or more is asked for than the limits or the target allow.
            DataError: a prompt is empty or holds an id outside the vocabulary.
            ArtifactError: the target's logits are not numbers.
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
        coins = self._coins(sampling.seed, sequence_ids, len(prompts))

        started_s = time.perf_counter()
        evictor, selector = self.parts.evictor, self.parts.selector
        stage = self._stage(draft, shapes, max_new_tokens)
        plain = self.parts.cache is None and evictor is None
        read = prefill(
            target,
            stage.new_cache if stage and plain else self.new_cache,
            prompts,
            max_new_tokens=max_new_tokens,
            nodes=most_nodes,
            hidden=self.parts.hidden(drafts=draft is not None),
            evictor=evictor,
            onlooker=onlooker(draft),
            after=after,
            sequence_ids=sequence_ids,
        )
        stage = self._served(stage, read.cache)
        if stage:
            room = max_new_tokens + most_nodes
            taken = stage.take_in(read.cache, room=room, selects=selector is not None)
            read = replace(read, cache=taken)
        cache = read.cache
        if draft:
            draft.start(read.tokens_BS, read.n_B, read.step, cache)
            if len(shapes) > 1 and (reserve := getattr(draft, "reserve", None)):
                reserve(max(one.n_grown for one in shapes))  # or graphs of smaller shapes would not last
        if selector:
            selector.start(read.tokens_BS, read.n_B, read.step, cache)
        first_BV = min_new.at_first(_logits(read.step)[:, -1])
        root_B = _choose(first_BV, sampling, coins, cache.len_B)
        roots = root_B.tolist()
        _refuse_not_finite(first_BV, target)
        over = out.begin(roots)
        prefilled_s = time.perf_counter()

        texts = stage.texts(cache.len_B) if stage else CycleState(cache.len_B)
        texts.begin(root_B, coins, max_new_tokens)
        texts.close(over)

        def cycles_of(one: TreeShape, drafts: bool) -> Cycles:
            own = draft if drafts else None
            phases = Phases(target, cache, own, one, sampling, min_new, selector=selector, texts=texts)
            if stage is None:
                return Cycles(phases, captured=False)
            return stage.cycles(phases, (one, own is not None, _constants(sampling, min_new)))

        def begin_anew() -> None:
            assert draft is not None
            heads = zip(prompts, after or [()] * len(prompts), out.tokens, strict=True)
            whole = [[*prompt, *more, *new[:-1]] for prompt, more, new in heads]
            draft.start(*pad(whole, target.device), TargetStep(None, {}), cache)

        cycles = ShapeCycles(cycles_of, target.device)
        kind = (len(prompts), stage is not None, _constants(sampling, min_new))
        wakes = getattr(draft, "begins_anew", False)
        control = Control(shapes, self.costs, kind, planned=max_new_tokens, wakes=wakes)
        before = max(map(len, prompts)) + max(map(len, after or [()]))
        late = int(stage is not None)
        used = run_cycles(cycles, control, out, texts, begin_anew, before=before, late=late)
        done_s = time.perf_counter()

        stats = Stats(
            rows=out.cycles,
            prompt_tokens=[len(prompt) for prompt in prompts],
            kept_rows=read.kept_rows,
            output_tokens=[len(tokens) for tokens in out.tokens],
            prefill_s=prefilled_s - started_s,
            decode_s=done_s - prefilled_s - cycles.capture_s,
            capture_s=cycles.capture_s,
            cache_bytes=cache.bytes(),
            cache_bytes_full=read.full_bytes if evictor else cache.bytes(),
            draft_bytes=draft.bytes() if draft else 0,
            target_forwards=read.forwards + sum(used.values()),
            shapes={one.widths: count for one, count in used.items()},
        )
        return Generation(out.tokens, stats, out.finish, out.texts(), out.drafted, read.kept)

    def new_cache(self, batch: int, max_tokens: int, max_nodes: int) -> KVCache:
        """An empty cache for these parts, called as `Target.new_cache` is."""
        if self.parts.cache is not None:
            cache = self.parts.cache(batch, max_tokens, max_nodes)
            return cache if self.parts.selector is None else self.parts.selector.serves(cache)
        if self.parts.selector is not None:
            return new_selected_cache(self.target, batch, max_tokens, max_nodes)
        return self.target.new_cache(batch, max_tokens, max_nodes)

    def _shapes(self, asked: TreeShape | ShapeChoice | None, sampling: Sampling) -> tuple[TreeShape, ...]:
        """What may be drafted in a cycle, smallest first.

        Raises:
            ConfigError: something that cannot be drafted.
        """
        draft = self.parts.draft
        if isinstance(asked, ShapeChoice):
            shapes = asked.shapes(draft, sampled=not sampling.greedy)
            if not asked.widths:  # nobody asked for those beyond the limits
                shapes = tuple(one for one in shapes if one.n_nodes <= self.limits.nodes)
        else:
            shapes = (asked or (CHAIN if draft else PLAIN),)
        for shape in shapes:
            self.limits.check_shape(shape, draft)
            if shape.widths and self.parts.selector is not None and self.parts.selector.budget.every == 1:
                raise ConfigError(
                    f"shape {list(shape.widths)} with select.every=1: rows are chosen anew at each position, "
                    "so that nothing drafted could be kept; pass select.every=8, say, or draft nothing"
                )
        return shapes

    def _stage(
        self, draft: Draft | None, shapes: Sequence[TreeShape], max_new_tokens: int
    ) -> CaptureBuffers | None:
        """Where captured cycles take place; None: every operator is launched by the host.

        Raises:
            ConflictError: they must be captured and cannot be.
        """
        auto = self.capture == "auto"
        if not self.capture or (auto and (max_new_tokens < _WORTH or not _gains(self.target))):
            return None
        reason = ""
        shape = max(shapes, key=lambda one: one.n_nodes)
        if self.parts.selector is not None and self.parts.selector.tensors() is None:
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
            self._kept = CaptureBuffers(self.target)
        return None if reason else self._kept

    def _served(self, stage: CaptureBuffers | None, cache: KVCache) -> CaptureBuffers | None:
        """The stage, if this cache can be decoded from there.

        Raises:
            ConflictError: it must be captured and cannot be.
        """
        if stage is None or can_capture(cache):
            return stage
        if self.capture != "auto":
            raise ConflictError(
                f"capture=True, but this {type(cache).__name__} cannot be decoded from static buffers (its "
                "layers or KV heads hold different numbers of rows); pass capture=False or 'auto', or evict "
                "evenly"
            )
        return None

    def _coins(self, seed: int, ids: Sequence[int] | None, batch: int) -> HashCoins:
        """Coins for one sequence id a prompt."""
        ids = range(batch) if ids is None else ids
        if len(ids) != batch:
            raise ConfigError(f"{len(ids)} sequence_ids for {batch} prompts; pass one each")
        return HashCoins(seed, torch.tensor(list(ids), dtype=torch.int64, device=self.target.device))


def _choose(logits_BV: Tensor, sampling: Sampling, coins: Coins, pos_B: Tensor) -> Tensor:
    """The first new token of each row, as `verify` would choose it."""
    return (
        logits_BV.argmax(-1) if sampling.greedy else coins.draw(probs(logits_BV, sampling), pos_B, "target")
    )


def _logits(step: TargetStep) -> Tensor:
    """Logits that were asked for."""
    assert step.logits_BTV is not None
    return step.logits_BTV


def _refuse_not_finite(logits_BV: Tensor, target: Target) -> None:
    """Refuse to go on from logits of which one is NaN or infinite: what follows would be no model's text.

    Raises:
        ArtifactError: the target's weights are damaged, or its dtype too narrow for them.
    """
    if bool((logits_BV.isnan() | logits_BV.isposinf()).any()):
        raise ArtifactError(
            f"target {target.info.name} gives logits that are NaN or infinite after the prompt; its weights "
            "are damaged (fetch or convert them again), or too large for its type (pass target.dtype=float32)"
        )


def _gains(target: Target) -> bool:
    """Whether static buffers are faster there: on CUDA, where attention over them has a kernel, unsharded."""
    if target.device.type != "cuda" or target.shards is not None:
        return False
    probe = torch.empty(1, 1, 1, target.info.head_dim, dtype=target.dtype, device=target.device)
    return kernel_serves(probe, probe, probe)


def _constants(sampling: Sampling, min_new: MinNewTokens) -> Hashable:
    """What is built into a graph of a cycle beside its shape; the seed is not."""
    ids = tuple(min_new.ids.tolist()) if min_new.tokens else ()
    return replace(sampling, seed=0), min_new.tokens, ids

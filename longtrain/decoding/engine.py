"""The engine: prefill (and eviction), then propose, verify and commit until every sequence is over.

Plain decoding is the same loop with a tree of one node. Each cycle reads one small tensor back to the host,
the tokens emitted; everything else stays on the device.

Shapes: B batch, S prompt tokens, N tree nodes, P path, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.cache.base import Causal, Mask, Tree
from longtrain.decoding.limits import Limits, check_tree
from longtrain.decoding.output import Ending, Output, Stream
from longtrain.decoding.prefill import prefill
from longtrain.decoding.roles import Parts, TokenTree, TreeShape
from longtrain.decoding.sampling import Coins, HashCoins, Sampling, probs
from longtrain.decoding.stats import Stats, repeated
from longtrain.decoding.tree import chain, emitted, positions, visible
from longtrain.decoding.verify import verify
from longtrain.errors import ConfigError, ConflictError
from longtrain.target.step import Rows, TargetStep, Want

if TYPE_CHECKING:
    from longtrain.target.model import Target

GREEDY = Sampling()
PLAIN = TreeShape(())
"""A root alone: nothing is drafted."""
CHAIN = TreeShape((1, 1, 1, 1))
"""What is drafted where a draft is there and no shape is asked for."""


@dataclass(frozen=True)
class Generation:
    """What `Engine.generate` gives back.

    Args:
        tokens: the new tokens of each prompt; a stop id or the token that completes a stop string comes last.
        stats: what it took.
        finish: why each sequence is over: `stop_id`, `stop_string` or `length`.
        texts: the new text of each prompt, without stop id and stop string; None without a tokenizer.
    """

    tokens: list[list[int]]
    stats: Stats
    finish: list[str]
    texts: list[str] | None


class Engine:
    """Decodes with a target and, where `parts` brings them, a draft and an evictor.

    Args:
        target: the frozen model.
        parts: what a method brings (`MethodSpec.attach`); None decodes plainly.
        limits: bounds on what a call may ask for.

    Raises:
        ConflictError: `parts` brings both an evictor and a cache of its own.
    """

    def __init__(self, target: Target, parts: Parts | None = None, *, limits: Limits | None = None) -> None:
        self.target = target
        self.parts = parts or Parts()
        self.limits = limits or Limits()
        if self.parts.evictor is not None and self.parts.cache is not None:
            raise ConflictError(
                f"parts '{self.parts.name}' bring a cache of their own and an evictor "
                f"({self.parts.evictor.name}), which cuts plain caches only; leave one out"
            )

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        shape: TreeShape | None = None,
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
                `PLAIN` decodes plainly although a draft is there.
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
        """
        target = self.target
        shape = shape or (CHAIN if self.parts.draft else PLAIN)
        self.limits.check_shape(shape, self.parts.draft is not None)
        self.limits.check_prompts(prompts, max_new_tokens, target.info, after)
        draft = self.parts.draft if shape.widths else None
        ids = () if ignore_eos else target.info.eos_ids if stop_ids is None else stop_ids
        ending = Ending(max_new_tokens, frozenset(ids), stop, target.tokenizer)
        barred = Barred(target, ids, min_new_tokens)
        out = Output(ending, shape, len(prompts), stream)
        coins = self._coins(sampling.seed, sequence_ids, len(prompts))
        hidden = draft.want.hidden if draft else ()

        started_s = time.perf_counter()
        evictor, new_cache = self.parts.evictor, self.parts.cache or target.new_cache
        read = prefill(
            target,
            new_cache,
            prompts,
            max_new_tokens=max_new_tokens,
            nodes=shape.n_nodes,
            hidden=hidden,
            evictor=evictor,
            after=after,
            sequence_ids=sequence_ids,
        )
        cache = read.cache
        if draft:
            draft.start(read.tokens_BS, read.n_B, read.step, cache)
        first_BV = barred.out_of(_logits(read.step)[:, -1])
        root_B = _choose(first_BV, sampling, coins, cache.len_B)
        left_B = torch.full_like(root_B, max_new_tokens - 1)
        _close(left_B, out.begin(root_B.tolist()))
        prefilled_s = time.perf_counter()

        cycles = 0
        while not out.done:
            tree = draft.propose(root_B, shape, sampling, coins) if draft else chain(root_B[:, None])
            check_tree(tree, shape, len(prompts))
            pos_B = cache.len_B
            rows = Rows(positions(tree, pos_B), tree.tokens_BN, mask=_mask(tree, shape))
            step = target.forward(rows, cache, want=Want(logits="all", hidden=hidden))
            logits_BNV = _logits(step)
            if min(map(len, out.tokens)) < min_new_tokens:
                logits_BNV = barred.out_of_nodes(logits_BNV, tree, max_new_tokens - left_B)
            most_B = cache.commit_limit()
            whole = verify(tree, logits_BNV, sampling, coins, pos_B, depth=shape.depth, most_B=most_B)
            verdict = replace(whole, n_B=whole.n_B.minimum(left_B))  # 0 in a row that is over
            cache.commit(None if _is_chain(shape) else verdict.path_BP, verdict.n_B)
            if draft:
                draft.observe(tree, verdict, step)
            root_B = verdict.next_B
            left_B = left_B - verdict.n_B
            counted = torch.cat((whole.n_B[:, None], emitted(tree, whole)), 1).tolist()
            _close(left_B, out.take([row[1 : 1 + row[0]] for row in counted]))
            cycles += 1
        done_s = time.perf_counter()

        stats = Stats(
            rows=out.cycles,
            prompt_tokens=[len(prompt) for prompt in prompts],
            kept_rows=read.kept_rows,
            output_tokens=[len(tokens) for tokens in out.tokens],
            repeated_tokens=[repeated(tokens) for tokens in out.tokens],
            prefill_s=prefilled_s - started_s,
            decode_s=done_s - prefilled_s,
            cache_bytes=cache.bytes(),
            cache_bytes_full=read.full_bytes,
            draft_bytes=draft.bytes() if draft else 0,
            target_forwards=read.forwards + cycles,
        )
        return Generation(out.tokens, stats, out.finish, out.texts())

    def _coins(self, seed: int, ids: Sequence[int] | None, batch: int) -> Coins:
        """Coins for one sequence id a prompt."""
        ids = range(batch) if ids is None else ids
        if len(ids) != batch:
            raise ConfigError(f"{len(ids)} sequence_ids for {batch} prompts; pass one each")
        return HashCoins(seed, torch.tensor(list(ids), dtype=torch.int64, device=self.target.device))


class Barred:
    """Keeps the ids that end a text out of its first tokens.

    Args:
        target: the frozen model.
        ids: that may not come.
        tokens: first tokens of a text that they may not be among.

    Source: transformers, `MinNewTokensLengthLogitsProcessor`.
    """

    def __init__(self, target: Target, ids: Collection[int], tokens: int) -> None:
        if tokens < 0:
            raise ConfigError(f"min_new_tokens={tokens}; allowed: 0 or more")
        self.tokens = tokens if ids else 0
        self.ids = torch.tensor(sorted(ids), dtype=torch.int64, device=target.device)

    def out_of(self, logits_BV: Tensor) -> Tensor:
        """Logits of each text's first token."""
        return logits_BV.index_fill(-1, self.ids, float("-inf")) if self.tokens else logits_BV

    def out_of_nodes(self, logits_BNV: Tensor, tree: TokenTree, said_B: Tensor) -> Tensor:
        """Logits below each node of a tree whose root is the last of `said_B` tokens."""
        early_BN = said_B[:, None] + tree.depth_N < self.tokens
        return torch.where(early_BN[..., None], self.out_of(logits_BNV), logits_BNV)


def _choose(logits_BV: Tensor, sampling: Sampling, coins: Coins, pos_B: Tensor) -> Tensor:
    """The first new token of each row, as `verify` would choose it."""
    return (
        logits_BV.argmax(-1) if sampling.greedy else coins.draw(probs(logits_BV, sampling), pos_B, "target")
    )


def _logits(step: TargetStep) -> Tensor:
    """Logits that were asked for."""
    assert step.logits_BTV is not None
    return step.logits_BTV


def _mask(tree: TokenTree, shape: TreeShape) -> Mask:
    """Who sees whom among the tree's nodes."""
    return Causal() if _is_chain(shape) else Tree(visible(tree.parents_BN))


def _is_chain(shape: TreeShape) -> bool:
    """Whether every node has one child."""
    return all(width == 1 for width in shape.widths)


def _close(left_B: Tensor, over: list[int]) -> None:
    """No more tokens for the rows that are over."""
    if over:
        left_B[over] = 0

"""Perplexity over sliding windows with any cache of a system: the context is prefilled and evicted first,
then the target computes the logits of the tokens that follow.

Shapes: B batch, T tokens, E hidden dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from longtrain.decoding.appended import given_step
from longtrain.decoding.engine import Engine
from longtrain.decoding.prefill import Prefilled, pad, prefill
from longtrain.decoding.retrieval.selector import Selector
from longtrain.decoding.roles import Parts
from longtrain.errors import ConfigError
from longtrain.targets.step import OutputRequest, TokenBatch

if TYPE_CHECKING:
    from longtrain.targets.model import Target

ROWS = 256
"""Tokens per forward pass; affects memory only."""


@dataclass(frozen=True)
class TextWindow:
    """A window of a text: tokens `begin` to `first` are its context, tokens `first` to `end` are scored."""

    begin: int
    first: int
    end: int


@dataclass(frozen=True)
class Nats:
    """The negative log-likelihood of a window's scored tokens.

    Args:
        nats: summed negative log-likelihood of the scored tokens.
        tokens: number of scored tokens.
        kept_entries: the context's KV entries in the cache, mean over layers and KV heads.
        likeliest: number of scored tokens that were the most probable (greedy) choice.
    """

    nats: float
    tokens: int
    kept_entries: float
    likeliest: int


def spans(n_tokens: int, *, window: int, stride: int) -> Iterator[TextWindow]:
    """The windows of a text; each token but the first is scored once.

    The first window scores all of its tokens but one; each further window advances by `stride` tokens and
    scores those.

    Args:
        n_tokens: number of tokens of the text.
        window: tokens of a window, context and scored ones.
        stride: tokens scored in each window but the first, less than `window`.

    Source: the sliding window of the Hugging Face documentation, "Perplexity of fixed-length models".
    """
    if n_tokens < 2:
        return
    first, begin = 1, 0
    while first < n_tokens:
        end = min(begin + window, n_tokens)
        yield TextWindow(begin, first, end)
        first, begin = end, begin + stride


@torch.no_grad()
def measure(
    target: Target,
    parts: Parts,
    contexts: Sequence[Sequence[int]],
    *,
    scored: Sequence[Sequence[int]],
    rows: int = ROWS,
) -> list[Nats]:
    """Compute the negative log-likelihood of the tokens that follow each context.

    Args:
        target: the frozen model.
        parts: evictor (drops KV entries of the contexts), cache, and selector (chooses the entries that are
            read); a draft is ignored.
        contexts: token ids, at least one each.
        scored: the tokens after each, at least one.
        rows: tokens per forward pass, see `predicted_logits`.

    Raises:
        ConfigError: a window is longer than the target's context, or an empty part.
        ConflictError: an evictor beside a cache of its own.
    """
    read = read_contexts(target, parts, contexts, scored=scored)
    nats, likeliest = [0.0] * len(scored), [0] * len(scored)
    for row, at, logits_TV in predicted_logits(target, read, scored, rows=rows, selector=parts.selector):
        wanted_T = torch.tensor(scored[row][at : at + len(logits_TV)], device=logits_TV.device)
        nats[row] += float(cross_entropy(logits_TV, wanted_T, reduction="none").double().sum())
        likeliest[row] += int((logits_TV.argmax(-1) == wanted_T).sum())
    return [Nats(*one) for one in zip(nats, map(len, scored), read.kept_entries, likeliest, strict=True)]


def read_contexts(
    target: Target,
    parts: Parts,
    contexts: Sequence[Sequence[int]],
    *,
    scored: Sequence[Sequence[int]],
    sequence_ids: Sequence[int] | None = None,
) -> Prefilled:
    """Prefill contexts into the cache of `parts` and evict, with room for the tokens that follow.

    Args:
        target: the frozen model.
        parts: evictor, cache, and a selector, which is initialised.
        contexts: token ids, at least one each.
        scored: the tokens after each, at least one.
        sequence_ids: keys of the contexts in an evictor's random draws; None: their places in the batch.

    Raises:
        ConfigError: a window is longer than the target's context, or an empty part.
        ConflictError: an evictor beside a cache of its own.
    """
    counts = [len(tokens) for tokens in scored]
    longest = max(len(a) + n for a, n in zip(contexts, counts, strict=True))
    if longest > target.info.max_positions:
        raise ConfigError(
            f"a window of {longest} tokens exceeds the context of {target.info.max_positions} of target "
            f"{target.info.name}; pass a shorter suite.window"
        )
    if min(map(len, contexts)) < 1 or min(counts) < 1:
        raise ConfigError("a window without context or without tokens to score; give at least one of each")
    engine = Engine(target, parts)  # raises if the parts do not go together
    read = prefill(
        target,
        engine.new_cache,
        contexts,
        max_new_tokens=max(counts),
        nodes=1,
        hidden=engine.parts.hidden(drafts=False),
        evictor=engine.parts.evictor,
        sequence_ids=sequence_ids,
    )
    if engine.parts.selector is not None:
        engine.parts.selector.start(read.tokens_BS, read.n_B, read.step, read.cache)
    return read


@torch.no_grad()
def predicted_logits(
    target: Target,
    read: Prefilled,
    scored: Sequence[Sequence[int]],
    *,
    rows: int = ROWS,
    selector: Selector | None = None,
) -> Iterator[tuple[int, int, Tensor]]:
    """Compute the target's logits for each token after the contexts, with the text itself as input (teacher
    forcing).

    The first token is predicted by the context's last position, before eviction, like the first of an answer.
    On a cache that changes its stored entries at certain tokens (`KVCache.commit_limit`) a step ends there,
    as in decoding.

    Args:
        target: the frozen model.
        read: the contexts (`read_contexts`); tokens are appended to their cache.
        scored: the tokens after each.
        rows: tokens per forward pass, or fewer if the cache's limit is lower.
        selector: the selector of the contexts, which chooses the KV entries that each step reads.

    Yields:
        Index of a window, index of the first of its scored tokens, and logits_TV in fp32 (fp64 for fp64)
        for this and the following ones.
    """
    assert read.step.logits_BTV is not None
    wide = torch.promote_types(target.dtype, torch.float32)
    for row, logits_V in enumerate(read.step.logits_BTV[:, -1].to(wide)):
        yield row, 0, logits_V[None]
    for at_B, m_B, hidden_BTE in hidden_states(target, read, scored, rows=rows, selector=selector):
        for row, (at, count) in enumerate(zip(at_B.tolist(), m_B.tolist(), strict=True)):
            if count:
                yield row, at, target.head(hidden_BTE[row, :count]).to(wide)


@torch.no_grad()
def hidden_states(
    target: Target,
    read: Prefilled,
    scored: Sequence[Sequence[int]],
    *,
    rows: int = ROWS,
    selector: Selector | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield final hidden states at the tokens after the contexts, step by step; see `predicted_logits`.

    Yields:
        at_B, indices of the first scored tokens that the step's positions predict, from 1 on; m_B, the number
        of valid positions; hidden_BTE.
    """
    targets_BT, n_B = pad(scored, target.device)
    last, at_B = n_B - 1, torch.zeros_like(n_B)  # the last token is predicted, never an input
    rows = min(rows, read.cache.step_limit() or rows)
    while bool((at_B < last).any()):
        m_B = (last - at_B).clamp(0, rows)
        most_B = read.cache.commit_limit()
        m_B = m_B if most_B is None else m_B.minimum(most_B)
        step_T = torch.arange(int(m_B.max()), device=target.device)
        from_BT = (at_B[:, None] + step_T).clamp(max=targets_BT.shape[1] - 1)
        ids_BT, pos_BT = targets_BT.gather(1, from_BT), (read.n_B + at_B)[:, None] + step_T
        given, outputs = TokenBatch(pos_BT, ids_BT, n_B=m_B), OutputRequest("none", hidden=(-1,))
        step = given_step(target, read.cache, given, outputs=outputs, selector=selector)
        yield at_B + 1, m_B, step.hidden[-1]
        at_B = at_B + m_B


def perplexity(nats: float, tokens: int) -> float:
    """Exponential of the mean negative log-likelihood per token; NaN without tokens, infinite on overflow."""
    if not tokens:
        return math.nan
    try:
        return math.exp(nats / tokens)
    except OverflowError:
        return math.inf

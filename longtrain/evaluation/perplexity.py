"""Perplexity over sliding windows with whatever cache a system brings: the context is read and evicted first,
then the tokens that follow it are given to the target.

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
from longtrain.targets.step import Rows, Want

if TYPE_CHECKING:
    from longtrain.targets.model import Target

ROWS = 256
"""Tokens given to the target at once; a matter of memory alone."""


@dataclass(frozen=True)
class TextWindow:
    """A window of a text: tokens `begin` to `first` are its context, tokens `first` to `end` are scored."""

    begin: int
    first: int
    end: int


@dataclass(frozen=True)
class Nats:
    """What a window's tokens cost.

    Args:
        nats: summed negative log-likelihood of its scored tokens.
        tokens: how many these are.
        kept_rows: rows of the context in the cache, mean over layers and KV heads.
        likeliest: tokens that were the most probable ones, which greedy decoding would have written.
    """

    nats: float
    tokens: int
    kept_rows: float
    likeliest: int


def spans(n_tokens: int, *, window: int, stride: int) -> Iterator[TextWindow]:
    """The windows of a text; each token but the first is scored once.

    The first window scores all of its tokens but one; each further window moves on by `stride` tokens and
    scores these.

    Args:
        n_tokens: of the text.
        window: tokens of a window, context and scored ones.
        stride: tokens scored in each window but the first.

    Raises:
        ConfigError: a stride that leaves no context.

    Source: the sliding window of the Hugging Face documentation, "Perplexity of fixed-length models".
    """
    if not 1 <= stride < window:
        raise ConfigError(
            f"window={window} with stride={stride} leaves no context; allowed: 1 <= stride < window"
        )
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
    """Cost of the tokens that follow each context.

    Args:
        target: the frozen model.
        parts: its evictor drops rows of the contexts, its cache holds them, its selector says what is read of
            them; a draft has no part in this.
        contexts: token ids, at least one each.
        scored: the tokens after each, at least one.
        rows: see `foretold`.

    Raises:
        ConfigError: a window is longer than the target's context, or an empty part.
        ConflictError: an evictor beside a cache of its own.
    """
    read = read_contexts(target, parts, contexts, scored=scored)
    nats, likeliest = [0.0] * len(scored), [0] * len(scored)
    for row, at, logits_TV in foretold(target, read, scored, rows=rows, selector=parts.selector):
        wanted_T = torch.tensor(scored[row][at : at + len(logits_TV)], device=logits_TV.device)
        nats[row] += float(cross_entropy(logits_TV, wanted_T, reduction="none").double().sum())
        likeliest[row] += int((logits_TV.argmax(-1) == wanted_T).sum())
    return [Nats(*one) for one in zip(nats, map(len, scored), read.kept_rows, likeliest, strict=True)]


def read_contexts(
    target: Target, parts: Parts, contexts: Sequence[Sequence[int]], *, scored: Sequence[Sequence[int]]
) -> Prefilled:
    """Contexts in the cache that `parts` brings, evicted, with room for what follows them.

    Args:
        target: the frozen model.
        parts: evictor, cache, and a selector, which is started.
        contexts: token ids, at least one each.
        scored: the tokens after each, at least one.

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
    engine = Engine(target, parts)  # checks that the parts go together
    read = prefill(
        target,
        engine.new_cache,
        contexts,
        max_new_tokens=max(counts),
        nodes=1,
        hidden=engine.parts.hidden(drafts=False),
        evictor=engine.parts.evictor,
    )
    if engine.parts.selector is not None:
        engine.parts.selector.start(read.tokens_BS, read.n_B, read.step, read.cache)
    return read


@torch.no_grad()
def foretold(
    target: Target,
    read: Prefilled,
    scored: Sequence[Sequence[int]],
    *,
    rows: int = ROWS,
    selector: Selector | None = None,
) -> Iterator[tuple[int, int, Tensor]]:
    """The target's logits for each token after the contexts, which are told the text itself, not samples.

    The first token is foretold by the context's last row, before eviction, like the first of an answer. On a
    cache that changes what it keeps at certain tokens (`KVCache.commit_limit`) a step ends there, as in
    decoding.

    Args:
        target: the frozen model.
        read: the contexts (`read_contexts`); their cache is written on.
        scored: the tokens after each.
        rows: tokens given to the target at once, or fewer where the cache takes no more.
        selector: says what each step reads; that of the contexts.

    Yields:
        Number of a window, number of the first of its scored tokens, and logits_TV in fp32 (fp64 for fp64)
        for this and the following ones.
    """
    assert read.step.logits_BTV is not None
    wide = torch.promote_types(target.dtype, torch.float32)
    for row, logits_V in enumerate(read.step.logits_BTV[:, -1].to(wide)):
        yield row, 0, logits_V[None]
    for at_B, m_B, hidden_BTE in told(target, read, scored, rows=rows, selector=selector):
        for row, (at, count) in enumerate(zip(at_B.tolist(), m_B.tolist(), strict=True)):
            if count:
                yield row, at, target.head(hidden_BTE[row, :count]).to(wide)


@torch.no_grad()
def told(
    target: Target,
    read: Prefilled,
    scored: Sequence[Sequence[int]],
    *,
    rows: int = ROWS,
    selector: Selector | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Final hidden states at the tokens after the contexts, step by step; see `foretold`.

    Yields:
        at_B, numbers of the first scored tokens that the step's rows foretell, from 1 on; m_B, how many of
        its rows count; hidden_BTE.
    """
    targets_BT, n_B = pad(scored, target.device)
    last, at_B = n_B - 1, torch.zeros_like(n_B)  # the last token is foretold, never given
    rows = min(rows, read.cache.step_limit() or rows)
    while bool((at_B < last).any()):
        m_B = (last - at_B).clamp(0, rows)
        most_B = read.cache.commit_limit()
        m_B = m_B if most_B is None else m_B.minimum(most_B)
        step_T = torch.arange(int(m_B.max()), device=target.device)
        from_BT = (at_B[:, None] + step_T).clamp(max=targets_BT.shape[1] - 1)
        ids_BT, pos_BT = targets_BT.gather(1, from_BT), (read.n_B + at_B)[:, None] + step_T
        given, want = Rows(pos_BT, ids_BT, n_B=m_B), Want("none", hidden=(-1,))
        step = given_step(target, read.cache, given, want=want, selector=selector)
        yield at_B + 1, m_B, step.hidden[-1]
        at_B = at_B + m_B


def perplexity(nats: float, tokens: int) -> float:
    """Exponential of the mean cost of a token; NaN without tokens, infinite beyond what a float holds."""
    if not tokens:
        return math.nan
    try:
        return math.exp(nats / tokens)
    except OverflowError:
        return math.inf

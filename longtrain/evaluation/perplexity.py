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
from torch.nn.functional import cross_entropy

from longtrain.decoding.engine import Engine
from longtrain.decoding.prefill import pad, prefill
from longtrain.decoding.roles import Parts
from longtrain.errors import ConfigError
from longtrain.target.step import Rows, Want

if TYPE_CHECKING:
    from longtrain.target.model import Target

ROWS = 256
"""Tokens given to the target at once; a matter of memory alone."""


@dataclass(frozen=True)
class Span:
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
    """

    nats: float
    tokens: int
    kept_rows: float


def spans(n_tokens: int, *, window: int, stride: int) -> Iterator[Span]:
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
        yield Span(begin, first, end)
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

    The first of them is foretold by the context's last row, before eviction, like the first of an answer.

    Args:
        target: the frozen model.
        parts: its evictor drops rows of the contexts, its cache holds them; a draft has no part in this.
        contexts: token ids, at least one each.
        scored: the tokens after each, at least one.
        rows: tokens given to the target at once, or fewer where the cache takes no more; a cache that is to
            change what it keeps at the same tokens as in decoding gets steps that end there.

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
        engine.parts.cache or target.new_cache,
        contexts,
        max_new_tokens=max(counts),
        nodes=1,
        evictor=engine.parts.evictor,
    )
    targets_BT, n_B = pad(scored, target.device)
    assert read.step.logits_BTV is not None
    wide = torch.promote_types(target.dtype, torch.float32)
    nats_B = cross_entropy(read.step.logits_BTV[:, -1].to(wide), targets_BT[:, 0], reduction="none").double()
    last, at_B = n_B - 1, torch.zeros_like(n_B)  # the last token is foretold, never given
    rows = min(rows, read.cache.step_limit() or rows)
    while bool((at_B < last).any()):
        m_B = (last - at_B).clamp(0, rows)
        most_B = read.cache.commit_limit()
        m_B = m_B if most_B is None else m_B.minimum(most_B)
        step_T = torch.arange(int(m_B.max()), device=target.device)
        from_BT = (at_B[:, None] + step_T).clamp(max=targets_BT.shape[1] - 1)
        ids_BT, pos_BT = targets_BT.gather(1, from_BT), (read.n_B + at_B)[:, None] + step_T
        step = target.forward(Rows(pos_BT, ids_BT, n_B=m_B), read.cache, want=Want("none", hidden=(-1,)))
        read.cache.commit(None, m_B)
        for row, (at, count) in enumerate(zip(at_B.tolist(), m_B.tolist(), strict=True)):
            if count:
                logits_TV = target.head(step.hidden[-1][row, :count]).to(wide)
                wanted_T = targets_BT[row, at + 1 : at + 1 + count]
                nats_B[row] += cross_entropy(logits_TV, wanted_T, reduction="none").double().sum()
        at_B = at_B + m_B
    return [Nats(*one) for one in zip(nats_B.tolist(), counts, read.kept_rows, strict=True)]


def perplexity(nats: float, tokens: int) -> float:
    """Exponential of the mean cost of a token; NaN without tokens, infinite beyond what a float holds."""
    if not tokens:
        return math.nan
    try:
        return math.exp(nats / tokens)
    except OverflowError:
        return math.inf

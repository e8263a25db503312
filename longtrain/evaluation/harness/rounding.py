"""Measures rounding noise in a target's logits: one sequence, computed in steps of different lengths.

A matrix product over many tokens sums in another order than one over a single token, and in 16 bits the sums
then round differently. The effect on the difference between two logits depends on the weights and on
the sequence, so it is measured for both.

Shapes: T tokens, V vocabulary, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.decoding.appended import given_step, tokens_of_next_step
from longtrain.decoding.engine import Engine
from longtrain.decoding.prefill import prefill
from longtrain.decoding.roles import Parts
from longtrain.targets.step import OutputRequest, TokenBatch

if TYPE_CHECKING:
    from longtrain.targets.model import Target

CANDIDATES = 4
"""Number of best tokens at each position whose logit differences are compared."""


@dataclass(frozen=True)
class Passage:
    """A prompt and the tokens that follow it.

    Args:
        prompt: token ids.
        tokens: the ids that follow, at least one.
        after: ids between prompt and tokens that enter the cache after eviction.
        first: index of the first of `tokens` whose logits are compared.
        max_new_tokens: the answer's limit; some evictors reserve room for it.
        sequence_id: key of the prompt's random numbers; None: none are drawn.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    after: Sequence[int] = ()
    first: int = 0
    max_new_tokens: int = 1
    sequence_id: int | None = None


@torch.no_grad()
def logits_at_once(target: Target, parts: Parts, passage: Passage) -> Tensor:
    """The logits that each token from `first` on is chosen from, [T, V], in as few passes as the cache
    allows.

    On a plain cache this is one pass over prompt and tokens, which shares no code path with decoding steps:
    an error in single-token or multi-token steps cannot affect it.

    Args:
        target: the frozen model.
        parts: evictor, cache and selector; a draft is ignored.
        passage: the sequence to compute.

    Returns: logits as decoding computes them, in fp32 or wider.
    """
    if not (parts.cache is None and parts.evictor is None and parts.selector is None):
        return logits_in_steps(target, parts, passage, rows=len(passage.tokens) - passage.first)
    whole = [*passage.prompt, *passage.after, *passage.tokens[:-1]]
    read = prefill(target, target.new_cache, [whole], max_new_tokens=1, nodes=1, hidden=(-1,))
    looked_at = len(passage.tokens) - passage.first
    return _wide(target.head(read.step.hidden[-1][0, -looked_at:]))


def logits_in_steps(target: Target, parts: Parts, passage: Passage, *, rows: int) -> Tensor:
    """The same logits, computed in steps of `rows` tokens after the prompt, or fewer if the cache requires
    it; see `each_step`.
    """
    return torch.cat(list(each_step(target, parts, passage, rows=rows)))


@torch.no_grad()
def each_step(target: Target, parts: Parts, passage: Passage, *, rows: int) -> Iterator[Tensor]:
    """Yield the same logits step by step, [steps' tokens, V], in fp32 or wider.

    Prompts are prefilled and evicted as in decoding. Tokens before `first` take as few steps as possible.

    Args:
        target: the frozen model.
        parts: evictor, cache and selector; a draft is ignored.
        passage: the sequence to compute.
        rows: tokens per step; 1 computes as plain decoding does.
    """
    tokens, selector = passage.tokens, parts.selector
    read = prefill(
        target,
        Engine(target, parts).new_cache,
        [passage.prompt],
        max_new_tokens=max(len(tokens), passage.max_new_tokens),
        nodes=rows,
        hidden=parts.hidden(drafts=False),
        evictor=parts.evictor,
        after=[passage.after] if passage.after else None,
        sequence_ids=None if passage.sequence_id is None else [passage.sequence_id],
    )
    assert read.step.logits_BTV is not None
    if selector is not None:
        selector.start(read.tokens_BS, read.n_B, read.step, read.cache)
    if passage.first == 0:
        yield _wide(read.step.logits_BTV[0, -1:])
    done = 0
    while done < len(tokens) - 1:
        before = passage.first - 1 - done
        left = before if before > 0 else min(rows, len(tokens) - 1 - done)
        (count,) = tokens_of_next_step(read.cache, [left])
        ids_BT = torch.tensor([list(tokens[done : done + count])], device=target.device)
        pos_BT = read.cache.len_B[:, None] + torch.arange(count, device=target.device)
        outputs = OutputRequest(logits="none" if before > 0 else "all")
        step = given_step(target, read.cache, TokenBatch(pos_BT, ids_BT), outputs=outputs, selector=selector)
        if step.logits_BTV is not None:
            yield _wide(step.logits_BTV[0])
        done += count


def noise_of(
    target: Target, parts: Parts, passage: Passage, at_once_TV: Tensor, *, rows: int, above: float = 0.0
) -> float:
    """The largest change of the difference between two of the best logits by computing in other steps.

    Both ways of decoding, token by token and in steps of `rows`, are compared with the single pass, and
    the smaller of the two changes counts, so that an error in one of them does not pass for rounding.

    Token by token takes by far the most steps. They end where the result is certain: they are not begun if it
    cannot exceed `above`, and once they have changed more than the others did, those count.

    Args:
        target: the frozen model.
        parts: evictor, cache and selector.
        passage: the sequence to compute.
        at_once_TV: `logits_at_once` of the passage.
        rows: tokens per verification step of the draft under test.
        above: a change up to this is of no interest; what is returned for it is any number up to this.
    """
    least = math.inf
    for n in (max(rows, 2), 1):
        if least > above:
            least = min(least, _change_up_to(least, target, parts, passage, at_once_TV, rows=n))
    return least


def _change_up_to(
    enough: float, target: Target, parts: Parts, passage: Passage, at_once_TV: Tensor, *, rows: int
) -> float:
    """The largest change by steps of `rows` tokens; once it is `enough`, later steps are left out."""
    largest, done = 0.0, 0
    for some_TV in each_step(target, parts, passage, rows=rows):
        largest = max(largest, change(at_once_TV[done : done + len(some_TV)], some_TV))
        done += len(some_TV)
        if largest >= enough:
            break
    return largest


def change(one_TV: Tensor, other_TV: Tensor) -> float:
    """The largest change in the gap between the best logit and the next ones, candidates taken from the
    first.
    """
    best_TC = one_TV.topk(min(CANDIDATES, one_TV.shape[1])).indices
    one_TC, other_TC = one_TV.gather(1, best_TC), other_TV.gather(1, best_TC)
    moved_TC = (one_TC[:, :1] - one_TC) - (other_TC[:, :1] - other_TC)
    return float(moved_TC.abs().max())


def spacing(logit: float, dtype: torch.dtype) -> float:
    """The distance between neighbouring floating-point numbers of a dtype at a logit's value."""
    return float(torch.finfo(dtype).eps) * 2.0 ** math.floor(math.log2(max(abs(logit), 1e-30)))


def _wide(logits_TV: Tensor) -> Tensor:
    return logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))

"""Hooks that store queries: of each prompt's last tokens, and of tokens run after the prompts.

The queries of all prompts are concatenated (N), as `kernels.importance` takes them. A prompt no longer than
the window is left out: its queries see no prefix, and it fits any budget.
Shapes: L layers, B prompts, T new tokens, N observing queries of all prompts, H query heads, G KV heads, D
head dim, S cache positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from longtrain.decoding.select import reduce_heads
from longtrain.kernels.importance import Span, importance, suffix_lse

if TYPE_CHECKING:
    from longtrain.decoding.evict import PromptRun


class Observers(Protocol):
    """The observing queries of every layer, from which scores are computed."""

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Queries q_NHD and the keys own_k_NGD of the same tokens, after RoPE."""

    def spans(self) -> list[Span]:
        """The range of queries of each prompt, and the prefix that they see."""


class LastQueries:
    """Stores the last `window` queries and keys of each prompt; a hook for the prefill.

    Args:
        lengths: prompt tokens, on the host.
        window: number of queries of each prompt.
    """

    def __init__(self, lengths: Sequence[int], window: int) -> None:
        self.rows = [window if length > window else 0 for length in lengths]
        self.prefix = [length - rows for length, rows in zip(lengths, self.rows, strict=True)]
        self._kept: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def __call__(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Copy the last queries and keys: a view would keep the whole prompt's queries in memory."""
        q, k = q_BHTD.transpose(1, 2), k_BGTD.transpose(1, 2)
        ends = [(b, at, at + n) for b, (at, n) in enumerate(zip(self.prefix, self.rows, strict=True))]
        self._kept[layer] = (
            [q[b, start:stop].clone(memory_format=torch.contiguous_format) for b, start, stop in ends],
            [k[b, start:stop].clone(memory_format=torch.contiguous_format) for b, start, stop in ends],
        )

    def narrowed(self, window: int) -> LastQueries:
        """The last `window` of these queries, which are at least as many; shares their memory."""
        found = LastQueries([p + n for p, n in zip(self.prefix, self.rows, strict=True)], 0)
        found.rows = [min(window, n) for n in self.rows]
        found.prefix = [p + n - m for p, n, m in zip(self.prefix, self.rows, found.rows, strict=True)]
        for layer, (q, k) in self._kept.items():
            found._kept[layer] = (
                [x[len(x) - n :] for x, n in zip(q, found.rows, strict=True)],
                [x[len(x) - n :] for x, n in zip(k, found.rows, strict=True)],
            )
        return found

    def pieces(self, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """Queries and keys prompt by prompt."""
        return self._kept[layer]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `Observers`."""
        return _joined(*self.pieces(layer))

    def spans(self) -> list[Span]:
        """See `Observers`; a prompt's prefix ends where its window begins."""
        return _spans(self.rows, self.prefix)


class AllQueries:
    """Stores every query and key of the tokens run after the prompts (`PromptRun.follow`, `decode`).

    Args:
        lengths: prompt tokens, on the host.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.prefix = list(lengths)
        self.rows: list[int] | None = None
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Append the call's queries and keys to those of earlier calls."""
        self._kept.setdefault(layer, []).append((q_BHTD.transpose(1, 2), k_BGTD.transpose(1, 2)))

    def count(self, rows: Sequence[int]) -> None:
        """Set the number of real tokens of each prompt; the others (padding, after the end) are dropped."""
        self.rows = list(rows)

    def pieces(self, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """Queries and keys prompt by prompt."""
        steps = self._kept[layer]
        q_BTHD, k_BTGD = (torch.cat([step[i] for step in steps], 1) for i in (0, 1))
        rows = [q_BTHD.shape[1]] * len(q_BTHD) if self.rows is None else self.rows
        return [q[:n] for q, n in zip(q_BTHD, rows, strict=True)], [
            k[:n] for k, n in zip(k_BTGD, rows, strict=True)
        ]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `Observers`."""
        return _joined(*self.pieces(layer))

    def spans(self) -> list[Span]:
        """See `Observers`; the prefix is the whole prompt."""
        assert self.rows is not None, "count() was not called"
        return _spans(self.rows, self.prefix)


class Both:
    """The last tokens of each prompt and the tokens after it, as one window (SpecKV, LAQ++).

    Args:
        last: queries of the prompts' last tokens.
        following: queries of the tokens after them.
    """

    def __init__(self, last: LastQueries, following: AllQueries) -> None:
        self.last, self.following = last, following

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `Observers`."""
        first, then = self.last.pieces(layer), self.following.pieces(layer)
        q, k = (
            [torch.cat((a, b)) if len(a) else a for a, b in zip(first[i], then[i], strict=True)]
            for i in (0, 1)
        )
        return _joined(q, k)

    def spans(self) -> list[Span]:
        """See `Observers`; the prefix ends where the prompt's window begins."""
        assert self.following.rows is not None, "count() was not called"
        rows = [a + b if a else 0 for a, b in zip(self.last.rows, self.following.rows, strict=True)]
        return _spans(rows, self.last.prefix)


def observed(
    run: PromptRun,
    observers: Observers,
    *,
    reduce: Literal["mean", "max"] = "mean",
    heads: Literal["mean", "max"] = "mean",
) -> Tensor:
    """Attention of the observing queries to the prompt's keys, in every layer: s_LBGS, fp32.

    Args:
        run: the prefilled prompts.
        observers: the observing queries of all layers.
        reduce: reduction over queries.
        heads: reduction over the query heads of a KV head.

    Returns:
        Zero outside the spans' prefixes.
    """
    info = run.target.info
    spans, longest = observers.spans(), max(run.lengths)
    shape = (len(run.lengths), info.n_kv_heads, longest)
    found = []
    for layer in run.layers:
        if not spans:
            found.append(torch.zeros(shape, device=run.tokens_BS.device))
            continue
        k_BTGD = run.cache.prefix(layer)[0][:, :longest]
        q_NHD, own_k_NGD = observers.layer(layer)
        scale = run.target.scaling(layer)
        sinks_H = run.target.sinks(layer)
        lse_NH = suffix_lse(q_NHD, own_k_NGD, k_BTGD, spans, scale=scale, sinks_H=sinks_H)
        s_BHT = importance(q_NHD, lse_NH, k_BTGD, spans, scale=scale, reduce=reduce)
        found.append(reduce_heads(s_BHT, info.n_kv_heads, heads))
    return torch.stack(found)


def _joined(q: list[Tensor], k: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Queries and keys of all prompts, concatenated."""
    return (q[0], k[0]) if len(q) == 1 else (torch.cat(q), torch.cat(k))


def _spans(rows: Sequence[int], prefix: Sequence[int]) -> list[Span]:
    """Spans of the prompts that have observing queries."""
    bounds = pairwise(accumulate(rows, initial=0))
    return [
        Span((start, stop), b, (0, n))
        for b, ((start, stop), n) in enumerate(zip(bounds, prefix, strict=True))
        if stop > start
    ]

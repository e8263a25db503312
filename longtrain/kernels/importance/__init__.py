"""Importance of prompt tokens: the attention they get from a few observing queries, without the full matrix.

Formulas, for an observing query i of a span with prefix keys j and own keys c <= i:
lse_i = log(sum_j exp(scale q_i·k_j) + sum_c exp(scale q_i·own_k_c)), p_ij = exp(scale q_i·k_j - lse_i),
s_j = mean_i p_ij.

Triton on a GPU of compute capability 8.0 or more for head dims up to 256 in fp32, bf16 and fp16 (interpreted
under TRITON_INTERPRET=1 on any device, but not in bf16, which the interpreter cannot multiply); `reference`,
full matrices in plain torch, everywhere else. Products run in the dtype of the prefix keys with fp32 sums,
exponentials in fp32.

Shapes: N observing queries of all spans, H query heads, G KV heads (H a multiple of G), D head dim, B
sequences, T keys of a sequence. The spans' queries are concatenated from 0 to N; their prefixes share no key.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from longtrain.errors import DataError, refusal
from longtrain.kernels.devices import products_serve
from longtrain.kernels.importance import reference
from longtrain.kernels.importance.spans import Span, check_spans

__all__ = ["Span", "importance", "own_importance", "suffix_attention", "suffix_lse"]

_MAX_DIM = 256
"""Largest head dim of the Triton kernels."""


def suffix_lse(
    q_NHD: Tensor,
    own_k_NGD: Tensor,
    k_BTGD: Tensor,
    spans: Sequence[Span],
    *,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Log of the sum of exponentials of each query over prefix and own causal keys.

    Args:
        q_NHD: observing queries, after RoPE.
        own_k_NGD: keys of the same tokens, after RoPE.
        k_BTGD: prefix keys, last dim contiguous; keys outside of the spans are not read.
        spans: ranges of queries and their prefixes.
        scale: softmax scale.
        sinks_H: a score of each head that joins every sum (attention sinks); None: none.

    Returns:
        lse_NH (natural) in fp32 (fp64 for fp64).

    Raises:
        DataError: shapes or spans that do not fit.
    """
    spans = _checked(q_NHD, own_k_NGD, k_BTGD, spans)
    if kernels_serve(q_NHD, k_BTGD):
        from longtrain.kernels.importance import launch

        lse_NH = launch.suffix_lse(q_NHD, own_k_NGD, k_BTGD, spans, scale)
    else:
        lse_NH = reference.suffix_lse(q_NHD, own_k_NGD, k_BTGD, spans, scale=scale)
    return lse_NH if sinks_H is None else torch.logaddexp(lse_NH, sinks_H.to(lse_NH.dtype))


def importance(
    q_NHD: Tensor,
    lse_NH: Tensor,
    k_BTGD: Tensor,
    spans: Sequence[Span],
    *,
    scale: float,
    reduce: Literal["mean", "max"] = "mean",
) -> Tensor:
    """Mean (or maximum) over queries of the attention to each prefix key.

    Args:
        q_NHD: observing queries, after RoPE.
        lse_NH: result of `suffix_lse`, or the lse of the attention kernel.
        k_BTGD: prefix keys, see `suffix_lse`.
        spans: ranges of queries and their prefixes.
        scale: softmax scale.
        reduce: mean or max over a span's queries.

    Returns:
        s_BHT in fp32 (fp64 for fp64), 0 outside of the spans.

    Raises:
        DataError: shapes or spans that do not fit, another `reduce`.
    """
    spans = _checked(q_NHD, None, k_BTGD, spans)
    if reduce not in ("mean", "max"):
        raise refusal(DataError, f"reduce={reduce!r}", "'mean', 'max'")
    if not kernels_serve(q_NHD, k_BTGD):
        return reference.importance(q_NHD, lse_NH, k_BTGD, spans, scale=scale, reduce=reduce)
    from longtrain.kernels.importance import launch

    return launch.importance(q_NHD, lse_NH, k_BTGD, spans, scale, reduce == "max")


def own_importance(
    q_NHD: Tensor, own_k_NGD: Tensor, lse_NH: Tensor, spans: Sequence[Span], *, scale: float
) -> Tensor:
    """Mean over queries of the attention to each own key, which is visible from its own query on.

    With `importance` it gives the column sums of a full causal softmax, chunk of queries by chunk (H2O).

    Args:
        q_NHD: observing queries, after RoPE.
        own_k_NGD: keys of the same tokens, after RoPE.
        lse_NH: the result of `suffix_lse`.
        spans: ranges of queries; their prefixes are ignored.
        scale: softmax scale.

    Returns:
        s_NH in fp32 (fp64 for fp64): sum over the span's queries i >= c of p_ic, divided by their number.

    Raises:
        DataError: shapes or spans that do not fit.
    """
    spans = _checked(q_NHD, own_k_NGD, own_k_NGD[None], _without_prefix(tuple(spans)))
    if not kernels_serve(q_NHD, own_k_NGD):
        return reference.own_importance(q_NHD, own_k_NGD, lse_NH, spans, scale=scale)
    from longtrain.kernels.importance import launch

    return launch.own_importance(q_NHD, own_k_NGD, lse_NH, spans, scale)


def suffix_attention(
    q_NHD: Tensor,
    own_k_NGD: Tensor,
    own_v_NGD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    spans: Sequence[Span],
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of the queries over prefix and own causal keys, and the importance of the prefix keys.

    Differentiable in q, own_k and own_v, through both results; the prefix is constant.

    Args:
        q_NHD: observing queries, after RoPE.
        own_k_NGD: keys of the same tokens, after RoPE.
        own_v_NGD: their values.
        k_BTGD: prefix keys, see `suffix_lse`.
        v_BTGD: prefix values, likewise.
        spans: ranges of queries and their prefixes.
        scale: softmax scale.

    Returns:
        out_NHD in q's dtype and s_BHT, fp32 or fp64 (the mean of `importance`).

    Raises:
        DataError: shapes or spans that do not fit.
    """
    spans = _checked(q_NHD, own_k_NGD, k_BTGD, spans)
    k_BTGD, v_BTGD = k_BTGD.detach(), v_BTGD.detach()
    if own_v_NGD.shape != own_k_NGD.shape or v_BTGD.shape != k_BTGD.shape:
        raise refusal(
            DataError,
            f"values {tuple(own_v_NGD.shape)} and {tuple(v_BTGD.shape)} beside keys {tuple(own_k_NGD.shape)} "
            f"and {tuple(k_BTGD.shape)}",
            "the keys' shapes",
        )
    if not kernels_serve(q_NHD, k_BTGD) or v_BTGD.stride(-1) != 1:
        return reference.suffix_attention(q_NHD, own_k_NGD, own_v_NGD, k_BTGD, v_BTGD, spans, scale=scale)
    from longtrain.kernels.importance import launch

    return launch.suffix_attention(q_NHD, own_k_NGD, own_v_NGD, k_BTGD, v_BTGD, spans, scale)


def kernels_serve(q: Tensor, k: Tensor) -> bool:
    """True if the Triton kernels support these queries and prefix keys; else `reference` is used."""
    return products_serve(q, k) and k.shape[-1] <= _MAX_DIM


def _checked(
    q_NHD: Tensor, own_NGD: Tensor | None, k_BTGD: Tensor, spans: Sequence[Span]
) -> tuple[Span, ...]:
    """Check all shapes and return the spans as a tuple."""
    N, H, D = q_NHD.shape
    B, T, G, width = k_BTGD.shape
    if width != D or H % G:
        raise refusal(
            DataError, f"{H} query heads of {D} over {G} KV heads of {width}", "a multiple of one size"
        )
    if own_NGD is not None and own_NGD.shape != (N, G, D):
        raise refusal(DataError, f"own keys {tuple(own_NGD.shape)}", f"{(N, G, D)}, one for each query")
    spans = tuple(spans)
    check_spans(spans, N, B, T)
    return spans


@lru_cache(maxsize=128)
def _without_prefix(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The spans with empty prefixes."""
    return tuple(Span(span.rows, 0, (0, 0)) for span in spans)

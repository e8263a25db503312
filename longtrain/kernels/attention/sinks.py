"""Attention sinks: a score of each head that joins the softmax's denominator and brings no value.

Shapes: ... leading dims (batch), H query heads, T tokens, D head dim (or entries).
"""

from __future__ import annotations

from torch import Tensor


def with_sinks(out_HTD: Tensor, lse_HT: Tensor, sinks_H: Tensor) -> Tensor:
    """Return attention, or the weights themselves, with sinks, from those without and the scores' lse.

    out * sum_j exp(s_j) / (sum_j exp(s_j) + exp(sink)) = out * sigmoid(lse - sink), in fp32 or wider. Parts
    of the attention (prefix and tail, say) are merged before.
    """
    share_HT = (lse_HT - sinks_H.to(lse_HT.dtype)[:, None]).sigmoid()
    return (out_HTD * share_HT[..., None]).to(out_HTD.dtype)

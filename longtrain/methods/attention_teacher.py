"""The target's attention as a training target for sets of KV entries, and the share of it that a set covers.

Shapes: S tokens of a document, R queries, X sets, L layers, H query heads, G KV heads, D head dim, K entries
of a set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Teacher:
    """Attention of sampled queries of a document over its far KV entries, layer by layer.

    Args:
        q_LHRD: the target's queries of each layer, after RoPE, [H, R, D].
        k_LGSD: the target's keys of each layer, [G, S, D].
        at_R: positions of the queries.
        far_RS: bool, the entries outside of what is always read (sinks and window); each query has some.
        mean: average over a KV head's query heads instead of their maximum.
        by_mass: leave the sum of the far attention below 1; False: normalise it to 1.
        scale: softmax scale; None: D ** -0.5.
    """

    q_LHRD: Mapping[int, Tensor]
    k_LGSD: Mapping[int, Tensor]
    at_R: Tensor
    far_RS: Tensor
    mean: bool = False
    by_mass: bool = False
    scale: float | None = None

    @torch.no_grad()
    def layer(self, layer: int) -> Tensor:
        """Return mass_GRS in fp32 or wider: a layer's attention on far entries."""
        q_HRD, k_GSD = self.q_LHRD[layer], self.k_LGSD[layer]
        wide = torch.promote_types(q_HRD.dtype, torch.float32)
        (H, R, D), (G, S, _) = q_HRD.shape, k_GSD.shape
        # query heads of a KV head as further queries: [G, H / G * R, S], then [G, H / G, R, S]
        score = (q_HRD.reshape(G, H // G * R, D) @ k_GSD.transpose(1, 2)).view(G, H // G, R, S)
        seen_RS = torch.arange(S, device=score.device) <= self.at_R[:, None]
        scale = D**-0.5 if self.scale is None else self.scale
        weight = (score.to(wide) * scale).masked_fill(~seen_RS, -torch.inf).softmax(-1)
        mass_GRS = (weight.mean(1) if self.mean else weight.amax(1)).masked_fill(~self.far_RS, 0.0)
        if self.by_mass:
            return mass_GRS
        return mass_GRS / mass_GRS.sum(-1, keepdim=True).clamp_min(torch.finfo(wide).tiny)

    def layers(self) -> Iterator[tuple[int, Tensor]]:
        """Yield every layer's number and its far attention."""
        for layer in self.q_LHRD:
            yield layer, self.layer(layer)

    @torch.no_grad()
    def sets(self, table_LG: Tensor, n_sets: int) -> tuple[Tensor, Tensor]:
        """Return mass_XRS, the mean far attention of the KV heads of each set (0 for a set without), and the
        number of KV heads of each.
        """
        total: Tensor | None = None
        for layer, mass_GRS in self.layers():
            if total is None:
                total = mass_GRS.new_zeros(n_sets, *mass_GRS.shape[1:])
            total.index_add_(0, table_LG[layer], mass_GRS)
        assert total is not None
        members_X = torch.bincount(table_LG[[*self.q_LHRD]].flatten(), minlength=n_sets)
        return total / members_X.clamp(min=1)[:, None, None], members_X

    @torch.no_grad()
    def add_evidence(self, order_XRS: Tensor, rows: int, evidence_LGX: Tensor) -> None:
        """Add to `evidence_LGX` how much of each KV head's attention the best entries of each set cover."""
        inside_XRS = best(order_XRS, rows)
        for layer, mass_GRS in self.layers():
            held = torch.einsum("grs,xrs->gx", mass_GRS, inside_XRS.to(mass_GRS.dtype))
            evidence_LGX[layer] += held.to(evidence_LGX.dtype)


def best(order_XRS: Tensor, rows: int) -> Tensor:
    """Return bool_XRS: True for the `rows` highest-scored entries, or for all."""
    top = order_XRS.topk(min(rows, order_XRS.shape[-1]), -1).indices
    return torch.zeros_like(order_XRS, dtype=torch.bool).scatter_(-1, top, True)


def share_held(mass_XRS: Tensor, order_XRS: Tensor, rows: int) -> Tensor:
    """Return the share of the attention that the `rows` highest-scored entries cover, [X, R]."""
    top = order_XRS.topk(min(rows, order_XRS.shape[-1]), -1).indices
    return mass_XRS.gather(-1, top).sum(-1)


def soft_share(mass_XRS: Tensor, probs_XRS: Tensor, far_RS: Tensor, rows: int) -> Tensor:
    """Return the share of the attention that the set covers, [X, R], in a differentiable form.

    Membership of an entry is a logistic of how far its log-weight lies above the lowest one in the set.
    """
    ordered = probs_XRS.detach().masked_fill(~far_RS, -torch.inf)
    edge = ordered.topk(min(rows, ordered.shape[-1]), -1).values[..., -1:]
    above = torch.sigmoid((probs_XRS - edge.nan_to_num(neginf=-1e4)).masked_fill(~far_RS, -1e4))
    return (mass_XRS * above).sum(-1)

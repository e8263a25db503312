"""Cases of the importance kernels, and what they must give: a plain softmax of one head and row at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longtrain.kernels.importance import Span


@dataclass(frozen=True)
class Case:
    """Spans over a cache of B sequences; `strided`: the cache lies head by head, as DenseCache's does."""

    spans: tuple[Span, ...]
    H: int
    G: int
    D: int
    B: int
    T: int
    strided: bool = True

    @property
    def scale(self) -> float:
        return self.D**-0.5

    def tensors(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> list[Tensor]:
        """q, own_k, own_v, k, v; slots outside of the spans hold values that would be seen in any result."""
        rng = torch.Generator().manual_seed(seed)
        N = self.spans[-1].rows[1]
        q = 2 * torch.randn(N, self.H, self.D, generator=rng)
        own = torch.randn(2, N, self.G, self.D, generator=rng)
        shape = (self.B, self.G, self.T, self.D) if self.strided else (self.B, self.T, self.G, self.D)
        cache = torch.randn(2, *shape, generator=rng)
        cache = cache.transpose(2, 3) if self.strided else cache
        used = torch.zeros(self.B, self.T, dtype=torch.bool)
        for span in self.spans:
            used[span.seq, slice(*span.keys)] = True
        cache[:, ~used] = torch.nan
        rows = [x.to(dtype) for x in (q, *own)]
        return [x.to(device).requires_grad_() for x in rows] + [x.to(device, dtype) for x in cache]


def one(rows: int, keys: int, H: int, G: int, D: int, *, strided: bool = True) -> Case:
    """One span over a cache with some unused slots on both sides."""
    return Case((Span((0, rows), 0, (2, 2 + keys)),), H, G, D, 1, keys + 5, strided)


def several(H: int, G: int, D: int, *, strided: bool = True) -> Case:
    """Spans of different lengths; one without a prefix, one of one row, two in one sequence."""
    spans = (
        Span((0, 5), 1, (0, 70)),
        Span((5, 6), 0, (3, 36)),
        Span((6, 9), 0, (40, 40)),
        Span((9, 13), 1, (70, 71)),
    )
    return Case(spans, H, G, D, 2, 90, strided)


def eager(case: Case, q: Tensor, own_k: Tensor, own_v: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Everything the kernels give, in fp64 and differentiable, from the definition; no code is shared."""
    q, own_k, own_v, k, v = (x.double() for x in (q, own_k, own_v, k, v))
    lse = torch.zeros(len(q), case.H, dtype=torch.float64)
    mean = torch.zeros(case.B, case.H, case.T, dtype=torch.float64)
    top, own, out = mean.clone(), lse.clone(), torch.zeros(q.shape, dtype=torch.float64)
    for span in case.spans:
        (r0, r1), (k0, k1) = span.rows, span.keys
        for h in range(case.H):
            g = h // (case.H // case.G)
            for i in range(r0, r1):
                keys = torch.cat((k[span.seq, k0:k1, g], own_k[r0 : i + 1, g]))
                values = torch.cat((v[span.seq, k0:k1, g], own_v[r0 : i + 1, g]))
                logit = keys @ q[i, h] * case.scale
                p = torch.softmax(logit, 0)
                lse[i, h] = torch.log(torch.exp(logit - logit.max()).sum()) + logit.max()
                out[i, h] = p @ values
                mean[span.seq, h, k0:k1] += p[: k1 - k0] / (r1 - r0)
                top[span.seq, h, k0:k1] = torch.maximum(top[span.seq, h, k0:k1].clone(), p[: k1 - k0])
                own[r0 : i + 1, h] += p[k1 - k0 :] / (r1 - r0)
    return {"lse": lse, "mean": mean, "max": top, "own": own, "out": out}

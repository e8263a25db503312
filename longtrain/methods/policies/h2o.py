"""H2O: keeps the tokens with the most attention from all prompt tokens together, and the most recent ones.

Shapes: L layers, B prompts, S prompt positions, N queries of a chunk, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
from torch import Tensor

from longtrain.decoding.evict import PromptRun
from longtrain.decoding.select import reduce_heads
from longtrain.errors import TargetMismatchError
from longtrain.kernels.importance import Span, importance, own_importance, suffix_lse
from longtrain.methods.policies.base import Policy
from longtrain.settings import Count, Kernel


@dataclass
class H2O(Policy):
    """Heavy hitters: the column sums of the whole causal attention matrix, plus the last `window` tokens.

    The sums are accumulated during the prefill, `chunk` queries at a time, so no S x S matrix is ever stored;
    every query is multiplied with every key once more, which is the method's own O(S^2).

    Args:
        kernel: 1: H2O does not pool.
        chunk: queries whose attention is summed at a time.

    Source: H2O (https://arxiv.org/abs/2306.14048), section 4, applied once after prefill.
    Note: the sum is not divided by the number of queries that can see a key, as in the paper, so early keys
        are at an advantage. Query heads of one KV head are averaged, as everywhere here.
    """

    name: ClassVar[str] = "h2o"
    wrappable: ClassVar[bool] = True
    kernel: Kernel = 1
    chunk: Count = 1024

    def hook(self, lengths: Sequence[int]) -> ColumnSums:
        """Return the observer that sums columns layer by layer (see `Evictor`)."""
        return ColumnSums(lengths, self.chunk)

    def scores(self, run: PromptRun) -> Tensor:
        """Return the column sums s_LBGS in fp32; 0 beyond a prompt.

        Raises:
            TargetMismatchError: the target has attention sinks.
        """
        if run.target.family.sinks:
            raise TargetMismatchError(
                f"H2O sums attention without the sinks of target {run.target.info.name}; pass another "
                "policy, evict=snapkv"
            )
        watched = run.watched
        assert isinstance(watched, ColumnSums)
        return watched.scores()


class ColumnSums:
    """Observer that sums, for every key of a prompt, the attention of all the prompt's queries.

    Args:
        lengths: tokens of each prompt; queries beyond them are padding and are ignored.
        chunk: queries summed at a time.
    """

    def __init__(self, lengths: Sequence[int], chunk: int) -> None:
        self.lengths = tuple(lengths)
        self.chunk = chunk
        self._layers: dict[int, Tensor] = {}

    def __call__(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Sum one layer's columns."""
        q_BTHD, k_BTGD = q_BHTD.transpose(1, 2), k_BGTD.transpose(1, 2)
        B, T, H, D = q_BTHD.shape
        wide = torch.promote_types(q_BHTD.dtype, torch.float32)
        sum_BHT = torch.zeros(B, H, T, dtype=wide, device=q_BHTD.device)
        for start in range(0, max(self.lengths), self.chunk):
            stops = {b: min(start + self.chunk, n) for b, n in enumerate(self.lengths) if n > start}
            bounds = list(accumulate((stop - start for stop in stops.values()), initial=0))
            spans = [Span(rows, b, (0, start)) for b, rows in zip(stops, pairwise(bounds), strict=True)]
            # the chunk's queries of all prompts, [B, T, H, D] -> [N, H, D]
            q_NHD = torch.cat([q_BTHD[b, start:stop] for b, stop in stops.items()])
            own_NGD = torch.cat([k_BTGD[b, start:stop] for b, stop in stops.items()])
            lse_NH = suffix_lse(q_NHD, own_NGD, k_BTGD, spans, scale=D**-0.5)
            own_NH = own_importance(q_NHD, own_NGD, lse_NH, spans, scale=D**-0.5)
            prefix_BHT = importance(q_NHD, lse_NH, k_BTGD, spans, scale=D**-0.5) if start else None
            for span in spans:
                n, b = span.rows[1] - span.rows[0], span.seq
                sum_BHT[b, :, start : start + n] += n * own_NH[slice(*span.rows)].T
                if prefix_BHT is not None:
                    sum_BHT[b] += n * prefix_BHT[b]
        self._layers[layer] = reduce_heads(sum_BHT, k_BTGD.shape[2])

    def scores(self) -> Tensor:
        """Return the sums of all layers: s_LBGS."""
        return torch.stack([self._layers[layer] for layer in sorted(self._layers)])

"""Prompts of a packed sequence, and the true importance of their tokens.

Shapes: T tokens of a packed sequence, P prompts, N observing queries, B batch (1), H query heads, G KV heads,
D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from longtrain.cache.packed import alone
from longtrain.data.packing.packed_sequences import to_device
from longtrain.kernels.importance import Span, importance, own_importance, suffix_lse
from longtrain.methods.samples import Sample
from longtrain.targets.suffix import Beside


def prompt_ids(found: list[Sample], tokens: int) -> Tensor:
    """Return the number of the prompt that each token belongs to, `len(found)` for none; on the host."""
    ids_T = torch.full((tokens,), len(found), dtype=torch.int64)
    for number, sample in enumerate(found):
        ids_T[sample.start : sample.prompt] = number
    return ids_T


class ObserverRows:
    """Observing queries of a packed sequence, and the prompts whose keys they see besides their own.

    Args:
        rows: start and stop of each prompt's observing queries, in the packed sequence.
        keys: start and stop of the keys before them.
        device: device of the packed sequence.
    """

    def __init__(
        self, rows: list[tuple[int, int]], keys: list[tuple[int, int]], device: torch.device
    ) -> None:
        self.spans, first = [], 0
        for (start, stop), key in zip(rows, keys, strict=True):
            self.spans.append(Span((first, first + stop - start), 0, key))
            first += stop - start
        self._rows_N = to_device(torch.cat([torch.arange(*pair) for pair in rows]), device)

    def scores(self, q_BHTD: Tensor, k_BGTD: Tensor, scale: float, *, own: bool = False) -> Tensor:
        """Return the importance s_HT of the keys before the queries (with `own` theirs too); else 0."""
        q_NHD = q_BHTD[0].transpose(0, 1).index_select(0, self._rows_N)
        own_k_NGD = k_BGTD[0].transpose(0, 1).index_select(0, self._rows_N)
        k_BTGD = k_BGTD.transpose(1, 2)
        lse_NH = suffix_lse(q_NHD, own_k_NGD, k_BTGD, self.spans, scale=scale)
        s_HT = importance(q_NHD, lse_NH, k_BTGD, self.spans, scale=scale)[0]
        if own:
            own_NH = own_importance(q_NHD, own_k_NGD, lse_NH, self.spans, scale=scale)
            s_HT = s_HT.index_copy(1, self._rows_N, own_NH.T)
        return s_HT


class Truth:
    """Observes the prefill of prompts and responses, and computes the true scores (an `AttentionHook`).

    Each layer's true scores are computed as it passes, and its K and V are passed on at once.

    Args:
        found: the samples of the packed sequence.
        scale: scale of the softmax.
        layers: those that have scores.
        then: called with (layer, k_BTGD, v_BTGD) when the layer's scores are available.
        beside: runs this work beside the prefill.
        windows: numbers of last prompt tokens whose scores are needed too (SnapKV's).
        device: device of the packed sequence.

    Source: LookaheadKV §3.2 (GT forward pass): softmax over all causal keys, the response's own included, of
        which then only the prompt's are used.
    """

    def __init__(
        self,
        found: list[Sample],
        scale: float,
        *,
        layers: Collection[int],
        then: Callable[[int, Tensor, Tensor], None],
        beside: Beside,
        windows: Collection[int] = (),
        device: torch.device,
    ) -> None:
        self._scale, self._layers, self._then, self._beside = scale, layers, then, beside
        responses, prompts = [(s.prompt, s.stop) for s in found], [(s.start, s.prompt) for s in found]
        self._response = ObserverRows(responses, prompts, device)
        self._windows: dict[int, ObserverRows] = {}
        for window in windows:
            if longer := [s for s in found if s.length > window]:
                rows = [(s.prompt - window, s.prompt) for s in longer]
                keys = [(s.start, s.prompt - window) for s in longer]
                self._windows[window] = ObserverRows(rows, keys, device)
        self.true: dict[int, Tensor] = {}
        """s_HT of each layer that has scores."""
        self.recent: dict[int, dict[int, Tensor]] = {window: {} for window in self._windows}
        """Window -> s_HT of each layer by that many last tokens of longer prompts, own keys included."""

    def __call__(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Process one layer."""
        self._beside.run(lambda: self._see(layer, q_BHTD, k_BGTD, v_BGTD), q_BHTD, k_BGTD, v_BGTD)

    def _see(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        if layer in self._layers:
            self.true[layer] = self._response.scores(q_BHTD, k_BGTD, self._scale)
            for window, rows in self._windows.items():
                self.recent[window][layer] = rows.scores(q_BHTD, k_BGTD, self._scale, own=True)
        self._then(layer, alone(k_BGTD.transpose(1, 2)), alone(v_BGTD.transpose(1, 2)))

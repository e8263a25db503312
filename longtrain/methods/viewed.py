"""The target's pass over a packed row of which some documents are read in a view, as an engine reads them.

Shapes: T tokens of a packed row, E hidden dim, G KV heads, K rows of a head that a cache kept, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtrain.decoding.appended import read_after
from longtrain.decoding.prefill import prefill
from longtrain.methods.target_cache import named_cache
from longtrain.methods.views import Drawn, View, views_of
from longtrain.targets.step import PackedStep, Want

if TYPE_CHECKING:
    from longtrain.data.rows.batch import Batch
    from longtrain.targets.attention import Watch
    from longtrain.targets.model import Target

READ = 1024
"""Most rows behind a prompt that are read at once: attention over an uneven cache needs memory for each."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive places of a document at which the target's cache has the same old rows.

    Args:
        start: first row of the packed row that a draft's tree may have as its root here.
        stop: one past the last.
        old: positions from the document's first one on that are read from the old rows (`KVCache.old_rows`);
            those after them are read as they were written.
    """

    start: int
    stop: int
    old: int = 0


@dataclass
class Seen:
    """What a document that was read in a view has beside the rows as they were written.

    Args:
        stretches: from its first row to its last.
        old: layer -> k_KD and v_KD of each KV head (`KVCache.old_rows`).
    """

    stretches: tuple[Stretch, ...]
    old: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)


def views_for(values: Any, target: Target) -> tuple[View | None, ...]:
    """The views of `method.views` for a target; None is the full cache.

    Raises:
        ConfigError: an entry is wrong, or the target's heads have a size that a cache does not serve.
    """
    views = views_of(values)
    for view in views:
        if view is not None and view.cache is not None:
            named_cache(view.cache, target)(1, 1, 1)
    return views


@torch.no_grad()
def viewed(
    target: Target, batch: Batch, pos_T: Tensor, want: Want, drawn: Mapping[int, Drawn]
) -> tuple[PackedStep, dict[int, Seen]]:
    """One packed row, as `Target.packed` reads it, but for documents that are read in a view.

    Such a document's prompt is read by the engine's own prefill, then evicted or quantised, and what comes
    after is read over what is left: hidden states are those that decoding the same tokens would give. It
    stands at the positions 0, 1, ...

    Args:
        target: the frozen model.
        batch: the row.
        pos_T: rotary positions of the other documents.
        want: as `Target.packed` takes it.
        drawn: document -> its view (`views.draw`).

    Returns: hidden states, keys and values of every row as it was written; and of the documents in a view
        what drafts read beside them.
    """
    if not drawn:
        return target.packed(batch.ids_T, pos_T, batch.bounds, want), {}
    spans = list(pairwise(batch.bounds))
    parts: dict[int, PackedStep] = {}
    seen: dict[int, Seen] = {}
    for d, one in drawn.items():
        parts[d], seen[d] = _document(target, batch.ids_T, *spans[d], one, want)
    if others := [d for d in range(len(spans)) if d not in drawn]:
        picked = torch.cat([torch.arange(*spans[d]) for d in others]).to(pos_T.device)
        edges = [0]
        for d in others:
            edges.append(edges[-1] + spans[d][1] - spans[d][0])
        step = target.packed(batch.ids_T[picked], pos_T[picked], tuple(edges), want)
        for d, (a, b) in zip(others, pairwise(edges), strict=True):
            parts[d] = PackedStep(
                {layer: state_TE[a:b] for layer, state_TE in step.hidden.items()},
                {layer: (k_TGD[a:b], v_TGD[a:b]) for layer, (k_TGD, v_TGD) in step.kv.items()},
            )
    return _joined([parts[d] for d in range(len(spans))], want), seen


def _document(
    target: Target, ids_T: Tensor, a: int, b: int, one: Drawn, want: Want
) -> tuple[PackedStep, Seen]:
    """Rows a..b of a packed row, read in a view."""
    cut, ids = one.start - a, ids_T[a:b]
    view, rows = one.view, _Rows(want.kv) if want.kv else None
    read = prefill(
        target,
        target.new_cache if view.cache is None else named_cache(view.cache, target),
        [ids[:cut].tolist()],
        max_new_tokens=b - one.start,
        nodes=1,
        hidden=want.hidden,
        evictor=view.evictor,
        onlooker=rows,
    )
    states = {layer: [read.step.hidden[layer][0]] for layer in want.hidden}
    for piece_T in ids[cut:].split(READ):
        step, _ = read_after(
            target,
            read.cache,
            piece_T[None],
            (len(piece_T),),
            hidden=want.hidden,
            watch=rows.watch_nodes if rows else None,
        )
        for layer in want.hidden:
            states[layer].append(step.hidden[layer][0])
    hidden = {layer: torch.cat(pieces) for layer, pieces in states.items()}
    old = {layer: read.cache.old_rows(layer) for layer in want.kv}
    stretches = (Stretch(a, one.start), *_stretches(read.cache.old_positions, a, one.start, b))
    return PackedStep(hidden, rows.kv() if rows else {}), Seen(stretches, old)


def _stretches(old_positions: Callable[[int], int], a: int, start: int, stop: int) -> list[Stretch]:
    """The stretches of rows start..stop of a document that begins at row a."""
    found = []
    for old, places in groupby(range(start, stop), key=lambda row: old_positions(row - a)):
        rows = list(places)
        found.append(Stretch(rows[0], rows[-1] + 1, old))
    return found


class _Rows:
    """Keeps keys and values of some layers as they are written (an `Onlooker`)."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}

    def watch_prompts(self, lengths: Sequence[int]) -> Watch:
        """See `Onlooker`."""
        return self.watch_nodes

    def watch_nodes(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Keep the rows of a batch of one."""
        if layer in self._kept:
            self._kept[layer].append((k_BGTD[0].transpose(0, 1), v_BGTD[0].transpose(0, 1)))

    def kv(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Layer -> k_TGD, v_TGD of all rows."""
        return {
            layer: (torch.cat([k for k, _ in pieces]), torch.cat([v for _, v in pieces]))
            for layer, pieces in self._kept.items()
        }


def _joined(parts: Sequence[PackedStep], want: Want) -> PackedStep:
    """Documents one after another."""
    hidden = {layer: torch.cat([part.hidden[layer] for part in parts]) for layer in want.hidden}
    kv = {
        layer: (
            torch.cat([part.kv[layer][0] for part in parts]),
            torch.cat([part.kv[layer][1] for part in parts]),
        )
        for layer in want.kv
    }
    return PackedStep(hidden, kv)

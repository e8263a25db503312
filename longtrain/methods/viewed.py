"""The target's pass over a packed row of which some documents are read in a view, as an engine reads them.

Shapes: T tokens of a packed row, E hidden dim, G KV heads, K rows of a head that a cache kept, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtrain.decoding.appended import read_after
from longtrain.decoding.prefill import pad, prefill
from longtrain.methods.target_cache import named_cache
from longtrain.methods.views import Drawn, View, views_of
from longtrain.targets.step import PackedStep, Want

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.data.rows.batch import Batch
    from longtrain.targets.attention import Watch
    from longtrain.targets.model import Target

READ = 1024
"""Most rows behind a prompt that are read at once: attention over an uneven cache needs memory for each."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive rows of a document at which the target's cache has the same old rows.

    For example, a document that is read on an int4 cache has one block of 128 positions quantised while its
    rows 256..383 are decoded, and two blocks while its rows 384..511 are. These are two
    stretches, with `old` 128 and 256.

    Args:
        start: the stretch's first row, counted in the packed row. When a draft's tree has its root at a row
            of the stretch, the rows before the root are in the cache, and the first `old` of them are old.
        stop: one past the stretch's last row.
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
        stretches: from its first row to its last; none where no keys and values are wanted.
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
    for view, documents in _alike(drawn, spans):
        with torch.autocast(target.device.type, enabled=False):  # an engine decodes without it
            found = _read(target, batch.ids_T, [(*spans[d], drawn[d].start) for d in documents], view, want)
        for d, (step, one) in zip(documents, found, strict=True):
            parts[d], seen[d] = step, one
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


def _alike(drawn: Mapping[int, Drawn], spans: Sequence[tuple[int, int]]) -> list[tuple[View, list[int]]]:
    """Documents that are read together: in one view, none twice as long as another."""
    found: dict[tuple[int, int], tuple[View, list[int]]] = {}
    for d, one in drawn.items():
        a, b = spans[d]
        found.setdefault((id(one.view), (b - a).bit_length()), (one.view, []))[1].append(d)
    return list(found.values())


def _read(
    target: Target, ids_T: Tensor, spans: Sequence[tuple[int, int, int]], view: View, want: Want
) -> list[tuple[PackedStep, Seen]]:
    """What the target gives for documents that are read in the same view.

    Args:
        target: the frozen model.
        ids_T: the packed row.
        spans: each document's first row, the one past its last, and the first behind its prompt.
        view: the evictor or the cache that all these documents are read with.
        want: hidden states and K and V that are wanted of every document.
    """
    sizes = [(cut - a, b - cut) for a, b, cut in spans]
    prompts = [ids_T[a:cut].tolist() for a, _, cut in spans]
    rests = [ids_T[cut:b].tolist() for _, b, cut in spans]
    rows = _Rows(want.kv) if want.kv else None
    read = prefill(
        target,
        target.new_cache if view.cache is None else named_cache(view.cache, target),
        prompts,
        max_new_tokens=max(rest for _, rest in sizes),
        nodes=1,
        hidden=want.hidden,
        evictor=view.evictor,
        onlooker=rows,
    )
    then, _ = read_after(
        target,
        read.cache,
        pad(rests, target.device)[0],
        [rest for _, rest in sizes],
        hidden=want.hidden,
        watch=rows.watch_nodes if rows else None,
        most=READ,
    )
    old = {layer: read.cache.old_rows(layer) for layer in want.kv}
    found = []
    for i, ((a, b, cut), (prompt, rest)) in enumerate(zip(spans, sizes, strict=True)):
        hidden = {
            layer: torch.cat((read.step.hidden[layer][i, :prompt], then.hidden[layer][i, :rest]))
            for layer in want.hidden
        }
        kv = rows.kv(i, (prompt, rest)) if rows else {}
        stretches = _stretches(read.cache, i, a, cut, b) if rows else ()
        one = Seen(stretches, {layer: sequences[i] for layer, sequences in old.items()})
        found.append((PackedStep(hidden, kv), one))
    return found


def _stretches(cache: KVCache, sequence: int, start: int, cut: int, stop: int) -> tuple[Stretch, ...]:
    """The stretches of a document whose rows start..stop lie in a cache, those up to `cut` as its prompt."""
    found = [Stretch(start, cut)]
    for old, places in groupby(range(cut, stop), key=lambda row: cache.old_positions(row - start, sequence)):
        rows = list(places)
        found.append(Stretch(rows[0], rows[-1] + 1, old))
    return tuple(found)


class _Rows:
    """Keeps keys and values of some layers as they are written (an `Onlooker`)."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}

    def watch_prompts(self, lengths: Sequence[int]) -> Watch:
        """See `Onlooker`."""
        return self.watch_nodes

    def watch_nodes(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Keep the rows: first the prompts', then what is read after them."""
        if layer in self._kept:
            self._kept[layer].append((k_BGTD, v_BGTD))

    def kv(self, sequence: int, sizes: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """Layer -> k_TGD, v_TGD of a sequence, whose prompt and what comes after have these sizes."""
        found = {}
        for layer, pieces in self._kept.items():
            k, v = (
                torch.cat([piece[i][sequence, :, :n] for piece, n in zip(pieces, sizes, strict=True)], 1)
                for i in (0, 1)
            )
            found[layer] = k.transpose(0, 1), v.transpose(0, 1)
        return found


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

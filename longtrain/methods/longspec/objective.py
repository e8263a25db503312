"""The LongSpec training objective: the draft against the target (or the data) on packed sequences, in chunks.

Shapes: T tokens of a packed sequence, W positions that predict a label, J depths, E hidden dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.chunked import chunked_sum
from longtrain.data.packing import packed_sequences
from longtrain.losses import (
    IGNORE,
    TopTokens,
    fused_linear_ce,
    fused_linear_kl,
    fused_linear_top_kl,
    greedy_hits,
)
from longtrain.methods.longspec import indices
from longtrain.methods.longspec.config import source_layer
from longtrain.methods.offsets import check_offsets, offsets_of
from longtrain.methods.spec import Loss, Objective
from longtrain.targets.step import OutputRequest

if TYPE_CHECKING:
    from longtrain.data.packing.batch import Batch
    from longtrain.methods.longspec.config import Config
    from longtrain.methods.longspec.modules import LongSpecDraft
    from longtrain.targets.model import Target
    from longtrain.targets.step import PackedStep


@dataclass(frozen=True)
class _DraftRow:
    """A batch with its drawn shifts and positions, and the target's outputs for it."""

    batch: Batch
    pos_T: Tensor
    shifts: Sequence[int]
    depth_T: Tensor
    rows_W: Tensor
    chunks: Sequence[tuple[int, int]]
    step: PackedStep


class LongSpecObjective(Objective):
    """KL to the target's distribution (or cross-entropy to the data) under flash noisy shifts.

    Validation draws shifts and offsets as training does, from each batch's seed; only the guard is left out.

    Args:
        module: the draft.
        target: the frozen target.
        config: hyperparameters.

    Raises:
        ConfigError: offsets beyond the target's context.

    Source: LongSpec §3.2.
    Note: the paper trains on hard labels; KL is this project's default (it needs the target's hidden states,
        but no stored logits).
    """

    module: LongSpecDraft
    target: Target
    reads_top_tokens = True

    def __init__(self, module: LongSpecDraft, target: Target, config: Config) -> None:
        super().__init__()
        self.module, self.target, self.config = module, target, config
        self.asks_target = config.anchor_offset and config.guard_every > 0
        self.kv_layer = source_layer(config, target.info)
        check_offsets(config, target.info)

    def forward(self, batch: Batch) -> Loss:
        """Return the loss summed over labels; metrics `loss`, `accuracy`, `acc/depth_j`, offset guard."""
        row = self._read(batch)
        device, depths = batch.ids_T.device, self.config.max_depth if self.config.flash_noisy else 1
        hits_J = torch.zeros(depths, device=device)

        def chunk_loss(i: int) -> Tensor:
            a, b = row.chunks[i]
            # the labelled positions within this chunk
            first, last = torch.searchsorted(row.rows_W, torch.tensor([a, b])).tolist()
            rows_W = row.rows_W[first:last]
            hidden_WE = self._draft(row, a, b)
            rows: slice | Tensor = slice(a, b)
            if len(rows_W) < b - a:
                rows = packed_sequences.to_device(rows_W, device)
                hidden_WE = hidden_WE[rows - a]
            loss, hit_W = self._loss(row, hidden_WE, rows)
            hits_J.index_add_(0, packed_sequences.to_device(row.depth_T[rows_W], device), hit_W.float())
            return loss

        if self.config.chunk_tokens or not row.chunks:
            total = chunked_sum(chunk_loss, len(row.chunks), self.module.parameters())
        else:
            total = sum((chunk_loss(i) for i in range(len(row.chunks))), start=torch.zeros((), device=device))
        count_J = packed_sequences.to_device(
            torch.bincount(row.depth_T[row.rows_W], minlength=depths), device
        )
        tokens = len(row.rows_W)
        count = torch.full((), tokens, device=device)
        metrics = {"loss": (total.detach(), count), "accuracy": (hits_J.sum(), count)}
        metrics |= {f"acc/depth_{j}": (hits_J[j], count_J[j]) for j in range(depths)}
        if self.training and self.asks_target:
            metrics["guard/target_ce_delta"] = self._guard(row)
        return Loss(total, tokens, metrics)

    def _read(self, batch: Batch) -> _DraftRow:
        """Draw shifts and offsets, and run the target over the packed sequence."""
        c, device = self.config, batch.ids_T.device
        lengths = [b - a for a, b in pairwise(batch.bounds)]
        offsets = offsets_of(c, self.target.info, batch)
        weights = list(c.shift_weights) or [1.0] * c.max_depth
        shifts = indices.draw_shifts(
            len(lengths), weights=weights if c.flash_noisy else [1.0], seed=batch.seed
        )
        pos_T = packed_sequences.positions(batch.bounds, offsets=offsets, anchors=c.anchors)
        pos_T = packed_sequences.to_device(pos_T, device)
        mask_T = batch.host_labels
        rows_W = mask_T.nonzero()[:, 0] - 1  # a label is predicted at the position before it
        depth_T = torch.tensor(shifts).repeat_interleave(torch.tensor(lengths)) - 1
        ranges = packed_sequences.cut(rows_W, c.chunk_tokens)
        return _DraftRow(batch, pos_T, shifts, depth_T, rows_W, ranges, self._target(batch, pos_T))

    def _target(self, batch: Batch, pos_T: Tensor) -> PackedStep:
        kl, layer = self.config.objective == "kl", self.kv_layer
        outputs = OutputRequest("none", (-1,) if kl else (), None if kl else layer, kv=(layer,))
        return self.target.packed(batch.ids_T, pos_T, batch.bounds, outputs)

    def _draft(self, row: _DraftRow, start: int, stop: int) -> Tensor:
        """Return the draft's LM-head input for positions start..stop."""
        bounds, layer = row.batch.bounds, self.kv_layer
        chunk = indices.make_chunk(bounds, row.shifts, start, stop, window=self.module.window)
        part = slice(chunk.halo, stop)
        with torch.no_grad():
            embed_RE = self.target.embed(row.batch.ids_T[part])
            cos_BRD, sin_BRD = self.target.rope(row.pos_T[None, part])
        return self.module(embed_RE, (cos_BRD[0], sin_BRD[0]), row.step.kv[layer], chunk)

    def _loss(self, row: _DraftRow, hidden_WE: Tensor, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed loss of these positions, and where the draft's argmax is right."""
        head_VE, weights = self.target.head_weight, row.batch.weights_T
        after = slice(rows.start + 1, rows.stop + 1) if isinstance(rows, slice) else rows + 1
        weights_W = None if weights is None else weights[after]
        if -1 in row.step.hidden:
            return fused_linear_kl(hidden_WE, row.step.hidden[-1][rows], head_VE, weights_T=weights_W)
        if row.step.top is not None:
            top = TopTokens(*(part[rows] for part in row.step.top))
            return fused_linear_top_kl(hidden_WE, top, head_VE, weights_T=weights_W)
        labels_W = row.batch.ids_T[after]
        loss = fused_linear_ce(hidden_WE, head_VE, labels_W, weights_T=weights_W)
        return loss, greedy_hits(hidden_WE.detach(), head_VE, labels_W)

    @torch.no_grad()
    def _guard(self, row: _DraftRow) -> tuple[Tensor, Tensor]:
        """Measure how much offset positions raise the target's own loss: (sum over labels, labels).

        The batches on which it is measured depend on their seeds, so a resumed run reports the same values.

        Source: LongSpec §3.2: about +0.001 nats.
        """
        batch, device = row.batch, row.batch.ids_T.device
        if batch.seed % self.config.guard_every:
            return torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)
        labels_T = torch.full_like(batch.ids_T, IGNORE)
        rows = row.rows_W.to(device)
        labels_T[rows] = batch.ids_T[rows + 1]
        vanilla_T = packed_sequences.positions(batch.bounds).to(device)
        sums = []
        for pos_T in (row.pos_T, vanilla_T):
            hidden_TE = self.target.packed(batch.ids_T, pos_T, batch.bounds).hidden[-1]
            sums.append(fused_linear_ce(hidden_TE, self.target.head_weight, labels_T))
        return sums[0] - sums[1], torch.full((), len(rows), device=device)

"""The EAGLE-3 training objective: the draft against the target over the training-time test, in chunks.

Shapes: T tokens of a packed sequence, S positions from the first document with a label to the last position
that predicts one, R positions of a chunk, J depths, W labels that a chunk predicts, E hidden dim, G KV heads,
D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from longtrain.chunked import SharedRows, chunked_sum
from longtrain.data.packing import packed_sequences
from longtrain.data.packing.packed_sequences import OwnSegments
from longtrain.kernels.attention.own_keys import OwnKey, own_keys_attention
from longtrain.layers import cast_to
from longtrain.losses.draft import DraftTeacher, fused_draft_loss
from longtrain.methods.eagle3.rows import Labels, labels_of, survivors
from longtrain.methods.offsets import check_offsets, offsets_of
from longtrain.methods.rope import ModuleRope
from longtrain.methods.spec import Loss, Objective
from longtrain.targets.step import OutputRequest

if TYPE_CHECKING:
    from longtrain.data.packing.batch import Batch
    from longtrain.methods.eagle3.config import Config
    from longtrain.methods.eagle3.modules import Eagle3Draft
    from longtrain.targets.model import Target


@dataclass(frozen=True)
class _TestedRow:
    """A batch with its positions, labels and the target's hidden states.

    `ids` and `rope` extend past the sequence's end, padded with token and position 0, for depths that predict
    nothing. `embeds` are the target's embeddings of `ids`; None if the draft has its own. Positions
    `low..high` are those whose keys and values are shared by all chunks.
    """

    batch: Batch
    ids: Tensor
    embeds: Tensor | None
    rope: tuple[Tensor, Tensor]
    labels: Labels
    hidden: Mapping[int, Tensor]
    low: int
    high: int


class Eagle3Objective(Objective):
    """Divergence between the draft's and the target's distributions at every depth of the training-time test.

    Position i of a document takes the feature of token i and the embedding of token i + 1, and predicts token
    i + 2. At depth k its feature is the output of the previous depth at the same position, its embedding is
    that of token i + 1 + k of the data, its rotary position is that of token i + k, and it predicts token
    i + 2 + k if that is a label of its document. Of the first depth's keys it sees those up to position i,
    and of later depths' keys only its own. A window moves with the depth, as in engines: at depth k it begins
    at position i + k - window.

    A label counts once, however many depths predict it: its loss is the sum over the depths of
    `depth_decay ** k` times the loss there, the scale of the authors' code. The sum over a batch is divided
    by its labels; the second token of a document is a label that no position predicts and counts all the
    same.

    Args:
        module: the draft.
        target: the frozen target.
        config: hyperparameters.

    Raises:
        ConfigError: offsets beyond the target's context.

    Source: EAGLE-3 §3.2 and the authors' code for the indices.
    Note: the authors mask by the token that is read and average over all positions; here a position counts if
        the predicted token is a label. The package speculators makes one mask by positions for all depths, so
        a window that it trains with does not move along; engines move it.
    """

    module: Eagle3Draft
    target: Target
    outputs: OutputRequest

    def __init__(self, module: Eagle3Draft, target: Target, config: Config) -> None:
        super().__init__()
        self.module, self.target, self.config = module, target, config
        self.rope = ModuleRope(config, target)
        check_offsets(config, target.info)
        self.outputs = OutputRequest("none", hidden=(*module.layers, -1))

    def forward(self, batch: Batch) -> Loss:
        """Return the loss summed over labels; metrics `loss`, `accuracy` (all depths), `acc/depth_k`, `tau`.

        `acc/depth_k` is the share of correct predictions at depth k among positions correct at all earlier
        depths. `tau` is the mean, over positions that predict a label at depth 0, of 1 (the target's own
        token) plus the number of depths before the first wrong one. It is a little low: a position near its
        document's end has no labels at its later depths, and these add nothing. For example, a position with
        a label at depth 0 alone, which it predicts correctly, counts 2, whatever `depths` is.
        """
        row = self._read(batch)
        device, depths, chunk = batch.ids_T.device, self.config.depths, self.config.chunk_tokens
        counts = torch.zeros(2, depths, dtype=torch.int64, device=device)
        rights = torch.zeros(2, dtype=torch.int64, device=device)

        def step(i: int, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
            return self._chunk(row, *row.labels.ranges[i], (k_SGD, v_SGD), counts, rights)

        # Edges of the blocks in which keys and values of the first depth are computed for all chunks.
        blocks = [*range(row.low, row.high, chunk or max(row.high, 1)), row.high]
        shared = SharedRows(lambda b: self._keys_values(row, *blocks[b : b + 2]), len(blocks) - 1)
        if not row.labels.ranges or len(blocks) > 2:
            total = chunked_sum(step, len(row.labels.ranges), self.module.parameters(), shared=shared)
        else:
            total = step(0, *shared.joined())
        tokens = len(row.labels.token_Y)
        labels, (right, asked) = torch.full((), tokens, device=device), rights
        metrics = {"loss": (total.detach(), labels), "accuracy": (right, asked)}
        metrics |= {f"acc/depth_{k}": (counts[0, k], counts[1, k]) for k in range(depths)}
        metrics["tau"] = (counts[0].sum() + counts[1, 0], counts[1, 0])
        return Loss(total, tokens, metrics)

    @torch.no_grad()
    def _read(self, batch: Batch) -> _TestedRow:
        """Draw offsets, find the labels and run the target over the packed sequence."""
        c, device = self.config, batch.ids_T.device
        offsets = offsets_of(c, self.target.info, batch)
        pos_T = packed_sequences.positions(batch.bounds, offsets=offsets, anchors=c.anchors)
        pos_T = packed_sequences.to_device(pos_T, device)
        mask_T = batch.host_labels
        labels = labels_of(mask_T, batch.bounds, depths=c.depths, chunk_tokens=c.chunk_tokens)
        low = high = 0
        if labels.ranges:
            low = max(a for a in batch.bounds if a <= labels.ranges[0][0])
            high = labels.ranges[-1][1]
        step = self.target.packed(batch.ids_T, pos_T, batch.bounds, self.outputs)
        after = (0, c.depths + 1)
        ids = pad(batch.ids_T, after)
        embeds = (
            cast_to(self.module.fc.weight, self.target.embed(ids))
            if self.module.embed_tokens is None
            else None
        )
        rope = self.rope(pad(pos_T, after))
        return _TestedRow(batch, ids, embeds, rope, labels, step.hidden, low, high)

    def _chunk(
        self,
        row: _TestedRow,
        start: int,
        stop: int,
        shared: tuple[Tensor, Tensor],
        counts: Tensor,
        rights: Tensor,
    ) -> Tensor:
        """Return the summed loss of positions start..stop; add correct predictions to `counts`, `rights`."""
        device, depths = row.ids.device, self.config.depths
        token_W, row_JW = row.labels.predicted(start, stop, device)
        decay = [self.config.depth_decay**depth for depth in range(depths)]
        weight_J1 = packed_sequences.to_device(torch.tensor(decay, dtype=torch.float64), device)[:, None]
        weight_JW = weight_J1.expand(row_JW.shape)
        if row.batch.weights_T is not None:
            weight_JW = weight_JW * row.batch.weights_T[token_W]
        teacher = DraftTeacher(row.hidden[-1][token_W - 1], self.target.head_weight, self.module.draft_ids_K)
        loss, hit_JW = fused_draft_loss(
            self._passes(row, start, stop, *shared),
            self.module.lm_head.weight,
            teacher,
            row_JW,
            weight_JW,
            objective=self.config.objective,
            kl_decay=self.config.kl_decay,
        )
        asked_JW = row_JW >= 0
        # Hits and labels by depth and position. Depths without a label scatter into the extra last column,
        # which is cut off below.
        by_row = torch.zeros(2, depths, stop - start + 1, dtype=torch.bool, device=device)
        by_row.scatter_(
            2, row_JW.where(asked_JW, stop - start).expand(2, -1, -1), torch.stack((hit_JW, asked_JW))
        )
        counts += torch.stack(survivors(*by_row[..., :-1]))
        rights += torch.stack((hit_JW.sum(), asked_JW.sum()))
        return loss

    def _passes(self, row: _TestedRow, start: int, stop: int, k_SGD: Tensor, v_SGD: Tensor) -> list[Tensor]:
        """Return the LM head's input of positions start..stop, one tensor for each depth."""
        module, attention, window = self.module, self.module.self_attn, self.config.window
        own = packed_sequences.own_segments(row.batch.bounds, start, stop, window=window or None)
        keys = slice(own.halo - row.low, stop - row.low)
        k_CGD, v_CGD = k_SGD[keys], v_SGD[keys]
        sinks = _Sinks(row, start, own, self.config, (k_SGD, v_SGD))
        feature = module.feature(
            [cast_to(self.module.fc.weight, row.hidden[layer][start:stop]) for layer in module.layers]
        )
        chain: list[OwnKey] = []
        found = []
        for depth in range(self.config.depths):
            rope = _rows(row.rope, start + depth, stop + depth)
            entry, residual = module.enter(self._embed(row, start + depth, stop + depth), feature)
            # depth 0's keys are in k_CGD; each later depth adds one key per position, which only that
            # position sees
            if depth:
                chain.append(OwnKey(*attention.keys_values(entry, rope)))
            mixed = own_keys_attention(
                attention.query(entry, rope),
                k_CGD,
                v_CGD,
                own.queries,
                own.keys,
                [*sinks.keys(depth), *chain],
                scale=module.scale,
                window=window - depth if window else None,
            )
            out, feature = module.after_attention(residual, mixed)
            found.append(out)
        return found

    def _keys_values(self, row: _TestedRow, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the first depth's keys and values of positions start..stop, each [stop - start, G, D]."""
        feature = self.module.feature(
            [cast_to(self.module.fc.weight, row.hidden[layer][start:stop]) for layer in self.module.layers]
        )
        entry, _ = self.module.enter(self._embed(row, start, stop), feature)
        return self.module.self_attn.keys_values(entry, _rows(row.rope, start, stop))

    def _embed(self, row: _TestedRow, start: int, stop: int) -> Tensor:
        """Return the embeddings of the tokens after positions start..stop."""
        if self.module.embed_tokens is not None:
            return self.module.embed_tokens(row.ids[start + 1 : stop + 1])
        assert row.embeds is not None
        return row.embeds[start + 1 : stop + 1]


def _rows(rope: tuple[Tensor, Tensor], start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions start..stop."""
    cos, sin = rope
    return cos[start:stop], sin[start:stop]


class _Sinks:
    """The first tokens of each document (sinks), as extra keys for positions whose window has passed them."""

    def __init__(
        self,
        row: _TestedRow,
        start: int,
        own: OwnSegments,
        config: Config,
        shared: tuple[Tensor, Tensor],
    ) -> None:
        self.window = config.window
        self.made: list[list[Tensor]] = []
        spans = [(start + a, start + b) for a, b in pairwise(own.queries)]
        firsts = [max(edge for edge in row.batch.bounds if edge <= a) for a, _ in spans]
        far = max(b - 1 - first for (_, b), first in zip(spans, firsts, strict=True))
        if not config.sinks or far + config.depths - 1 <= config.window:
            return
        within = [torch.arange(a - first, b - first) for (a, b), first in zip(spans, firsts, strict=True)]
        device = row.ids.device
        self.within_R = packed_sequences.to_device(torch.cat(within), device)
        self.number_S1 = torch.arange(config.sinks, device=device)[:, None]
        last = spans[-1][1] - 1
        places = torch.tensor([[min(first + s, last) for s in range(config.sinks)] for first in firsts])
        places = packed_sequences.to_device(places - row.low, device)
        picked = [x_SGD[places] for x_SGD in shared]
        for s in range(config.sinks):
            parts = [[x[d, s].expand(b - a, -1, -1) for d, (a, b) in enumerate(spans)] for x in picked]
            self.made.append([torch.cat(some) for some in parts])

    def keys(self, depth: int) -> list[OwnKey]:
        """Return the sinks as keys of each position at a depth."""
        if not self.made:
            return []
        seen_SR = self.within_R + (depth - self.window) > self.number_S1
        return [OwnKey(k, v, seen_R) for (k, v), seen_R in zip(self.made, seen_SR, strict=True)]

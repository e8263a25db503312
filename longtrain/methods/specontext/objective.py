"""What the retrieval head learns: where the target's attention goes beyond what is read in any case.

Shapes: T tokens of a packed row, S rows of a document, R query rows, X sets, L layers, H query heads, G KV
heads, D head dim, E hidden dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.chunked import SharedRows, chunked_sum
from longtrain.data.rows import packed_rows
from longtrain.methods.rope import rope_of
from longtrain.methods.spec import Loss, Objective
from longtrain.methods.specontext.config import BLOCK_BYTES, KEY_ROWS
from longtrain.methods.specontext.modules import RetrievalHead, log_scores
from longtrain.methods.specontext.rows import Queries, draw, far
from longtrain.methods.specontext.teacher import Teacher, share_held, soft_share
from longtrain.targets.step import Want

if TYPE_CHECKING:
    from longtrain.data.rows.batch import Batch
    from longtrain.methods.specontext.config import Config
    from longtrain.targets.model import Target

FIGURES = ("recall", "recall_oracle", "recall_window")


@dataclass
class _Row:
    """A batch and what the target said about it."""

    batch: Batch
    hidden: dict[int, Tensor]
    queries: list[Queries]
    k_LGTD: dict[int, Tensor] = field(default_factory=dict)
    q_LHRD: dict[int, Tensor] = field(default_factory=dict)


class RetrievalObjective(Objective):
    """KL of the head's weights from the target's attention, sampled query rows, sets and KV heads.

    The teacher of a set is the mean over the layers' KV heads that read it: the target's attention of the
    query row, without the rows that are read in any case, made to sum to one, the highest (or mean) of a KV
    head's query heads. The student are the scores that choose, over the same rows. A document's loss is the
    mean over its query rows and over sets, times its labels.

    Args:
        module: the head.
        target: frozen.
        config: hyperparameters.

    Note: the paper trains nothing. KL to a mean over layers differs from the mean of KLs by what does not
        depend on the head.
    """

    module: RetrievalHead
    target: Target

    def __init__(self, module: RetrievalHead, target: Target, config: Config) -> None:
        super().__init__()
        self.module, self.target, self.config = module, target, config
        self.rope = rope_of(config, target)

    def forward(self, batch: Batch) -> Loss:
        """The sum over documents.

        Figures: `loss`; `recall`, the share of the far attention in the head's sets of `recall_rows` rows;
        `recall_oracle`, that in the teacher's own sets; `recall_window`, that in the last rows.
        """
        row = self._read(batch)
        tokens = sum(one.labels for one in row.queries)
        device, T = batch.ids_T.device, len(batch.ids_T)
        sums = torch.zeros(len(FIGURES) + 1, dtype=torch.float64, device=device)
        blocks = self._blocks(row.queries)

        def step(i: int, k_TGD: Tensor) -> Tensor:
            doc, start, stop = blocks[i]
            return self._block(row, doc, start, stop, k_TGD, sums)

        edges = [*range(0, T, KEY_ROWS), T]
        shared = SharedRows(lambda b: (self._keys(row, *edges[b : b + 2]),), len(edges) - 1)
        total = chunked_sum(step, len(blocks), self.module.parameters(), shared=shared)
        if self.module.training and self.config.mapping == "calibrated":
            self.module.remap()
        *held, rows = sums
        figures = {"loss": (total.detach(), torch.full((), tokens, device=device))}
        figures |= {name: (value, rows) for name, value in zip(FIGURES, held, strict=True)}
        labels = int((batch.loss_mask_T if batch.host_mask_T is None else batch.host_mask_T).sum())
        return Loss(total, labels, figures)

    @torch.no_grad()
    def _read(self, batch: Batch) -> _Row:
        """Draw query rows and run the target over the packed row, keeping its keys and those queries."""
        row = _Row(batch, {}, draw(self.config, batch))
        at_R = torch.cat([one.start + one.at_R for one in row.queries] or [torch.zeros(0).long()])
        at_R = at_R.to(batch.ids_T.device, non_blocking=True)

        def watch(layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
            row.q_LHRD[layer], row.k_LGTD[layer] = q_BHTD[0][:, at_R], k_BGTD[0]

        pos_T = packed_rows.positions(batch.bounds).to(batch.ids_T.device, non_blocking=True)
        want = Want("none", hidden=self.module.hidden)
        row.hidden = self.target.packed(batch.ids_T, pos_T, batch.bounds, want, watch=watch).hidden
        return row

    def _blocks(self, queries: list[Queries]) -> list[tuple[int, int, int]]:
        """(document, first query row, end) of blocks whose scores have a bounded size."""
        heads = self.module.sets * self.module.heads[0]
        found = []
        for doc, one in enumerate(queries):
            size = max(1, BLOCK_BYTES // (4 * heads * (one.stop - one.start)))
            rows = len(one.at_R)
            found += [(doc, at, min(at + size, rows)) for at in range(0, rows, size)]
        return found

    def _block(self, row: _Row, doc: int, start: int, stop: int, k_TGD: Tensor, sums: Tensor) -> Tensor:
        """The loss of some query rows of a document."""
        one, config, head = row.queries[doc], self.config, self.module
        device = k_TGD.device
        at_R = one.at_R[start:stop].to(device, non_blocking=True)
        before = sum(len(other.at_R) for other in row.queries[:doc])
        slot_S = torch.arange(one.stop - one.start, device=device)
        past_RS, far_RS = slot_S < at_R[:, None], far(config, at_R, one.stop - one.start)
        teacher = Teacher(
            {layer: q_HRD[:, before + start : before + stop] for layer, q_HRD in row.q_LHRD.items()},
            {layer: k_GTD[:, one.start : one.stop] for layer, k_GTD in row.k_LGTD.items()},
            at_R,
            far_RS,
            mean=config.pool == "mean",
        )
        mass_XRS, members_X = teacher.sets(head.table_LG, head.n_sets)
        entry = self._entry(row, one.start + at_R)
        q_RHD = head.query(entry, self.rope(at_R))
        k_SGD = k_TGD[one.start : one.stop]
        if config.row == "feature":  # the row after, which holds this token's feature
            k_SGD, past_RS = torch.cat((k_SGD[1:], k_SGD[:1])), slot_S < at_R[:, None] - 1
        score_XRS = log_scores(head, q_RHD, k_SGD, past_RS)
        law_XRS = score_XRS.masked_fill(~far_RS, -torch.inf).log_softmax(-1)
        cross_XR = -(mass_XRS * law_XRS.masked_fill(~far_RS, 0.0)).sum(-1)
        own_XR = -torch.special.entr(mass_XRS).sum(-1)
        loss_XR = cross_XR + own_XR
        budget = config.recall_rows - config.sinks - config.window
        if config.recall_weight:
            loss_XR = loss_XR + config.recall_weight * (1 - soft_share(mass_XRS, law_XRS, far_RS, budget))
        used_X = members_X > 0
        with torch.no_grad():
            chosen = law_XRS[used_X]
            latest = slot_S.to(chosen.dtype).expand_as(chosen).masked_fill(~far_RS, -torch.inf)
            for i, order in enumerate((chosen, mass_XRS[used_X].masked_fill(~far_RS, -1.0), latest)):
                sums[i] += share_held(mass_XRS[used_X], order, budget).mean(0).sum()
            sums[-1] += len(at_R)
            if head.training and config.mapping == "calibrated":
                teacher.testify(law_XRS, budget, head.evidence_LGX)
        weight = one.labels / len(one.at_R)
        return weight * loss_XR[used_X].mean(0).sum()

    def _keys(self, row: _Row, start: int, stop: int) -> Tensor:
        """The head's keys of packed rows start..stop, [stop - start, G or X * G, D]."""
        at_R = torch.arange(start, stop, device=row.batch.ids_T.device)
        pos_T = packed_rows.positions(row.batch.bounds).to(at_R.device, non_blocking=True)
        return self.module.key(self._entry(row, at_R), self.rope(pos_T[at_R]))

    def _entry(self, row: _Row, at_R: Tensor) -> Tensor:
        """What queries and keys of some packed rows are projected from."""
        bounds = torch.tensor(row.batch.bounds, device=at_R.device)
        first_R = bounds[torch.searchsorted(bounds, at_R, right=True) - 1]
        head, ids_T = self.module, row.batch.ids_T
        if head.mix is not None:
            back_W = torch.arange(len(head.mix) - 1, -1, -1, device=at_R.device)
            place_RW = at_R[:, None] - back_W
            inside = place_RW >= first_R[:, None]
            embed = self._mine(self.target.embed(ids_T[place_RW.clamp(min=0)]))
            return head.entry(embed * inside[..., None], ())
        embed = self._mine(self.target.embed(ids_T[at_R]))
        begun_R1 = (at_R > first_R)[:, None]
        states = [row.hidden[layer][(at_R - 1).clamp(min=0)] * begun_R1 for layer in head.hidden]
        return head.entry(embed, [self._mine(state) for state in states])

    def _mine(self, x: Tensor) -> Tensor:
        """What the target gave in the module's dtype, where autocast does not see to it."""
        return x if torch.is_autocast_enabled(x.device.type) else x.to(self.module.q_proj.weight.dtype)

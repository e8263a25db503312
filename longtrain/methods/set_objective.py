"""Training objective of modules that select KV entries: match the target's attention beyond sinks and window.

Shapes: T tokens of a packed sequence, S tokens of a document, R queries, X sets, L layers, H query heads, G
KV heads, D head dim, E hidden dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from longtrain.chunked import SharedRows, chunked_sum
from longtrain.data.packing import packed_sequences
from longtrain.kernels.entry_scores.reference import log_scores
from longtrain.log import get_logger
from longtrain.methods.attention_teacher import Teacher, share_held, soft_share
from longtrain.methods.set_learning import BLOCK_BYTES, KEY_ROWS
from longtrain.methods.spec import Loss, Objective
from longtrain.targets.step import OutputRequest

if TYPE_CHECKING:
    from longtrain.data.packing.batch import Batch
    from longtrain.methods.set_learning import SetLearning
    from longtrain.targets.model import Target

log = get_logger(__name__)

METRICS = ("recall", "recall_oracle", "recall_window")
LEAST = 4
"""Smallest position of a query within its document."""


class SetScorer(nn.Module):
    """Base of modules whose queries and keys score KV entries (`log_scores`)."""

    sets: int
    """Number of groups of layers, each with sets of its own."""
    heads: tuple[int, int]
    """Query heads and KV heads of such a group."""
    table_LG: Tensor
    """The set that each KV head of the target reads."""

    @property
    def n_sets(self) -> int:
        """Number of sets of a sequence: one per KV head and group of layers."""
        return self.sets * self.heads[1]


@dataclass(frozen=True)
class Queries:
    """Sampled query positions of one document.

    Args:
        start: start of the document in the packed sequence.
        stop: its end.
        at_R: positions, counted from `start`, ascending, int64 on the host.
        labels: labels of the document, the weight of the mean over its queries.
    """

    start: int
    stop: int
    at_R: Tensor
    labels: int


@dataclass
class ReadRow:
    """A batch and the target's outputs for it.

    `q_LHRD` are its queries at the sampled positions of all documents, one document after another.
    """

    batch: Batch
    hidden: dict[int, Tensor]
    queries: list[Queries]
    k_LGTD: dict[int, Tensor] = field(default_factory=dict)
    q_LHRD: dict[int, Tensor] = field(default_factory=dict)


class SetObjective(Objective):
    """KL from the target's attention to a module's weights, over sampled queries, sets and KV heads.

    The teacher of a set is the mean over the layers' KV heads that read it (of layers that see the whole
    text): the target's attention of the
    query, without the entries that are always read, the maximum (or mean) over a KV head's query heads.
    The student's scores are those that select, over the same entries. A query counts as much as the attention
    that its teacher has, or with `by_mass=False` all alike. A document's loss is the mean over its queries
    and over sets, times its labels. Subclasses define the inputs of queries and keys.

    Args:
        module: scores KV entries.
        target: the frozen target.
        config: hyperparameters.

    Note: KL to a mean over layers differs from the mean of KLs by a term that does not depend on the module.
    """

    module: SetScorer
    target: Target
    hidden: tuple[int, ...] = ()
    """Hidden states of the target that are needed."""
    key_offset = 0
    """Token s of the target is scored by the key of token s + `key_offset`."""

    def __init__(self, module: SetScorer, target: Target, config: SetLearning) -> None:
        super().__init__()
        self.module, self.target, self.learning = module, target, config
        self._warned = False

    def queries(self, row: ReadRow, at_R: Tensor, drawn: slice) -> Tensor:
        """Return the module's queries q_RHD, [R, X * H, D].

        Args:
            row: the target's outputs.
            at_R: positions of the queries in the packed sequence.
            drawn: their range among the sampled queries.
        """
        raise NotImplementedError

    def keys(self, row: ReadRow, start: int, stop: int) -> Tensor:
        """Return the module's keys of tokens start..stop, [stop - start, G or X * G, D]."""
        raise NotImplementedError

    def learned(self, teacher: Teacher, probs_XRS: Tensor, rows: int) -> None:
        """Hook, called in training with a block's log-weights of far entries, and their budget."""

    def forward(self, batch: Batch) -> Loss:
        """Return the sum over documents.

        Metrics: `loss`; `recall`, the share of the teacher's attention that the module's sets of
        `recall_entries` entries cover; `recall_oracle`, the share that the teacher's own sets cover;
        `recall_window`, the share of the last tokens.
        """
        row = self._read(batch)
        if not row.queries and not self._warned:
            self._warned = True
            log.warning(
                "nothing is learned from the sequence of %s, nor from similar ones: its documents have fewer "
                "than %d tokens, or no label behind their first quarter (their first %d if they are long)",
                ", ".join(batch.names[:4]) or "a batch",
                4 * LEAST, 2 * (self.learning.sinks + self.learning.window),
            )  # fmt: skip
        tokens = sum(one.labels for one in row.queries)
        device, T = batch.ids_T.device, len(batch.ids_T)
        sums = torch.zeros(len(METRICS) + 1, dtype=torch.float64, device=device)
        blocks = self._blocks(row.queries)

        def step(i: int, k_TGD: Tensor) -> Tensor:
            doc, start, stop = blocks[i]
            return self._block(row, doc, start, stop, k_TGD, sums)

        edges = [*range(0, T, KEY_ROWS), T]
        shared = SharedRows(lambda b: (self.keys(row, *edges[b : b + 2]),), len(edges) - 1)
        total = chunked_sum(step, len(blocks), self.module.parameters(), shared=shared)
        *held, rows = sums
        metrics = {"loss": (total.detach(), torch.full((), tokens, device=device))}
        metrics |= {name: (value, rows) for name, value in zip(METRICS, held, strict=True)}
        labels = int(batch.host_labels.sum())
        return Loss(total, labels, metrics)

    @torch.no_grad()
    def _read(self, batch: Batch) -> ReadRow:
        """Draw queries and run the target over the packed sequence, recording its keys and those queries."""
        row = ReadRow(batch, {}, draw(self.learning, batch))
        at_R = torch.cat([one.start + one.at_R for one in row.queries] or [torch.zeros(0).long()])
        at_R = at_R.to(batch.ids_T.device, non_blocking=True)

        def hook(layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
            if layer in self.target.info.full_layers:
                row.q_LHRD[layer], row.k_LGTD[layer] = q_BHTD[0][:, at_R], k_BGTD[0]

        pos_T = packed_sequences.positions(batch.bounds).to(batch.ids_T.device, non_blocking=True)
        outputs = OutputRequest("none", hidden=self.hidden)
        row.hidden = self.target.packed(batch.ids_T, pos_T, batch.bounds, outputs, hook=hook).hidden
        return row

    def _blocks(self, queries: list[Queries]) -> list[tuple[int, int, int]]:
        """Return (document, first query, end) of blocks whose scores have a bounded size."""
        heads = self.module.sets * self.module.heads[0]
        found = []
        for doc, one in enumerate(queries):
            size = max(1, BLOCK_BYTES // (4 * heads * (one.stop - one.start)))
            rows = len(one.at_R)
            found += [(doc, at, min(at + size, rows)) for at in range(0, rows, size)]
        return found

    def _block(self, row: ReadRow, doc: int, start: int, stop: int, k_TGD: Tensor, sums: Tensor) -> Tensor:
        """Return the loss of some queries of a document."""
        one, config, module = row.queries[doc], self.learning, self.module
        device = k_TGD.device
        at_R = one.at_R[start:stop].to(device, non_blocking=True)
        before = sum(len(other.at_R) for other in row.queries[:doc])
        drawn = slice(before + start, before + stop)
        slot_S = torch.arange(one.stop - one.start, device=device)
        past_RS, far_RS = slot_S < at_R[:, None], far(config, at_R, one.stop - one.start)
        teacher = Teacher(
            {layer: q_HRD[:, drawn] for layer, q_HRD in row.q_LHRD.items()},
            {layer: k_GTD[:, one.start : one.stop] for layer, k_GTD in row.k_LGTD.items()},
            at_R,
            far_RS,
            mean=config.pool == "mean",
            by_mass=config.by_mass,
            scale=self.target.scaling(0),
        )
        mass_XRS, members_X = teacher.sets(module.table_LG, module.n_sets)
        q_RHD = self.queries(row, one.start + at_R, drawn)
        # the key of token s + key_offset moves to index s
        k_SGD = k_TGD[one.start : one.stop].roll(-self.key_offset, 0)
        past_RS = slot_S < at_R[:, None] - self.key_offset
        # student: the module's scores of far keys, normalised over them
        score_XRS = log_scores(
            q_RHD, k_SGD, past_RS, sets=module.sets, groups=module.heads[1], scale=q_RHD.shape[-1] ** -0.5
        )
        probs_XRS = score_XRS.masked_fill(~far_RS, -torch.inf).log_softmax(-1)
        cross_XR = -(mass_XRS * probs_XRS.masked_fill(~far_RS, 0.0)).sum(-1)
        whole_XR = mass_XRS.sum(-1)
        # entropy terms that make the cross-entropy a KL; constant in the module
        own_XR = -torch.special.entr(mass_XRS).sum(-1) + torch.special.entr(whole_XR)
        loss_XR = cross_XR + own_XR
        budget = config.recall_entries - config.sinks - config.window
        if config.recall_weight:
            held_XR = soft_share(mass_XRS, probs_XRS, far_RS, budget)
            loss_XR = loss_XR + config.recall_weight * (whole_XR - held_XR)
        used_X = members_X > 0
        with torch.no_grad():
            chosen = probs_XRS[used_X]
            latest = slot_S.to(chosen.dtype).expand_as(chosen).masked_fill(~far_RS, -torch.inf)
            for i, order in enumerate((chosen, mass_XRS[used_X].masked_fill(~far_RS, -1.0), latest)):
                sums[i] += share_held(mass_XRS[used_X], order, budget).mean(0).sum()
            sums[-1] += whole_XR[used_X].mean(0).sum()
            if module.training:
                self.learned(teacher, probs_XRS, budget)
        weight = one.labels / len(one.at_R)
        return weight * loss_XR[used_X].mean(0).sum()


def draw(config: SetLearning, batch: Batch) -> list[Queries]:
    """Sample query positions of every long enough document with labels, evenly over the log of positions.

    Only positions before a label are drawn, since these are the ones that decoding queries from. The first is
    at twice the number of tokens that are always read, or in short documents at a quarter of the length. The
    draw depends on the batch's seed alone.
    """
    mask_T = batch.host_labels
    rng = torch.Generator().manual_seed(batch.seed)
    found = []
    for start, stop in pairwise(batch.bounds):
        labels = int(mask_T[start:stop].sum())
        first = min(2 * (config.sinks + config.window), (stop - start) // 4)
        before_R = mask_T[start + 1 : stop].nonzero()[:, 0] if labels and first >= LEAST else mask_T[:0]
        before_R = before_R[before_R >= first]
        if not len(before_R):
            continue
        low, high = math.log(int(before_R[0])), math.log(int(before_R[-1]) + 1)
        share_R = (torch.arange(config.queries) + torch.rand(config.queries, generator=rng)) / config.queries
        drawn_R = torch.searchsorted(before_R, (low + share_R * (high - low)).exp().long())
        at_R = before_R[drawn_R.clamp(max=len(before_R) - 1)].unique()
        found.append(Queries(start, stop, at_R, labels))
    return found


def far(config: SetLearning, at_R: Tensor, rows: int) -> Tensor:
    """Return the mask bool_RS of keys outside the sinks and the sliding window; each query has some.

    Args:
        config: sinks and window, which are at most an eighth and half of what a query sees.
        at_R: positions of the queries, `LEAST` or more.
        rows: S.
    """
    slot_S, at_R1 = torch.arange(rows, device=at_R.device), at_R[:, None]
    first_R1 = (at_R1 // 8).clamp(max=config.sinks)
    return (slot_S >= first_R1) & (slot_S < at_R1 - (at_R1 // 2).clamp(max=config.window))

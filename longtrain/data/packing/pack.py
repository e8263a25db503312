"""Plans which pieces of which documents go into which packed sequence, for a whole run, before it starts.

A plan is a pure function of (documents, stages, seed, sequences per step), so resuming means starting at a
later sequence, and every rank computes the same plan. Sequences are filled best-fit within windows of
shuffled pieces; the rest of a sequence is padding.

Shapes: P pieces, R packed sequences (micro-batches), N steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from longtrain.data.config import NO_STAGES, PackingStage
from longtrain.data.packing.prepared import Prepared
from longtrain.errors import ConfigError, DataError
from longtrain.log import get_logger

log = get_logger(__name__)

WINDOW_ROWS = 64
CARRY_BELOW = 0.9


@dataclass(frozen=True)
class DocumentSpans:
    """Stretches of documents: `ids[start:start + length]` of the prepared data.

    Args:
        start: offset of the first token, int64.
        length: number of tokens, int64.
        doc: index of the document, int64.
        labels: number of labels, the piece's first token not counted, int64.
    """

    start: np.ndarray
    length: np.ndarray
    doc: np.ndarray
    labels: np.ndarray

    def take(self, index: np.ndarray) -> DocumentSpans:
        """Return the pieces at `index`, in that order."""
        return DocumentSpans(self.start[index], self.length[index], self.doc[index], self.labels[index])


@dataclass(frozen=True)
class Plan:
    """All micro-batches of a run; packed sequence i consists of pieces `row_ptr[i]:row_ptr[i + 1]`.

    Args:
        pieces: all P pieces, in the order of the sequences.
        row_ptr: first piece of each sequence, int64, R + 1 values.
        sequence_tokens: length of each sequence, int64, R values.
        tokens_in_step: labels of each optimiser step over all ranks and accumulated micro-batches, int64, N
            values.
        documents_in_step: pieces of each optimiser step, likewise (each has a label), int64, N values.
        sequences_per_step: accumulated micro-batches times ranks.
        stage_steps: number of steps of each stage.
    """

    pieces: DocumentSpans
    row_ptr: np.ndarray
    sequence_tokens: np.ndarray
    tokens_in_step: np.ndarray
    documents_in_step: np.ndarray
    sequences_per_step: int
    stage_steps: tuple[int, ...]

    @property
    def n_rows(self) -> int:
        """Number of micro-batches over all ranks."""
        return len(self.sequence_tokens)

    @property
    def n_steps(self) -> int:
        """Number of optimiser steps."""
        return len(self.tokens_in_step)

    @property
    def fill(self) -> float:
        """Share of all tokens that are not padding."""
        return float(self.pieces.length.sum() / max(1, self.sequence_tokens.sum()))

    def row(self, index: int) -> DocumentSpans:
        """Return the pieces of one packed sequence."""
        return self.pieces.take(np.arange(self.row_ptr[index], self.row_ptr[index + 1]))


def plan_run(
    data: Prepared,
    stages: Sequence[PackingStage],
    *,
    sequences_per_step: int,
    seed: int,
    total_steps: int | None = None,
    min_doc_tokens: int = 2,
) -> Plan:
    """Plan the training sequences of a whole run.

    Args:
        data: prepared data; its held-out documents are not used.
        stages: the stages of the run, in their order.
        sequences_per_step: `accumulate_grad_batches` times ranks.
        seed: seed of the run.
        total_steps: number of steps that `fraction` refers to, and the most steps of all; None: the stages'
            own sum.
        min_doc_tokens: shorter pieces are left out.

    Raises:
        ConfigError: no stages, or a fraction without `total_steps`.
        DataError: nothing to train on.
    """
    lengths = stage_steps(stages, total_steps)
    given = data.manifest.get("weights")
    per_doc = np.asarray(given, np.float64)[data.source] if given else np.ones(len(data.start))
    docs = np.flatnonzero(~data.val & (data.labels > 0))
    rows: list[list[DocumentSpans]] = []
    left = total_steps
    for number, (stage, steps) in enumerate(zip(stages, lengths, strict=True)):
        passes = _stage_weights(data, stage, per_doc)[docs]
        packer = _Packer(data, docs[passes > 0], passes[passes > 0], stage, (seed, number), min_doc_tokens)
        made = (
            packer.steps(steps, sequences_per_step)
            if steps is not None
            else packer.epochs(sequences_per_step)
        )
        rows.append(made if left is None else made[: left * sequences_per_step])
        left = None if left is None else left - len(rows[-1]) // sequences_per_step
    return _join(stages, rows, sequences_per_step)


def _stage_weights(data: Prepared, stage: PackingStage, per_doc: np.ndarray) -> np.ndarray:
    """Return the passes over each document in an epoch of a stage, fp64: the source's, or the kind's.

    A kind without documents, such as that of an optional source, is logged.
    """
    per_doc = per_doc.copy()
    for kind, weight in stage.weights.items():
        if kind in data.kinds:
            per_doc[data.kind == data.kinds.index(kind)] = weight
        else:
            log.info("data.stages.weights: the prepared data holds no document of kind '%s'", kind)
    return per_doc


def plan_val(data: Prepared, stage: PackingStage, *, max_rows: int, min_doc_tokens: int = 2) -> Plan:
    """Plan one unshuffled pass over the held-out documents: at most `max_rows` sequences, spread evenly."""
    docs = np.flatnonzero(data.val & (data.labels > 0))
    pieces = cut(data, docs, doc_tokens=stage.doc_tokens, phase=0 * docs, min_tokens=min_doc_tokens)
    rows = [pieces.take(np.sort(group)) for group in best_fit(pieces.length, stage.sequence_tokens)]
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(max_rows, len(rows))).round().astype(int))
    return _join([stage], [[rows[i] for i in chosen]], 1)


def stage_steps(stages: Sequence[PackingStage], total_steps: int | None) -> list[int | None]:
    """Return the number of steps of each stage, or None for a stage whose length is given in epochs.

    Raises:
        ConfigError: no stages, or a fraction without a total.
    """
    if not stages:
        raise ConfigError(NO_STAGES)
    lengths: list[int | None] = []
    done = 0.0
    for stage in stages:
        if stage.fraction is None:
            lengths.append(stage.steps)
            continue
        if total_steps is None:
            raise ConfigError(
                f"stage fraction={stage.fraction} needs the run's length; set trainer.max_steps"
            )
        lengths.append(round((done + stage.fraction) * total_steps) - round(done * total_steps))
        done += stage.fraction
    return lengths


def best_fit(lengths: np.ndarray, sequence_tokens: int) -> list[np.ndarray]:
    """Group items by best-fit decreasing, so that the lengths of a group sum to at most `sequence_tokens`.

    Args:
        lengths: length of each item, at most `sequence_tokens`.
        sequence_tokens: capacity of a group.

    Returns:
        The item indices of each group.
    """
    groups: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (free tokens, group), sorted
    order = np.argsort(-lengths, kind="stable")
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(spaces, (length, -1))
        if at == len(spaces):
            space, group = sequence_tokens, len(groups)
            groups.append([])
        else:
            space, group = spaces.pop(at)
        groups[group].append(index)
        if space > length:
            insort(spaces, (space - length, group))
    return [np.asarray(group, np.int64) for group in groups]


@dataclass(frozen=True)
class _Packer:
    """Packs one stage, epoch after epoch."""

    data: Prepared
    docs: np.ndarray
    weight: np.ndarray
    stage: PackingStage
    seed: tuple[int, int]
    min_doc_tokens: int

    def __post_init__(self) -> None:
        if not len(self._cut(self.docs, 0 * self.docs).start):
            weighted = f" and a weight above 0 ({self.stage.weights})" if self.stage.weights else ""
            raise DataError(
                f"prepared data at {self.data.folder} has no training document of {self.min_doc_tokens} "
                f"tokens or more with a label in it{weighted}; check sources, masks and data.min_doc_tokens"
            )

    def steps(self, steps: int, sequences_per_step: int) -> list[DocumentSpans]:
        """Return the sequences of that many steps, over as many epochs as it takes."""
        rows: list[DocumentSpans] = []
        epoch = 0
        while len(rows) < steps * sequences_per_step:
            rows.extend(self._epoch(epoch, 1.0))
            epoch += 1
        return rows[: steps * sequences_per_step]

    def epochs(self, sequences_per_step: int) -> list[DocumentSpans]:
        """Return the sequences of the stage's epochs, cut to whole steps; at least one step."""
        rows: list[DocumentSpans] = []
        wanted = self.stage.epochs or 0.0
        epoch = 0
        while epoch < wanted or len(rows) < sequences_per_step:
            rows.extend(self._epoch(epoch, min(1.0, wanted - epoch) if epoch < wanted else 1.0))
            epoch += 1
        return rows[: len(rows) // sequences_per_step * sequences_per_step]

    def _epoch(self, epoch: int, share: float) -> Iterator[DocumentSpans]:
        """Yield one pass over the documents: repeated by weight, cut, shuffled and packed."""
        rng = np.random.default_rng([*self.seed, epoch])
        weight = self.weight * share
        # a weight of 2.3 gives two passes, and a third one with probability 0.3
        passes = np.floor(weight).astype(np.int64) + (rng.random(len(weight)) < weight % 1)
        docs = np.repeat(self.docs, passes)
        # other cuts in each epoch but the first
        phase = rng.integers(0, self.stage.doc_tokens, len(docs)) * (epoch > 0 and self.stage.recut)
        pieces = self._cut(docs, phase)
        pieces = pieces.take(rng.permutation(len(pieces.start)))
        carried = np.zeros(0, np.int64)
        for begin, end in self._windows(pieces.length):
            index = np.concatenate([carried, np.arange(begin, end)])
            # best-fit returns indices into this window's pieces
            groups = [index[group] for group in best_fit(pieces.length[index], self.stage.sequence_tokens)]
            groups, carried = self._carry(groups, pieces.length, last=end == len(pieces.start))
            for i in rng.permutation(len(groups)):
                yield pieces.take(rng.permutation(groups[i]))

    def _windows(self, lengths: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield ranges of pieces that fill about `WINDOW_ROWS` sequences each."""
        sums = np.cumsum(lengths)
        room = WINDOW_ROWS * self.stage.sequence_tokens
        inner = np.searchsorted(sums, np.arange(room, int(lengths.sum()), room))
        edges = np.unique([0, *inner.tolist(), len(lengths)])
        yield from zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)

    def _carry(
        self, groups: list[np.ndarray], lengths: np.ndarray, *, last: bool
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Split off the emptiest sequences (at most one in eight), whose pieces go to the next window."""
        if last:
            return groups, np.zeros(0, np.int64)
        used = np.array([lengths[group].sum() for group in groups])
        loose = np.argsort(used, kind="stable")[: len(groups) // 8]
        loose = loose[used[loose] < CARRY_BELOW * self.stage.sequence_tokens]
        keep = np.setdiff1d(np.arange(len(groups)), loose)
        return [groups[i] for i in keep], np.concatenate([np.zeros(0, np.int64), *(groups[i] for i in loose)])

    def _cut(self, docs: np.ndarray, phase: np.ndarray) -> DocumentSpans:
        return cut(
            self.data, docs, doc_tokens=self.stage.doc_tokens, phase=phase, min_tokens=self.min_doc_tokens
        )


def cut(
    data: Prepared, docs: np.ndarray, *, doc_tokens: int, phase: np.ndarray, min_tokens: int
) -> DocumentSpans:
    """Cut documents into pieces of at most `doc_tokens`, without short pieces and pieces that have no label.

    Args:
        data: prepared data.
        docs: document indices, repeats allowed.
        doc_tokens: longest piece.
        phase: tokens of the first piece of a document longer than `doc_tokens`; 0: `doc_tokens`.
        min_tokens: shortest piece.
    """
    start, length = data.start[docs], data.length[docs]
    phase = np.where(length > doc_tokens, phase, 0)
    head = (phase > 0).astype(np.int64)
    n = head + -(-(length - phase) // doc_tokens)
    # Pieces of all documents in one flat array: the document of each piece, and its number within it.
    owner = np.repeat(np.arange(len(docs)), n)
    order = np.arange(len(owner)) - (np.cumsum(n) - n)[owner] - head[owner]
    # Piece 0 of a shifted document has order -1 and so begins at phase - doc_tokens, clipped to 0.
    begin = np.maximum(phase[owner] + order * doc_tokens, 0)
    end = np.minimum(phase[owner] + (order + 1) * doc_tokens, length[owner])
    first, size = start[owner] + begin, end - begin
    keep = np.flatnonzero(size >= min_tokens)
    labels = count_labels(data.mask, first[keep], size[keep])
    keep, labels = keep[labels > 0], labels[labels > 0]
    return DocumentSpans(first[keep], size[keep], docs[owner[keep]], labels)


def count_labels(mask: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Count the labels of each stretch `start:start + length`, its first token not counted; int64.

    Args:
        mask: label mask of 0 and 1, uint8.
        start: offset of each stretch.
        length: length of each stretch, at least 2.
    """
    if not len(start):
        return np.zeros(0, np.int64)
    order = np.argsort(start, kind="stable")
    stop = (start + length)[order]
    # reduceat sums between neighbouring edges, so every second sum belongs to a stretch. It takes no edge at
    # the end of the mask: the mask's last value is added apart.
    edges = np.stack([start[order] + 1, np.minimum(stop, len(mask) - 1)], 1).reshape(-1)
    last = stop == len(mask)
    sums = np.add.reduceat(mask, edges, dtype=np.int64)[0::2]
    sums = np.where(last & (edges[0::2] == edges[1::2]), 0, sums) + last * int(mask[-1])
    counts = np.empty(len(start), np.int64)
    counts[order] = sums
    return counts


def _join(stages: Sequence[PackingStage], rows: list[list[DocumentSpans]], sequences_per_step: int) -> Plan:
    widths = [
        np.full(len(made), stage.sequence_tokens, np.int64) for stage, made in zip(stages, rows, strict=True)
    ]
    flat = [row for made in rows for row in made]
    empty = np.zeros(0, np.int64)
    columns = [
        np.concatenate([empty, *(getattr(row, key) for row in flat)])
        for key in ("start", "length", "doc", "labels")
    ]
    sizes = np.array([len(row.start) for row in flat], np.int64)
    labels = np.array([row.labels.sum() for row in flat], np.int64)
    return Plan(
        pieces=DocumentSpans(*columns),
        row_ptr=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        sequence_tokens=np.concatenate([empty, *widths]),
        tokens_in_step=labels.reshape(-1, sequences_per_step).sum(1),
        documents_in_step=sizes.reshape(-1, sequences_per_step).sum(1),
        sequences_per_step=sequences_per_step,
        stage_steps=tuple(len(made) // sequences_per_step for made in rows),
    )

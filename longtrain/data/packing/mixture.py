"""Generates training sequences of text, chats and retrieval tasks; sequence i is a function of (seed, i).

Shapes: T tokens of one packed sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from longtrain.data.config import PackingStage
from longtrain.data.packing.batch import Batch, RankSequences
from longtrain.data.retrieval.material import Role, RoleDocument, TextStream
from longtrain.data.retrieval.synthetic import RetrievalWriter
from longtrain.errors import ConfigError

LONGEST = {"copy": 1024, "table": 3072, "chains": 4096}
"""Longest useful document of a task, in tokens; beyond it the task teaches nothing new."""


@dataclass(frozen=True)
class Mixture:
    """The sources that documents are drawn from.

    Args:
        writer: writes the retrieval tasks.
        streams: running text, drawn by tokens times `stream_weights`.
        chats: whole conversations with roles.
        shares: how often each kind is drawn: a task of the writer, `text` or `chat`.
        stream_weights: how often each stream is drawn, as in the writer.
        min_doc_tokens: shortest document; lengths are log-uniform from here to the stage's `doc_tokens`.
        role_weights: loss weight of each `Role`, by its number; 0 takes it out of the labels.
        manifest: the parts of the corpus with their hashes.
    """

    writer: RetrievalWriter
    streams: Sequence[TextStream]
    chats: Sequence[RoleDocument]
    shares: Mapping[str, float]
    stream_weights: Sequence[float]
    min_doc_tokens: int = 256
    role_weights: tuple[float, float, float, float] = (1.0, 0.0, 1.0, 4.0)
    manifest: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {*self.writer.tasks, "text", "chat"}
        unknown = sorted(set(self.shares) - known)
        if unknown:
            raise ConfigError(f"unknown share '{unknown[0]}'; known: {', '.join(sorted(known))}")
        if sum(self.shares.values()) <= 0 or min(self.shares.values()) < 0:
            raise ConfigError(f"shares {dict(self.shares)} must be 0 or more, and not all 0")
        if self.shares.get("chat") and not self.chats:
            raise ConfigError(
                "shares ask for chats, but no conversations were given; set data.instruct or chat: 0"
            )

    def document(self, n_most: int, doc_tokens: int, rng: np.random.Generator) -> RoleDocument:
        """Draw one document of at most `n_most` tokens (at least 2)."""
        kinds, shares = list(self.shares), np.array(list(self.shares.values()))
        kind = kinds[int(rng.choice(len(kinds), p=shares / shares.sum()))]
        low, high = np.log(self.min_doc_tokens), np.log(max(doc_tokens, self.min_doc_tokens))
        n = min(int(np.exp(rng.uniform(low, high))), LONGEST.get(kind, doc_tokens))
        if n_most < n + self.min_doc_tokens:
            n = min(n_most, doc_tokens)
        if kind == "chat":
            chat = self.chats[int(rng.integers(len(self.chats)))]
            if len(chat.ids_T) <= n_most:
                return chat
            kind = "text"
        if kind == "text" or n < 192:
            stream = self.streams[int(rng.choice(len(self.streams), p=self._p()))]
            text, _ = stream.cut(n, rng)
            return RoleDocument(text, np.full(n, Role.TEXT, dtype=np.uint8), stream.kind)
        return self.writer.write(kind, n, rng)

    def row(self, sequence_tokens: int, doc_tokens: int, rng: np.random.Generator) -> list[RoleDocument]:
        """Draw documents until together they fill `sequence_tokens` tokens."""
        documents, left = [], sequence_tokens
        while left >= 2:
            documents.append(self.document(left, doc_tokens, rng))
            left -= len(documents[-1].ids_T)
        return documents

    def batch(self, index: int, stage: PackingStage, *, seed: int) -> Batch:
        """Build packed sequence `index` of a run; its `*_in_step` counts cover this sequence only."""
        rng = np.random.default_rng([seed, index])
        documents = self.row(stage.sequence_tokens, stage.doc_tokens, rng)
        ids_T = np.zeros(stage.sequence_tokens, dtype=np.int64)
        weights_T = np.zeros(stage.sequence_tokens, dtype=np.float32)
        ids = np.concatenate([d.ids_T for d in documents])
        ids_T[: len(ids)] = ids
        weights_T[: len(ids)] = np.array(self.role_weights, dtype=np.float32)[
            np.concatenate([d.roles_T for d in documents])
        ]
        bounds = np.concatenate([[0], np.cumsum([len(d.ids_T) for d in documents])])
        weights_T[bounds[:-1]] = 0.0
        if bounds[-1] < stage.sequence_tokens:
            bounds = np.append(bounds, stage.sequence_tokens)
        mask_T = weights_T > 0
        labels = np.add.reduceat(mask_T, bounds[:-1], dtype=np.int64)
        return Batch(
            ids_T=torch.from_numpy(ids_T),
            bounds=tuple(bounds.tolist()),
            loss_mask_T=torch.from_numpy(mask_T),
            seed=int(rng.integers(2**31)),
            tokens_in_step=int(mask_T.sum()),
            documents_in_step=int((labels > 0).sum()),
            kinds=tuple(d.kind for d in documents),
            weights_T=torch.from_numpy(weights_T),
        )

    def _p(self) -> np.ndarray:
        weights = np.array(self.stream_weights, dtype=float)
        return weights / weights.sum()


class MixtureSequences(RankSequences):
    """A rank's packed sequences of a mixture (`RankSequences`), with random access.

    The first item of a step generates all its sequences, to count their labels, and caches this rank's own.

    Args:
        mixture: what is drawn.
        stages: lengths over the run, each with `steps` or `fraction`.
        total_steps: optimizer steps of the run.
        sequences_per_step: micro-batches of a step, over ranks and accumulation.
        seed: the seed of the run.
        rank: this process.
        world: processes.
        start: items to leave out at the front.

    Raises:
        ConfigError: no stages, one counted in epochs (a mixture has none), or one with weights of kinds.
    """

    def __init__(
        self,
        mixture: Mixture,
        stages: Sequence[PackingStage],
        *,
        total_steps: int,
        sequences_per_step: int = 1,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        start: int = 0,
    ) -> None:
        super().__init__(total_steps * sequences_per_step, self._counted, rank=rank, world=world, start=start)
        self.mixture, self.stages, self.seed = mixture, tuple(stages), seed
        self.sequences_per_step = sequences_per_step
        if not stages or any(s.epochs is not None for s in stages):
            raise ConfigError("data.stages of a mixture need steps or fraction each, and at least one stage")
        if any(s.weights for s in stages):
            raise ConfigError(
                "data.stages.weights of a mixture: kinds are drawn by data.shares; leave it out"
            )
        steps = [s.steps if s.steps is not None else (s.fraction or 0.0) * total_steps for s in stages]
        self.ends = np.cumsum(steps)
        self._step, self._tokens, self._documents = -1, 0, 0
        self._written: dict[int, Batch] = {}

    def stage(self, step: int) -> PackingStage:
        """Return the stage of an optimiser step."""
        return self.stages[min(int(np.searchsorted(self.ends, step, side="right")), len(self.stages) - 1)]

    def _counted(self, index: int) -> Batch:
        """A global micro-batch of this rank, with the counts of its step."""
        step = index // self.sequences_per_step
        if step != self._step:
            self._begin(step, index)
        batch = self._written.pop(index, None) or self._write(index)
        return replace(batch, tokens_in_step=self._tokens, documents_in_step=self._documents)

    def _begin(self, step: int, first: int) -> None:
        """Generate a step's sequences, count their labels, and cache those of this rank from `first` on."""
        self._step, self._tokens, self._documents, self._written = -1, 0, 0, {}
        for index in range(step * self.sequences_per_step, (step + 1) * self.sequences_per_step):
            batch = self._write(index)
            self._tokens += batch.tokens_in_step
            self._documents += batch.documents_in_step
            if index >= first and index % self.world == self.rank:
                self._written[index] = batch
        self._step = step

    def _write(self, index: int) -> Batch:
        return self.mixture.batch(index, self.stage(index // self.sequences_per_step), seed=self.seed)

"""Lightning data modules, which give each rank its packed sequences from any position on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning
from torch.utils.data import DataLoader, Dataset

from longtrain.data.config import DataConfig, PackingStage
from longtrain.data.packing.batch import Batch, RankSequences, batch_at
from longtrain.data.packing.mixture import Mixture, MixtureSequences
from longtrain.data.packing.pack import Plan, plan_run, plan_val
from longtrain.data.packing.prepared import Prepared
from longtrain.errors import ConfigError
from longtrain.log import get_logger

log = get_logger(__name__)


class SequencesModule(lightning.LightningDataModule):
    """Base of data modules that yield packed sequences, with the facts about the data that a run asks for."""

    workers: int
    pin_memory: bool
    start_batch = 0
    """Micro-batches of a rank already trained on: optimiser steps done times `accumulate`."""

    @property
    def n_steps(self) -> int | None:
        """Number of optimiser steps that the data lasts for; None if it never ends."""
        return None

    @property
    def sha256(self) -> str | None:
        """Hash of the data, if it has one."""
        return None

    def _loader(self, rows: Dataset[Batch]) -> DataLoader[Batch]:
        return DataLoader(
            rows,
            batch_size=None,
            shuffle=False,
            num_workers=self.workers,
            prefetch_factor=4 if self.workers else None,
            pin_memory=self.pin_memory,
        )


class DataModule(SequencesModule):
    """Prepared data as a stream of packed sequences.

    Args:
        folder: prepared data.
        config: settings, of which `stages`, `min_doc_tokens`, `val_sequences` and `workers` are used.
        accumulate: micro-batches of a rank in an optimiser step.
        seed: seed of the run.
        total_steps: number of steps that a stage's `fraction` refers to.
        context_tokens: the target's context; no document piece may be longer.
        vocab_size: the target's vocabulary; data with token ids beyond it is refused.
        pin_memory: put batches in page-locked memory, for a CUDA device.
        world: number of ranks, used when no trainer is attached.
        rank: this rank, used when no trainer is attached.
    """

    def __init__(
        self,
        folder: str | Path,
        config: DataConfig,
        *,
        accumulate: int = 1,
        seed: int = 0,
        total_steps: int | None = None,
        context_tokens: int | None = None,
        vocab_size: int | None = None,
        pin_memory: bool = False,
        world: int = 1,
        rank: int = 0,
    ) -> None:
        super().__init__()
        self.data = Prepared.open(Path(folder), verify=rank == 0)  # the first rank opens before the others
        if vocab_size is not None and rank == 0:
            self.data.refuse_ids_above(vocab_size)
        self.config, self.accumulate, self.seed, self.total_steps = config, accumulate, seed, total_steps
        self.pin_memory, self.workers = pin_memory, config.workers
        self._world, self._rank = world, rank
        self._plans: dict[tuple[int, int], Plan] = {}
        check_context(config.stages, context_tokens)
        longest = int(self.data.manifest["counts"]["longest"])
        shortest_stage = min((stage.doc_tokens for stage in config.stages), default=longest)
        if (config.labels == "last_answer" or config.prompt_tokens) and shortest_stage < longest:
            log.warning(
                "a stage cuts documents at doc_tokens=%d and the longest has tokens=%d: a prompt would lose "
                "its beginning; raise data.stages' doc_tokens, or lower data.max_doc_tokens",
                shortest_stage,
                longest,
            )

    def refuse_cuts(self) -> None:
        """Refuse stages that cut documents, for methods trained on a prompt together with its response.

        Raises:
            ConfigError: a stage's `doc_tokens` is below the longest document with labels.
        """
        if not self.config.stages or not len(self.data.length):
            return
        shortest = min(stage.doc_tokens for stage in self.config.stages)
        at = int((self.data.length * (self.data.labels > 0)).argmax())
        longest = int(self.data.length[at])
        if longest > shortest and self.data.labels[at]:
            raise ConfigError(
                f"data.stages doc_tokens={shortest} would cut document {self.data.names[at]} of {longest} "
                f"tokens, and this method needs prompt and response whole; raise doc_tokens (and "
                f"sequence_tokens) of data.stages to {longest} or more, or set "
                f"data.max_doc_tokens={shortest} with data.long_documents=truncate"
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.trainer.world_size if self.trainer is not None else self._world

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.trainer.global_rank if self.trainer is not None else self._rank

    @property
    def n_steps(self) -> int:
        """Number of optimiser steps of the plan."""
        return self.plan.n_steps

    @property
    def sha256(self) -> str | None:
        """Hash of the prepared data."""
        return self.data.manifest.get("sha256")

    @property
    def plan(self) -> Plan:
        """The run's plan for this number of ranks; computed once."""
        key = (self.world, self.accumulate)
        if key not in self._plans:
            plan = plan_run(
                self.data,
                self.config.stages,
                sequences_per_step=self.accumulate * self.world,
                seed=self.seed,
                total_steps=self.total_steps,
                min_doc_tokens=self.config.min_doc_tokens,
            )
            log.info(
                "data=%s steps=%d sequences=%d tokens=%d labels=%d fill=%.3f",
                self.data.folder.name,
                plan.n_steps,
                plan.n_rows,
                int(plan.sequence_tokens.sum()),
                int(plan.tokens_in_step.sum()),
                plan.fill,
            )
            self._plans[key] = plan
        return self._plans[key]

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return a loader of this rank's sequences from `start_batch` on."""
        return self._rows(self.plan, start=self.start_batch)

    def val_dataloader(self) -> DataLoader[Batch] | list[Any]:
        """Return a loader of this rank's held-out sequences, the same number on every rank; [] if none."""
        plan = self.val_plan
        return self._rows(plan) if plan.n_rows >= self.world else []

    @property
    def val_plan(self) -> Plan:
        """The held-out sequences of all ranks."""
        return plan_val(
            self.data,
            self.config.stages[-1],
            max_rows=self.config.val_sequences,
            min_doc_tokens=self.config.min_doc_tokens,
        )

    def _rows(self, plan: Plan, *, start: int = 0) -> DataLoader[Batch]:
        """Return a loader of this rank's sequences of a plan, from micro-batch `start` on."""
        batch = partial(batch_at, self.data, plan, seed=self.seed, pad_id=self.pad_id)
        return self._loader(RankSequences(plan.n_rows, batch, rank=self.rank, world=self.world, start=start))

    @property
    def pad_id(self) -> int:
        """Id of the token that fills sequences."""
        return int(self.data.manifest.get("pad_id", 0))


class MixtureModule(SequencesModule):
    """Data module over a mixture, whose sequences the loading processes generate on the fly.

    Args:
        mixture: the sources and their shares.
        stages: lengths over the run, each with `steps` or `fraction`.
        total_steps: optimiser steps of the run.
        accumulate: micro-batches of a rank in an optimiser step.
        seed: seed of the run.
        workers: number of generating processes; the order does not depend on it.
        pin_memory: put batches in page-locked memory, for a CUDA device.
        world: number of ranks.
        rank: number of this rank.
    """

    def __init__(
        self,
        mixture: Mixture,
        stages: Sequence[PackingStage],
        *,
        total_steps: int,
        accumulate: int = 1,
        seed: int = 0,
        workers: int = 0,
        pin_memory: bool = False,
        world: int = 1,
        rank: int = 0,
    ) -> None:
        super().__init__()
        self.data = mixture
        self.stages, self.total_steps, self.accumulate, self.seed = (
            tuple(stages),
            total_steps,
            accumulate,
            seed,
        )
        self.workers, self.pin_memory, self.world, self.rank = workers, pin_memory, world, rank

    @property
    def sha256(self) -> str | None:
        """Hash of the corpus, if its manifest has one."""
        return self.data.manifest.get("sha256")

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return a loader of this rank's sequences from `start_batch` on."""
        rows = MixtureSequences(
            self.data,
            self.stages,
            total_steps=self.total_steps,
            sequences_per_step=self.accumulate * self.world,
            seed=self.seed,
            rank=self.rank,
            world=self.world,
            start=self.start_batch,
        )
        return self._loader(rows)


def check_context(stages: Sequence[PackingStage], context_tokens: int | None) -> None:
    """Refuse document pieces longer than the target's context.

    Raises:
        ConfigError: a stage's `doc_tokens` is above the target's context.
    """
    for stage in stages:
        if context_tokens is not None and stage.doc_tokens > context_tokens:
            raise ConfigError(
                f"data.stages doc_tokens={stage.doc_tokens} is longer than the target's context of "
                f"{context_tokens} tokens; lower doc_tokens (sequence_tokens may stay: packed documents do "
                "not see each other)"
            )

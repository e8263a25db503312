"""The Lightning data module: plans the run's rows and hands each rank its own, from any position on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning
from torch.utils.data import DataLoader, Dataset

from longtrain.data.config import DataConfig, PackingStage
from longtrain.data.rows.batch import Batch, batch_at
from longtrain.data.rows.mixture import Mixture, MixtureRows
from longtrain.data.rows.pack import Plan, plan_run, plan_val
from longtrain.data.rows.prepared import Prepared
from longtrain.errors import ConfigError
from longtrain.log import get_logger

log = get_logger(__name__)


class PlannedRows(Dataset[Batch]):
    """A rank's share of a plan: its i-th item is global micro-batch `i * world + rank`.

    Args:
        data: prepared data.
        plan: rows of the run.
        seed: the seed of the run.
        rank: this process.
        world: processes.
        start: items to leave out at the front.
        pad_id: token that fills rows.
    """

    def __init__(
        self,
        data: Prepared,
        plan: Plan,
        *,
        seed: int,
        rank: int = 0,
        world: int = 1,
        start: int = 0,
        pad_id: int = 0,
    ) -> None:
        self.data, self.plan, self.seed, self.pad_id = data, plan, seed, pad_id
        self.rank, self.world, self.start = rank, world, start

    def __len__(self) -> int:
        return max(0, self.plan.n_rows // self.world - self.start)

    def __getitem__(self, item: int) -> Batch:
        if not 0 <= item < len(self):
            raise IndexError(item)
        index = (self.start + item) * self.world + self.rank
        return batch_at(self.data, self.plan, index, seed=self.seed, pad_id=self.pad_id)

    def __iter__(self) -> Iterator[Batch]:
        return (self[item] for item in range(len(self)))


class RowsModule(lightning.LightningDataModule):
    """Packed rows for training, and what a run asks of them beside Lightning's own hooks."""

    workers: int
    pin_memory: bool

    @property
    def n_steps(self) -> int | None:
        """The optimizer steps that the rows last for; None where they never end."""
        return None

    @property
    def sha256(self) -> str | None:
        """The hash of what the rows are made from, where it has one."""
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


class DataModule(RowsModule):
    """Prepared data as a stream of packed rows.

    Args:
        folder: prepared data.
        config: stages, `min_doc_tokens`, `val_rows` and `workers` are used.
        accumulate: micro-batches of a rank in an optimizer step.
        seed: the seed of the run.
        total_steps: what a stage's `fraction` is a fraction of.
        start_batch: micro-batches of a rank already trained on: optimizer steps done times `accumulate`.
        context_tokens: the target's context; no document piece may be longer.
        vocab_size: the target's; data with token ids beyond it is refused.
        pin_memory: put batches in page-locked memory, for a CUDA device.
        world: ranks, when there is no trainer to ask.
        rank: this rank, when there is no trainer to ask.
    """

    def __init__(
        self,
        folder: str | Path,
        config: DataConfig,
        *,
        accumulate: int = 1,
        seed: int = 0,
        total_steps: int | None = None,
        start_batch: int = 0,
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
        self.start_batch, self.pin_memory, self.workers = start_batch, pin_memory, config.workers
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
        """Refuse stages that cut documents, for what is trained on a prompt and its response together.

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
                f"tokens, and this method needs prompt and response whole; raise doc_tokens (and row_tokens) "
                f"of data.stages to {longest} or more, or set data.max_doc_tokens={shortest} with "
                "data.long_documents=truncate"
            )

    @property
    def world(self) -> int:
        """Ranks."""
        return self.trainer.world_size if self.trainer is not None else self._world

    @property
    def rank(self) -> int:
        """This rank."""
        return self.trainer.global_rank if self.trainer is not None else self._rank

    @property
    def n_steps(self) -> int:
        """The optimizer steps of the plan."""
        return self.plan.n_steps

    @property
    def sha256(self) -> str | None:
        """The hash of the prepared data."""
        return self.data.manifest.get("sha256")

    @property
    def plan(self) -> Plan:
        """The run's plan for this number of ranks; computed once."""
        key = (self.world, self.accumulate)
        if key not in self._plans:
            plan = plan_run(
                self.data,
                self.config.stages,
                rows_per_step=self.accumulate * self.world,
                seed=self.seed,
                total_steps=self.total_steps,
                min_doc_tokens=self.config.min_doc_tokens,
            )
            log.info(
                "data=%s steps=%d rows=%d tokens=%d labels=%d fill=%.3f",
                self.data.folder.name,
                plan.n_steps,
                plan.n_rows,
                int(plan.row_tokens.sum()),
                int(plan.tokens_in_step.sum()),
                plan.fill,
            )
            self._plans[key] = plan
        return self._plans[key]

    def train_dataloader(self) -> DataLoader[Batch]:
        """This rank's rows from `start_batch` on."""
        rows = PlannedRows(
            self.data,
            self.plan,
            seed=self.seed,
            rank=self.rank,
            world=self.world,
            start=self.start_batch,
            pad_id=self.pad_id,
        )
        return self._loader(rows)

    def val_dataloader(self) -> DataLoader[Batch] | list[Any]:
        """This rank's held-out rows, as many on every rank; an empty list where nothing is held out."""
        plan = plan_val(
            self.data,
            self.config.stages[-1],
            max_rows=self.config.val_rows,
            min_doc_tokens=self.config.min_doc_tokens,
        )
        if plan.n_rows < self.world:
            return []
        return self._loader(
            PlannedRows(self.data, plan, seed=self.seed, rank=self.rank, world=self.world, pad_id=self.pad_id)
        )

    @property
    def pad_id(self) -> int:
        """The token that fills rows."""
        return int(self.data.manifest.get("pad_id", 0))


class MixtureModule(RowsModule):
    """Rows of a mixture, written on the fly by loading processes.

    Args:
        mixture: what is drawn.
        stages: lengths over the run, each with `steps` or `fraction`.
        total_steps: optimizer steps of the run.
        accumulate: micro-batches of a rank in an optimizer step.
        seed: the seed of the run.
        workers: writing processes; the order does not depend on it.
        pin_memory: put batches in page-locked memory, for a CUDA device.
        world: ranks.
        rank: this rank.
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
        self.start_batch = 0

    @property
    def sha256(self) -> str | None:
        """The hash of the corpus, where its manifest has one."""
        return self.data.manifest.get("sha256")

    def train_dataloader(self) -> DataLoader[Batch]:
        """This rank's rows from `start_batch` on."""
        rows = MixtureRows(
            self.data,
            self.stages,
            total_steps=self.total_steps,
            rows_per_step=self.accumulate * self.world,
            seed=self.seed,
            rank=self.rank,
            world=self.world,
            start=self.start_batch,
        )
        return self._loader(rows)


def check_context(stages: Sequence[PackingStage], context_tokens: int | None) -> None:
    """Refuse pieces longer than the target can see.

    Raises:
        ConfigError: a stage's `doc_tokens` is above the target's context.
    """
    for stage in stages:
        if context_tokens is not None and stage.doc_tokens > context_tokens:
            raise ConfigError(
                f"data.stages doc_tokens={stage.doc_tokens} is longer than the target's context of "
                f"{context_tokens} tokens; lower doc_tokens (row_tokens may stay: documents in a row do not "
                f"see each other)"
            )

"""The part of `longtrain plan` that is about training: memory, time and disk of each stage's ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from longtrain.costs import disk, ranks
from longtrain.costs.hardware import GIB
from longtrain.costs.held import Spread, fits
from longtrain.costs.ranks import Job, Memory
from longtrain.costs.training import PackedRow, target_flops
from longtrain.errors import ConfigError
from longtrain.jobs.features import form_of, settings_of
from longtrain.jobs.outline import check_strategy, devices_of, layout_of, trained_weights
from longtrain.jobs.plan_data import Lengths, document_lengths, prepared_counts
from longtrain.settings import Count, Positive, Tokens, convert
from longtrain.training.strategy import rows_of_a_rank

if TYPE_CHECKING:
    from longtrain.jobs.plan import RecipePlan

COLUMNS = {
    "row tokens": "row_tokens", "document": "doc_tokens", "documents": "documents", "chunk": "chunk",
    "inputs GiB": "inputs", "target pass GiB": "target_pass", "module GiB": "module", "peak GiB": "peak",
    "fits": "fits", "largest row": "largest_row_tokens", "PFLOP a row": "pflop", "tokens/s": "tokens_per_s",
    "s a step": "step_s", "steps": "steps", "hours": "hours",
}  # fmt: skip
ROW_STEP, LONGEST_ROW = 1024, 2**22
"""Largest rows are told to so many tokens, and none longer is looked for."""


@dataclass(frozen=True)
class Setting:
    """A way of running the recipe.

    Args:
        words: what is typed for it; none: the recipe as given.
        layout: ranks, strategy and sharding.
        config: the method's settings.
        why: what it changes, for people.
    """

    words: tuple[str, ...]
    layout: Spread
    config: Any
    why: str = ""


@dataclass(frozen=True)
class TrainingPlan:
    """A recipe's training.

    Args:
        recipe: what is planned.
        given: the setting that the recipe and the command line make.
    """

    recipe: RecipePlan
    given: Setting

    @cached_property
    def trained(self) -> int:
        """Weights that are trained."""
        assert self.recipe.spec is not None
        return trained_weights(self.recipe.spec, self.recipe.config, self.recipe.info)

    def job(self, row: PackedRow, setting: Setting) -> Job:
        """A micro-batch under a setting."""
        recipe, spec = self.recipe, self.recipe.spec
        assert spec is not None
        step = spec.cost.training(setting.config, recipe.size, row, self.trained, recipe.itemsize)
        offline = settings_of(recipe.cfg).mode == "offline"
        return Job(recipe.size, recipe.tied, recipe.itemsize, self.trained, row, step, offline)

    def memory(self, row: PackedRow, setting: Setting) -> Memory:
        """A rank's memory for a row under a setting."""
        return ranks.memory(self.job(row, setting), setting.layout)

    def fits(self, row: PackedRow, setting: Setting) -> bool:
        """Whether the GPU of `gpu=` has room for it."""
        return fits(self.memory(row, setting).peak, self.recipe.gpu.memory_bytes)

    @cached_property
    def rows(self) -> list[PackedRow]:
        """The packed row of each stage that takes the most memory: the one with the most documents."""
        cfg = self.recipe.cfg
        answer = int(cfg.data.get("answer_tokens") or 0)
        found = [PackedRow(int(one["row_tokens"]), int(one["doc_tokens"]), answer) for one in cfg.data.stages]
        least = [None if one is None else one[1] for one in self._lengths]
        return [replace(row, usual_tokens=usual) for row, usual in zip(found, least, strict=True)]

    @cached_property
    def usual_rows(self) -> list[PackedRow]:
        """The packed row of each stage with as many documents as its rows have on average."""
        usual = [None if one is None else one[0] for one in self._lengths]
        return [replace(row, usual_tokens=mean) for row, mean in zip(self.rows, usual, strict=True)]

    @cached_property
    def _lengths(self) -> list[Lengths | None]:
        cfg, spec = self.recipe.cfg, self.recipe.spec
        assert spec is not None
        if spec.data is not None:  # its rows are its own
            return [None for _ in cfg.data.stages]
        return document_lengths(cfg, _rows(cfg, self.given.layout))

    def largest(self, row: PackedRow, setting: Setting) -> int:
        """The most tokens of a row that fits, a multiple of 1024; 0: none does.

        Documents stay as long as they are; those that fill their row grow with it, as far as the target's
        positions go.
        """
        whole = row.doc_tokens >= row.tokens

        def fits(blocks: int) -> bool:
            tokens = blocks * ROW_STEP
            document = min(tokens, self.recipe.info.max_positions) if whole else row.doc_tokens
            return self.fits(replace(row, tokens=tokens, doc_tokens=document), setting)

        low, high = 0, LONGEST_ROW // ROW_STEP
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low * ROW_STEP


def planned(recipe: RecipePlan) -> TrainingPlan:
    """The plan of a recipe as it is given.

    Raises:
        ConfigError: ranks that cannot be, a strategy that does not train, or features that cannot be stored.
    """
    cfg, words = recipe.cfg, recipe.cfg.trainer
    check_strategy(cfg)
    nodes = convert(words.get("num_nodes", 1), Count, "trainer.num_nodes")
    layout = layout_of(cfg, devices=devices_of(cfg), nodes=nodes)
    network = convert(cfg.network_gbits, Positive, "network_gbits") * 1e9 / 8
    return TrainingPlan(recipe, Setting((), replace(layout, network_bytes_per_s=network), recipe.config))


def stages_of(plan: TrainingPlan) -> list[dict[str, Any]]:
    """One entry for each stage: a rank's memory in bytes, times in seconds, and what fits.

    Raises:
        ConfigError: rows that the ranks cannot share evenly.
    """
    stages = plan.recipe.cfg.data.stages
    return [_stage(plan, *one) for one in zip(stages, plan.rows, plan.usual_rows, strict=True)]


def _stage(plan: TrainingPlan, stage: DictConfig, row: PackedRow, usual: PackedRow) -> dict[str, Any]:
    recipe, given = plan.recipe, plan.given
    job, layout = plan.job(usual, given), given.layout
    memory = plan.memory(row, given)
    all_rows = _rows(recipe.cfg, layout)
    steps, stored = _steps(recipe.cfg, stage, all_rows), _stored(recipe.cfg, stage)
    found: dict[str, Any] = {
        "row_tokens": row.tokens,
        "doc_tokens": row.doc_tokens,
        "documents": row.documents,
        "chunk": job.step.chunk,
        "rows_per_step": all_rows,
        "inputs": memory.inputs / GIB,
        "target_pass": memory.pass_ / GIB,
        "module": memory.module / GIB,
        "peak": memory.peak / GIB,
        "memory_bytes": asdict(memory),
        "mostly": memory.largest(),
        "pflop": (target_flops(recipe.size, usual) + job.step.flops) / 1e15,
        "steps": steps,
    }
    if recipe.on_cpu:
        return found
    times = ranks.seconds(job, layout, recipe.gpu, rows=all_rows // layout.ranks, stored=stored)
    return found | {
        "fits": "yes" if fits(memory.peak, recipe.gpu.memory_bytes) else "no",
        "largest_row_tokens": plan.largest(row, given),
        "seconds": times.to_json(),
        "step_s": times.step,
        "tokens_per_s": all_rows * row.tokens / times.step,
        "hours": None if steps is None else steps * times.step / 3600,
    }


def _rows(cfg: DictConfig, layout: Spread) -> int:
    """Packed rows of all ranks in an optimizer step."""
    words = cfg.trainer
    together = convert(words.get("rows_per_step"), Count | None, "trainer.rows_per_step")
    each = convert(words.accumulate_grad_batches, Count, "trainer.accumulate_grad_batches")
    return rows_of_a_rank(together, each, ranks=layout.ranks) * layout.ranks


def _stored(cfg: DictConfig, stage: DictConfig) -> float:
    """The share of a stage's rows whose features are read and not computed."""
    epochs = float(stage.get("epochs") or 1)
    return {"online": 0.0, "offline": 1.0, "fill": max(0.0, 1 - 1 / epochs)}[settings_of(cfg).mode]


def _steps(cfg: DictConfig, stage: DictConfig, rows: int) -> int | None:
    """Optimizer steps of a stage; None where they depend on data that is not prepared yet."""
    total = cfg.trainer.get("max_steps")
    if stage.get("steps"):
        return int(stage.steps)
    if stage.get("fraction") and total:
        return round(stage.fraction * total)
    counted = _tokens(cfg)
    if not stage.get("epochs") or counted is None:
        return None
    return int(stage.epochs * counted[1] / (stage.row_tokens * rows))


def _tokens(cfg: DictConfig) -> tuple[int, int] | None:
    """Tokens of the data and those that are trained on, as `tokens=` states or as prepared."""
    stated = convert(cfg.tokens, Tokens | None, "tokens")
    if stated is not None:
        return stated, stated
    counts = prepared_counts(cfg)
    return None if counts is None else (counts["tokens"], counts["tokens"] - counts["val_tokens"])


def duration(plan: TrainingPlan, stages: list[dict[str, Any]]) -> str:
    """A sentence about the hours of all stages, or about what is missing to know them."""
    gpus = f"{plan.given.layout.ranks} {plan.recipe.gpu.name}"
    if any(stage["hours"] is None for stage in stages):
        return (
            "Hours are not known before data is prepared: run longtrain prepare with the same recipe, or "
            "state the training tokens, tokens=200m."
        )
    return f"All stages take {sum(stage['hours'] for stage in stages):.3g} hours on {gpus}, validation aside."


def disk_of(plan: TrainingPlan) -> dict[str, int | None]:
    """Bytes on the disk; None where they depend on data that is not prepared yet.

    Raises:
        ConfigError: features are to be stored that the method does not read from a store.
    """
    recipe, counted = plan.recipe, _tokens(plan.recipe.cfg)
    tokens = None if counted is None else counted[0]
    found: dict[str, int | None] = {
        "checkpoint": disk.checkpoint_bytes(plan.trained),
        "checkpoints_at_most": disk.GENERATIONS * disk.checkpoint_bytes(plan.trained),
        "data": None if tokens is None else disk.data_bytes(tokens, recipe.size.vocab_size),
    }
    keeping = settings_of(recipe.cfg)
    if keeping.mode == "online":
        return found
    step = plan.job(plan.rows[0], plan.given).step
    if not step.kv and not step.hidden:
        raise ConfigError(
            f"features={keeping.mode}: method={recipe.cfg.method.name} watches every layer of the target, "
            "which is not stored; pass features=online"
        )
    form = form_of(keeping)
    each = disk.feature_bytes(step, recipe.size, form=form.form, top_k=form.top_k)
    return found | {"features_a_token": each, "features": None if tokens is None else tokens * each}

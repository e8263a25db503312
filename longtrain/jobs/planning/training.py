"""The training part of `longtrain plan`: memory, time and disk space of each stage."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from longtrain.costs import disk, ranks
from longtrain.costs.footprint import fits
from longtrain.costs.hardware import GIB
from longtrain.costs.training import PackedSequence, target_flops
from longtrain.errors import ConfigError
from longtrain.jobs.features import form_of
from longtrain.jobs.planning.data import prepared_counts

if TYPE_CHECKING:
    from longtrain.config import RunConfig
    from longtrain.data.config import PackingStage
    from longtrain.jobs.planning.run_plan import RunPlan

COLUMNS = {
    "sequence tokens": "sequence_tokens", "document": "doc_tokens", "documents": "documents",
    "chunk": "chunk", "inputs GiB": "inputs", "target pass GiB": "target_pass", "module GiB": "module",
    "peak GiB": "peak",
    "fits": "fits", "largest sequence": "largest_sequence_tokens", "PFLOP a sequence": "pflop",
    "tokens/s": "tokens_per_s",
    "s a step": "step_s", "steps": "steps", "hours": "hours",
}  # fmt: skip


def stages_of(plan: RunPlan) -> list[dict[str, Any]]:
    """One mapping for each stage: a rank's memory in bytes, times in seconds, and what fits.

    Raises:
        ConfigError: the sequences of a step are not divisible by the ranks.
    """
    stages = zip(plan.cfg.stages, plan.rows, plan.usual_rows, strict=True)
    return [_stage(plan, *one) for one in stages]


def _stage(plan: RunPlan, stage: PackingStage, row: PackedSequence, usual: PackedSequence) -> dict[str, Any]:
    given, layout, all_rows = plan.given, plan.layout, plan.sequences_per_step
    job, memory = plan.job(usual, given), plan.memory(row, given)
    steps, stored = _steps(plan.cfg, stage, all_rows), _stored(plan.cfg, stage)
    found: dict[str, Any] = {
        "sequence_tokens": row.tokens,
        "doc_tokens": row.doc_tokens,
        "documents": row.documents,
        "chunk": job.step.chunk,
        "sequences_per_step": all_rows,
        "inputs": memory.inputs / GIB,
        "target_pass": memory.pass_ / GIB,
        "module": memory.module / GIB,
        "peak": memory.peak / GIB,
        "memory_bytes": asdict(memory),
        "mostly": memory.largest(),
        "pflop": (target_flops(plan.size, usual) + job.step.flops) / 1e15,
        "steps": steps,
    }
    if plan.on_cpu:
        return found
    times = ranks.seconds(job, layout, plan.gpu, rows=all_rows // layout.ranks, stored=stored)
    return found | {
        "fits": "yes" if fits(memory.peak, plan.gpu.memory_bytes) else "no",
        "largest_sequence_tokens": plan.largest(row, given),
        "seconds": times.to_json(),
        "step_s": times.step,
        "tokens_per_s": all_rows * row.tokens / times.step,
        "hours": None if steps is None else steps * times.step / 3600,
    }


def _stored(cfg: RunConfig, stage: PackingStage) -> float:
    """The share of a stage's packed sequences whose features are read from disk instead of computed."""
    epochs = stage.epochs or 1.0
    return {"online": 0.0, "fill": max(0.0, 1 - 1 / epochs)}.get(cfg.features.mode, 1.0)


def _steps(cfg: RunConfig, stage: PackingStage, rows: int) -> int | None:
    """Optimizer steps of a stage, or None if they depend on data that is not prepared yet."""
    total = cfg.trainer.max_steps
    if stage.steps:
        return stage.steps
    if stage.fraction and total:
        return round(stage.fraction * total)
    counted = _tokens(cfg)
    if not stage.epochs or counted is None:
        return None
    return int(stage.epochs * counted[1] / (stage.sequence_tokens * rows))


def _tokens(cfg: RunConfig) -> tuple[int, int] | None:
    """Tokens of the data and tokens that are trained on, from `tokens=` or the prepared data."""
    stated = cfg.plan.tokens
    if stated is not None:
        return stated, stated
    counts = prepared_counts(cfg)
    return None if counts is None else (counts["tokens"], counts["tokens"] - counts["val_tokens"])


def duration(plan: RunPlan, stages: list[dict[str, Any]]) -> str:
    """A sentence about the hours of all stages, or about the information that is missing."""
    gpus = f"{plan.layout.ranks} {plan.gpu.name}"
    if any(stage["hours"] is None for stage in stages):
        return (
            "Hours are not known before data is prepared: run longtrain prepare with the same recipe, or "
            "state the training tokens, tokens=200m."
        )
    return f"All stages take {sum(stage['hours'] for stage in stages):.3g} hours on {gpus}, validation aside."


def disk_of(plan: RunPlan) -> dict[str, int | None]:
    """Disk space in bytes; None for values that depend on data that is not prepared yet.

    Raises:
        ConfigError: features are to be stored, and the method cannot read stored features.
    """
    counted, keeping = _tokens(plan.cfg), plan.cfg.features
    checkpoint = disk.checkpoint_bytes(plan.trained, plan.moments)
    tokens = None if counted is None else counted[0]
    found: dict[str, int | None] = {
        "checkpoint": checkpoint,
        "checkpoints_at_most": disk.GENERATIONS * checkpoint,
        "data": None if tokens is None else disk.data_bytes(tokens, plan.size.vocab_size),
    }
    if keeping.mode in ("online", "engine"):  # an engine's files are there already
        return found
    step = plan.job(plan.rows[0], plan.given).step
    if not step.kv and not step.hidden:
        raise ConfigError(
            f"features={keeping.mode}: method={plan.trained_method.name} watches every layer of the target, "
            "which is not stored; pass features=online"
        )
    form = form_of(keeping)
    each = disk.feature_bytes(step, plan.size, form=form.form, top_k=form.top_k)
    return found | {"features_a_token": each, "features": None if tokens is None else tokens * each}

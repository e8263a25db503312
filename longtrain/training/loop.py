"""Runs training: builds Lightning's Trainer, resumes, fits, and writes the summary."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.warnings import PossibleUserWarning

from longtrain import files
from longtrain.errors import ConfigError
from longtrain.files import read_json
from longtrain.log import get_logger
from longtrain.methods.spec import Objective
from longtrain.tables import tokens
from longtrain.training import checkpoint, state, table, zero
from longtrain.training import strategy as strategies
from longtrain.training.callbacks import Checkpoints, ProgressBar
from longtrain.training.metrics import Metrics, peak_memory
from longtrain.training.module import TrainModule
from longtrain.training.optim import Optim
from longtrain.training.ranks import connect, gather, share, told_when_lost
from longtrain.training.settings import LoopConfig

log = get_logger(__name__)

OUTPUTS = (
    "checkpoints",
    "metrics.csv",
    "speed.csv",
    "curves.png",
    "summary.json",
    "config.yaml",
    "provenance.json",
)
"""Files that a run writes to its folder."""


HOST_THREADS = 4
"""CPU threads of an operator while a GPU trains."""


def build_trainer(
    loop: LoopConfig,
    folder: Path,
    *,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[Any] = (),
    seed: int = 0,
) -> Trainer:
    """Build Lightning's Trainer without its own output to disk or screen, and seed all generators.

    Raises:
        ConfigError: DeepSpeed is requested and missing, or Lightning refuses the hardware or precision.
    """
    strategies.check(loop.strategy, precision=loop.precision)
    zero.check_installed(loop.strategy)
    _quieten()
    deepspeed = strategies.is_deepspeed(loop.strategy)
    plugins = [zero.prepare(loop.strategy, loop.precision)] if deepspeed else []
    seed_everything(seed, workers=True, verbose=False)
    try:
        trainer = Trainer(
            accelerator=loop.accelerator,
            devices=loop.devices,
            num_nodes=loop.num_nodes,
            strategy=loop.strategy,
            precision=None if deepspeed else loop.precision,  # type: ignore[arg-type]
            max_steps=loop.max_steps or -1,
            gradient_clip_val=loop.gradient_clip_val,
            check_val_every_n_epoch=None,
            log_every_n_steps=loop.log_every,
            deterministic=loop.deterministic,
            default_root_dir=folder,
            callbacks=list(callbacks),
            logger=list(loggers),
            plugins=plugins,  # type: ignore[arg-type]
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,  # the data module handles ranks
            **{"max_epochs": -1, **loop.lightning},
        )
    except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:
        raise ConfigError(
            f"Lightning refuses the trainer settings: {' '.join(str(error).split())}"
        ) from error
    trainer.accumulate_grad_batches = loop.sequences_of_a_rank(trainer.world_size)
    _without_lightnings_signals(trainer)
    return trainer


def _without_lightnings_signals(trainer: Trainer) -> None:
    """Leave signals to `callbacks.Checkpoints` alone.

    Lightning 2.6 tells all ranks before each micro-batch whether rank 0 got SIGTERM, and ignores an error of
    that broadcast. When rank 0 is gone, the ranks next to it would go on to their next collective call and
    wait for those that still wait for the broadcast, until the process group's time limit of 30 minutes. Its
    signal handlers broadcast too, at a moment at which the other ranks may do something else.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]


def clean(folder: Path) -> None:
    """Start anew: move an earlier run's files to `before_N`, so that nothing is lost or mixed up."""
    left = [folder / name for name in OUTPUTS if (folder / name).exists()]
    if not left:
        return
    number = 1 + len(list(folder.glob("before_*")))
    (folder / f"before_{number}").mkdir()
    for path in left:
        path.rename(folder / f"before_{number}" / path.name)


def fit(
    objective: Objective,
    data: LightningDataModule,
    trainer: Trainer,
    *,
    optim: Optim,
    loop: LoopConfig,
    folder: Path,
    max_steps: int,
    facts: Mapping[str, Any] | None = None,
    begin: Callable[[], None] | None = None,
    resume: str = "auto",
    show_progress: bool = True,
    draw_curves: bool = True,
) -> dict[str, Any]:
    """Train until `max_steps`, from the run's last checkpoint if there is one.

    Args:
        objective: the objective, with the module to train.
        data: yields `Batch`; continues at its `start_batch`.
        trainer: result of `build_trainer`.
        optim: optimiser and schedule.
        loop: the loop's settings.
        folder: the folder of the run, for checkpoints, metrics and the summary.
        max_steps: optimiser steps.
        facts: settings that a checkpoint must share with the run that resumes from it.
        begin: called on rank 0 once it is certain that the run may continue in this folder, before it trains.
        resume: auto, never or a checkpoint's path.
        show_progress: a bar, or lines where there is no terminal.
        draw_curves: write `curves.png` at the end.

    Returns:
        The summary, also in `summary.json`.

    Raises:
        ConfigError: the checkpoint belongs to other settings.
        ArtifactError: the checkpoint is damaged.
        TrainingError: the loss is not finite, the disk is full, or another rank is gone.
        Stopped: a signal asked to stop; the run is saved.
    """
    checkpoints = folder / "checkpoints"
    facts = {
        **(facts or {}),
        "trainer.max_steps": max_steps,
        "trainer.sequences_per_step": trainer.accumulate_grad_batches * trainer.world_size,
        "trainer.precision": loop.precision,
        "trainer.gradient_clip_val": loop.gradient_clip_val,
    }
    connect(trainer)
    start = share(trainer, lambda: checkpoint.find(checkpoints, resume))
    first = 0
    if start is not None:
        saved = checkpoint.read(start)
        checkpoint.check_facts(saved, facts)
        first = saved.step
        log.info("resumed step=%d path=%s", first, start)
        if first >= max_steps and (folder / "summary.json").exists():
            log.info("nothing to do: trained to step=%d already", first)
            return read_json(folder / "summary.json")
    if begin is not None and trainer.is_global_zero:
        begin()
    checkpoints.mkdir(parents=True, exist_ok=True)
    _set_steps(trainer, loop, max_steps)
    module = TrainModule(objective, optim, facts=facts)
    if start is not None:
        module.resume = lambda: state.restore(trainer, module, saved)
    bar = ProgressBar(enabled=show_progress)
    metrics = Metrics(folder, every=loop.log_every, listeners=[bar.show])
    saving = Checkpoints(
        checkpoints,
        metrics,
        every_steps=loop.checkpoint_every_steps,
        every_minutes=loop.checkpoint_every_minutes,
    )
    trainer.callbacks.extend([metrics, saving, bar])  # type: ignore[attr-defined]
    began = time.perf_counter()
    with _numerics(loop), told_when_lost(checkpoints):
        trainer.fit(module, datamodule=data)
    summary = _summary(
        module,
        metrics,
        gather(trainer, peak_memory()),
        first=first,
        step=trainer.global_step,
        seconds=time.perf_counter() - began,
    )
    if trainer.is_global_zero:
        files.write_files(folder, {"summary.json": files.as_json(summary)})
        if draw_curves:
            table.draw(folder / "metrics.csv", folder / "curves.png", title_of(facts or {}))
    return summary


def title_of(facts: Mapping[str, Any]) -> str:
    """Describe a run by its method, target and text length, as far as its facts state them."""
    longest = max((int(stage.get("doc_tokens") or 0) for stage in facts.get("data.stages") or ()), default=0)
    target = Path(str(facts.get("target.name") or "")).name
    parts = [f"training of {facts.get('method.name', 'a module')}"]
    parts += [f"for {target}"] if target else []
    parts += [f"on texts of up to {tokens(longest)} tokens"] if longest else []
    return " ".join(parts)


def _set_steps(trainer: Trainer, loop: LoopConfig, max_steps: int) -> None:
    """Set the run's length and validation interval, known only once the data is planned."""
    trainer.fit_loop.epoch_loop.max_steps = max_steps
    if loop.val_every < 1:
        trainer.limit_val_batches = 0
        return
    trainer.val_check_interval = min(loop.val_every, max_steps) * trainer.accumulate_grad_batches


@contextmanager
def _numerics(loop: LoopConfig) -> Iterator[None]:
    """Context manager that enables TF32 and limits host threads while training on CUDA.

    With a thread for every core, the small host operators of a step wait for each other longer than they
    compute. Both settings are restored, so that a later job in the same process is not affected.
    """
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    if loop.accelerator != "cpu" and torch.cuda.is_available():
        torch.set_float32_matmul_precision(loop.matmul_precision)
        torch.set_num_threads(min(threads, HOST_THREADS))
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)


def _summary(
    module: TrainModule, metrics: Metrics, peaks: list[int], *, first: int, step: int, seconds: float
) -> dict[str, Any]:
    tokens = module.seen["sequence_tokens"]
    newest = {key: value if math.isfinite(value) else None for key, value in metrics.newest.items()}
    return {
        "steps": step,
        "steps_this_session": step - first,
        "tokens": tokens,
        "labels": module.seen["tokens"],
        "documents": module.seen["documents"],
        "final_loss": newest.get("train/loss"),
        "final": {key: value for key, value in newest.items() if key.startswith(("train/", "val/"))},
        "training_seconds": round(module.seen["seconds"], 3),
        "wall_seconds_this_session": round(seconds, 3),
        "tokens_per_s": round(tokens / max(module.seen["seconds"], 1e-9), 1),
        "peak_memory_bytes": max(peaks),
        "peak_memory_bytes_by_rank": peaks,
        "gather_wait_share": metrics.gather_wait_share,
    }


def _quieten() -> None:
    """Silence Lightning's own log lines, which would be doubled, and its advice about other data loaders."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    warnings.filterwarnings("ignore", message=".*in eval mode at the start of training.*")
    warnings.filterwarnings("ignore", message=".*configure_gradient_clipping.*")
    warnings.filterwarnings("ignore", message=".*overridden `transfer_batch_to_device`.*")
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")

"""`longtrain train`: train a module against a frozen target; resumes automatically."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain import provenance
from longtrain.errors import ConfigError
from longtrain.jobs import features, loggers, train_lock
from longtrain.jobs.planning.run_plan import RunPlan, check_strategy
from longtrain.jobs.planning.target_shape import config_file
from longtrain.jobs.setup import NO_CUDA, load_artifact, load_tensors
from longtrain.log import get_logger, on_first_rank
from longtrain.targets.at_hand import folder_at_hand
from longtrain.targets.config_file import read_config
from longtrain.targets.info import check_supported

if TYPE_CHECKING:
    from torch import Tensor, nn

    from longtrain.config import ArtifactSource, MethodChoice, RunConfig
    from longtrain.methods.spec import DataRun, Objective
    from longtrain.targets.info import TargetInfo
    from longtrain.targets.model import Target
    from longtrain.training.settings import LoopConfig

log = get_logger(__name__)


def run(cfg: RunConfig) -> None:
    """Train `cfg.method` until its last step, or resume an earlier run of the same name.

    Raises:
        ConfigError: a setting is wrong, or differs from the run to resume.
        ArtifactError: a checkpoint or the artifact of `init` is damaged.
        TrainingError: the loss is not finite, or the disk is full.
        SystemExit: a signal stopped the run and a checkpoint was saved: with 128 plus the signal's number
            (143 after SIGTERM, 130 after Ctrl-C), so that later commands do not continue as if it were
            trained.
        KeyboardInterrupt: after a second Ctrl-C, with nothing saved since the last checkpoint.
    """
    from longtrain.training import ranks

    with train_lock.held(cfg.run_dir) as alone:
        method, loop = _checked(cfg)
        cfg = loggers.with_wandb_id(cfg, folder_of(cfg), anew=cfg.resume == "never" and alone)
        trainer = _trainer(cfg, loop)
        ranks.share(trainer, lambda: train_lock.refuse_second(cfg.name, cfg.run_dir, alone))
        plan = RunPlan(cfg, devices=trainer.num_devices, nodes=trainer.num_nodes)
        plan.refuse_lack(trainer.strategy.root_device)
        target = _target(cfg, method, trainer)
        _ = plan.trained  # raises before data are prepared if `optim` does not suit the module
        data = _data(cfg, method, trainer, target)
        module, facts = _module(cfg, method, target, data)
        named = (facts["data"]["name"], data.sha256)
        stored = features.stored(cfg.features, target, data=named, rank=trainer.global_rank)
        objective = _objective(method, module, stored, target, data)
        summary = _fit(cfg, loop, trainer, objective, data, stored, facts)
        ranks.leave(trainer)
        _report(summary, folder_of(cfg))


def folder_of(cfg: RunConfig) -> Path:
    """The folder of a training run's files."""
    return cfg.run_dir / "train"


def _trainer(cfg: RunConfig, loop: LoopConfig) -> Any:
    """Lightning's trainer, with the ranks initialised."""
    from longtrain.training import loop as training

    trainer = training.build_trainer(
        loop,
        folder_of(cfg),
        callbacks=loggers.instances(cfg.callbacks.get("extra")),
        loggers=loggers.instances(cfg.loggers),
        seed=cfg.seed,
    )
    training.connect(trainer)
    return trainer


def _target(cfg: RunConfig, method: MethodChoice, trainer: Any) -> Target | None:
    """The frozen target, or None for a method that trains a target."""
    if method.spec.export is not None:
        return None
    target = features.load_for_training(
        cfg.target, cfg.features, seed=cfg.seed, device=str(trainer.strategy.root_device)
    )
    if method.spec.check_target is not None:
        method.spec.check_target(method.settings, target.info)
    return target


def _module(
    cfg: RunConfig, method: MethodChoice, target: Target | None, data: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """The module with its initial weights, and the facts that a resumed run must share."""
    info = None if target is None else target.info
    module = method.spec.build(method.settings, info)
    facts = {
        **_facts(cfg, method, info, data),
        **_load_init(cfg.init, cfg.artifact_source, method, module, target),
    }
    if method.spec.from_data is not None and info is not None and facts["init"] is None:
        facts["data"] |= method.spec.from_data(module, method.settings, info, data.data)
    return module, facts


def _objective(
    method: MethodChoice, module: nn.Module, stored: features.Stored, target: Target | None, data: Any
) -> Objective:
    """The training objective, connected to the target or its stored features."""
    from longtrain.data.packing.module import DataModule

    assert method.spec.objective is not None  # refused by `_checked`
    objective = method.spec.objective(module, stored.target, method.settings)
    stored.follow(objective)
    if target is not None:
        objective.register_forward_hook(lambda *_: target.join_ranks())
    if objective.per_document and isinstance(data, DataModule):
        data.refuse_cuts()
    return objective


def _fit(
    cfg: RunConfig,
    loop: LoopConfig,
    trainer: Any,
    objective: Objective,
    data: Any,
    stored: features.Stored,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Train to the last step and close the stored features; returns the summary.

    Raises:
        SystemExit: a signal stopped the run, and a checkpoint was saved.
    """
    from longtrain.training import checkpoint
    from longtrain.training import loop as training
    from longtrain.training.callbacks import Stopped

    folder = folder_of(cfg)
    if trainer.is_global_zero and cfg.resume == "never":
        training.clean(folder)
    steps = _max_steps(loop.max_steps, data.n_steps)
    features.check_stored(stored, data, steps=steps, validates=loop.val_every > 0)

    def begin() -> None:
        made_of = {key: facts[key] for key in ("data", "target", "init")}
        provenance.write(folder, cfg.values, **made_of)
        for logger in trainer.loggers:
            logger.log_hyperparams(provenance.redact(cfg.values))

    try:
        return training.fit(
            objective,
            data,
            trainer,
            optim=cfg.optim,
            loop=loop,
            folder=folder,
            max_steps=steps,
            facts=checkpoint.flat({**facts, "features": stored.lean}),
            begin=begin,
            resume=cfg.resume,
            show_progress=bool(cfg.callbacks["progress"]),
            draw_curves=bool(cfg.callbacks["curves"]),
        )
    except Stopped as stopped:
        log.info("%s", stopped)
        left = stopped
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # Lightning's own way to end at Ctrl-C
            raise KeyboardInterrupt from None
        raise
    finally:
        stored.close()
    trainer.strategy.barrier()  # no rank exits with an error while another one is still writing
    raise SystemExit(128 + signal.Signals[left.name])


def _report(summary: Mapping[str, Any], folder: Path) -> None:
    """Log the run's result and its loss curve."""
    log.info("trained %s folder=%s", _outcome(summary), folder)
    if drawn := _drawn(folder):
        log.info("%s", drawn)


def _outcome(summary: Mapping[str, Any]) -> str:
    """The run's result in one line; a loss that was not measured is left out."""
    losses = {"loss": summary["final_loss"], "val_loss": summary["final"].get("val/loss")}
    shown = "".join(f" {key}={value:.4f}" for key, value in losses.items() if value is not None)
    counted = f"steps={summary['steps']} tokens={summary['tokens']}"
    return f"{counted}{shown} tokens_per_s={summary['tokens_per_s']:.0f}"


def _drawn(folder: Path) -> str:
    """The loss curve in one line, and the path of its picture; empty if there are no metrics."""
    from longtrain.jobs.exporting.evidence import curves_of
    from longtrain.tables import number, sparkline

    if not on_first_rank() or (curve := curves_of(folder / "metrics.csv").get("train/loss")) is None:
        return ""
    first, last = number(curve.values[0]), number(curve.values[-1])
    picture = f" picture={folder / 'curves.png'}" if (folder / "curves.png").is_file() else ""
    return f"loss {sparkline(curve.values)} {first} to {last}{picture}"


def check(cfg: RunConfig) -> None:
    """Refuse wrong settings and missing resources of this machine; loads nothing.

    A dry run, which may be run on a login node, requires the target but no GPU; a run requires
    the GPU but not the target, which an earlier job may download. A dry run that torchrun or srun
    started also checks the connection and resources of the ranks (`ranks_check`).

    Raises:
        ConfigError: a setting is wrong, there is nothing to train, or the target or a GPU is missing.
        ArtifactError: a file of the target is missing.
    """
    import torch

    method, loop = _checked(cfg)
    loggers.check(cfg.loggers)
    plan, asked, spec = RunPlan(cfg), cfg.target, method.spec
    file = config_file(asked.path) if spec.export is None and asked.path else None
    if file is not None:
        if cfg.features.mode != "engine":
            check_supported(read_config(file.parent), str(asked.path))
        if spec.check_target is not None:
            spec.check_target(method.settings, plan.info)
    if file is not None or spec.export is not None:
        _ = plan.trained  # raises if the module cannot be built, or not be trained with `optim`
    if not cfg.dry_run:
        if loop.accelerator in ("cuda", "gpu") and not torch.cuda.is_available():
            raise ConfigError(NO_CUDA.format(loop.accelerator))
        return
    if spec.export is None:
        whole = asked.weights == "stored" and cfg.features.mode != "engine"
        folder_at_hand(asked.required_path(), weights=whole)
    from longtrain.jobs import ranks_check  # imports torch

    if (rank := ranks_check.Rank.here()) is not None:
        ranks_check.check(cfg, rank)


def _checked(cfg: RunConfig) -> tuple[MethodChoice, LoopConfig]:
    """The method and the loop settings, with strategy and Lightning arguments instantiated from their
    `_target_`.
    """
    from hydra.utils import instantiate

    from longtrain.training import zero

    method = cfg.trained_method
    if method.spec.objective is None:
        raise ConfigError(
            f"method={method.name} has nothing to train; use it: longtrain generate method={method.name} "
            "prompt=TEXT"
        )
    settings = method.settings
    if method.spec.check_data is not None:
        method.spec.check_data(settings, cfg.data)
    check_strategy(cfg)
    _ = cfg.features
    loop = cfg.trainer
    zero.check_installed(loop.strategy)
    built = {
        key: instantiate(value, _convert_="all")
        for key in ("strategy", "lightning")
        if isinstance(value := getattr(loop, key), Mapping)
    }
    return method, replace(loop, **built).resolved()


def _data(cfg: RunConfig, method: MethodChoice, trainer: Any, target: Target | None) -> Any:
    """The data module: the method's own data, or documents, prepared now if they are missing or
    out of date.
    """
    from longtrain.methods.spec import DataRun
    from longtrain.training.ranks import first

    about = DataRun(
        home=cfg.home,
        max_steps=cfg.trainer.max_steps,
        accumulate=trainer.accumulate_grad_batches,
        world=trainer.world_size,
        rank=trainer.global_rank,
        seed=cfg.seed,
        pin_memory=trainer.strategy.root_device.type == "cuda",
    )

    def make() -> Any:
        if method.spec.data is not None:
            return method.spec.data(method.settings, cfg.data_values, about)
        try:
            return _documents(cfg, about, target)
        finally:
            if target is not None and about.rank == 0:
                target.join_ranks()  # also after a failure, so that the other ranks learn of it

    if target is not None and about.rank > 0:
        target.join_ranks()  # rank 0 may have the target generate answers
    return first(trainer, make)


def _documents(cfg: RunConfig, about: DataRun, target: Target | None) -> Any:
    from longtrain.data.packing.module import DataModule
    from longtrain.jobs.prepare import ensure_prepared

    tokenizer = target.tokenizer if target is not None else None
    context = target.info.max_positions if target is not None else None
    return DataModule(
        ensure_prepared(cfg.data, tokenizer, home=cfg.home, context_tokens=context, target=target),
        cfg.data,
        accumulate=about.accumulate,
        seed=about.seed,
        total_steps=about.max_steps,
        context_tokens=context,
        vocab_size=target.info.vocab_size if target is not None else None,
        pin_memory=about.pin_memory,
        world=about.world,
        rank=about.rank,
    )


def _max_steps(asked: int | None, planned: int | None) -> int:
    """The number of steps: `trainer.max_steps`, or the data's length, which must be at least that."""
    steps = planned if asked is None else asked
    if steps is None:
        raise ConfigError(
            "trainer.max_steps=null, and the data does not determine how long the run is; set it"
        )
    if planned is not None and steps > planned:
        raise ConfigError(
            f"data.stages hold {planned} optimizer steps, trainer.max_steps={asked} asks for more; lengthen "
            "data.stages or lower trainer.max_steps"
        )
    return steps


def _load_init(
    init: str | None, source: ArtifactSource, method: MethodChoice, module: nn.Module, target: Target | None
) -> dict[str, Any]:
    """Load initial weights from the artifact `init`, if one is named; returns facts about it for the run."""
    if not init:
        return {"init": None}
    artifact, begins = load_artifact(init, source), method.spec.begins
    if artifact.method != method.name and artifact.method not in begins:
        raise ConfigError(
            f"init={init} was trained by method={artifact.method}, this run is method={method.name}"
        )
    if target is not None:
        artifact.target.check(target.info)
    advice = f"use the settings it was trained with: {artifact.config}"
    tensors: Mapping[str, Tensor] = artifact.tensors
    if artifact.method != method.name:
        tensors = begins[artifact.method](method.settings, tensors, artifact.config)
        tensors = {**module.state_dict(), **tensors}
    load_tensors(module, tensors, f"init={init}", advice)
    log.info("init=%s", init)
    return {"init": {"artifact": init, "step": artifact.provenance.get("step")}}


def _facts(cfg: RunConfig, method: MethodChoice, info: TargetInfo | None, data: Any) -> dict[str, Any]:
    """Facts that a resumed run must share with the earlier run: method, target, data, order."""
    who = (
        {}
        if info is None
        else {
            "name": info.name,
            "shape": [info.n_layers, info.hidden_size, info.vocab_size],
            "weights": info.known_weights,
            "tokenizer": info.tokenizer_hash,
        }
    )
    return {
        "seed": cfg.seed,
        "method": method.values,
        "optim": cfg.values["optim"],
        "data": {
            "name": cfg.data_values.get("name"),
            "sha256": data.sha256,
            "stages": cfg.data_values.get("stages"),
        },
        "target": who,
    }

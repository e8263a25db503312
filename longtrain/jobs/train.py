"""Train a module against a frozen target: data, module, objective, trainer, fit; resumes by itself."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from longtrain import files, methods, provenance
from longtrain.errors import ConfigError
from longtrain.jobs import features, loggers, outline
from longtrain.jobs.setup import NO_CUDA, NO_TARGET, load_artifact, load_tensors, plain, target_key
from longtrain.journals import unchecked
from longtrain.log import get_logger, on_first_rank
from longtrain.settings import convert
from longtrain.settings import read as typed
from longtrain.targets.at_hand import folder_at_hand
from longtrain.targets.config_file import read_config
from longtrain.targets.info import check_supported

if TYPE_CHECKING:
    from torch import Tensor, nn

    from longtrain.features.settings import FeatureSettings
    from longtrain.methods.spec import DataRun, MethodSpec
    from longtrain.targets.info import TargetInfo
    from longtrain.targets.model import Target
    from longtrain.training.optim import Optim
    from longtrain.training.settings import LoopConfig

log = get_logger(__name__)


def run(cfg: DictConfig) -> None:
    """Train `cfg.method` until its last step, or go on where an earlier run of the same name was.

    Raises:
        ConfigError: a setting is wrong, or differs from those of the run to resume.
        ArtifactError: a checkpoint or the artifact of `init` is damaged.
        TrainingError: the loss is not finite, or the disk is full.
        SystemExit: when a signal asked the run to leave and it was saved: with 128 and the signal's number
            (143 after SIGTERM, 130 after Ctrl-C), so that nothing goes on as if it were trained.
        KeyboardInterrupt: after a second Ctrl-C, with nothing saved since the last checkpoint.
    """
    with ExitStack() as held:
        alone = True
        if on_first_rank():
            alone = held.enter_context(files.lock(_lock_of(cfg)))
        _train(cfg, alone=alone)


def _train(cfg: DictConfig, *, alone: bool) -> None:
    """Train, while no other process trains this run.

    Args:
        cfg: the resolved configuration.
        alone: whether this is so; False on the first rank ends all of them before anything is loaded.
    """
    from longtrain.data.rows.module import DataModule
    from longtrain.training import checkpoint, ranks
    from longtrain.training import loop as training
    from longtrain.training.callbacks import Stopped

    spec, config, optim, settings, keeping = _settings(cfg)
    assert spec.objective is not None  # refused there
    folder = Path(cfg.run_dir) / "train"
    resume = str(cfg.get("resume", "auto"))
    loggers.settle_wandb_id(cfg, folder, anew=resume == "never" and alone)
    trainer = training.build_trainer(
        settings,
        folder,
        callbacks=loggers.instances(cfg.callbacks.get("extra")),
        loggers=loggers.instances(cfg.get("logger")),
        seed=convert(cfg.seed, int, "seed"),
    )
    settings = settings.spread(trainer.world_size)
    training.connect(trainer)
    ranks.share(trainer, lambda: _refuse_second(cfg, alone))
    device = str(trainer.strategy.root_device)
    outline.check_room(
        cfg, device=trainer.strategy.root_device, devices=trainer.num_devices, nodes=trainer.num_nodes
    )
    target = None if spec.export is not None else features.load_for_training(cfg, keeping, device=device)
    if target is not None and spec.check_target is not None:
        spec.check_target(config, target.info)
    data = _data(cfg, spec, config, trainer=trainer, settings=settings, target=target)
    module = spec.build(config, target.info if target is not None else None)
    start_from = _load_init(cfg, spec, module, target)
    taken: dict[str, Any] = {}
    if spec.from_data is not None and target is not None and start_from["init"] is None:
        taken = spec.from_data(module, config, target.info, data.data)
    about = (cfg.data.name if cfg.data else None, data.sha256)
    kept = features.stored(keeping, target, data=about, rank=trainer.global_rank)
    objective = spec.objective(module, kept.target, config)
    kept.follow(objective)
    if target is not None:
        objective.register_forward_hook(lambda *_: target.settle())
    if objective.per_document and isinstance(data, DataModule):
        data.refuse_cuts()
    facts = {**_facts(cfg, target.info if target is not None else None, data), **start_from}
    facts["features"] = kept.lean
    facts["data"] |= taken
    if trainer.is_global_zero and resume == "never":
        training.clean(folder)

    steps = _max_steps(settings.max_steps, data.n_steps)
    features.check_stored(kept, data, steps=steps, validates=settings.val_every > 0)

    def begin() -> None:
        made_of = {key: facts[key] for key in ("data", "target", "init")}
        if keeping.mode != "online":
            made_of["unchecked"] = unchecked(Path(str(keeping.folder)))
        provenance.write(folder, plain(cfg), **made_of)
        loggers.describe_run(trainer, plain(cfg))

    left: Stopped | None = None
    try:
        summary = training.fit(
            objective,
            data,
            trainer,
            optim=optim,
            loop=settings,
            folder=folder,
            max_steps=steps,
            facts=checkpoint.flat(facts),
            begin=begin,
            resume=resume,
            show_progress=bool(cfg.callbacks.progress),
            draw_curves=bool(cfg.callbacks.curves),
        )
    except Stopped as stopped:
        log.info("%s", stopped)
        left = stopped
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # Lightning's own way to end at Ctrl-C
            raise KeyboardInterrupt from None
        raise
    finally:
        kept.close()
    if left is not None:
        trainer.strategy.barrier()  # none ends with an error while another one still writes
        raise SystemExit(128 + signal.Signals[left.name])
    ranks.leave(trainer)
    log.info("trained %s folder=%s", _outcome(summary), folder)
    if drawn := _drawn(folder):
        log.info("%s", drawn)


def refuse_second(cfg: DictConfig) -> None:
    """Refuse to train what another process trains at this moment; nothing is made or loaded.

    Raises:
        ConfigError: one does.
    """
    if on_first_rank() and _lock_of(cfg).exists():
        with files.lock(_lock_of(cfg)) as alone:
            _refuse_second(cfg, alone)


def _lock_of(cfg: DictConfig) -> Path:
    """The file whose lock a run holds while it is trained."""
    return Path(cfg.run_dir) / ".train.lock"


def _refuse_second(cfg: DictConfig, alone: bool) -> None:
    """Refuse to train what another process trains.

    Raises:
        ConfigError: one does.
    """
    if not alone:
        raise ConfigError(
            f"name={cfg.name} is being trained by another process ({cfg.run_dir}); wait for it, or pass "
            "name=OTHER"
        )


def _outcome(summary: Mapping[str, Any]) -> str:
    """What a run came to, in one line; a loss that nobody measured is left out."""
    losses = {"loss": summary["final_loss"], "val_loss": summary["final"].get("val/loss")}
    said = "".join(f" {key}={value:.4f}" for key, value in losses.items() if value is not None)
    counted = f"steps={summary['steps']} tokens={summary['tokens']}"
    return f"{counted}{said} tokens_per_s={summary['tokens_per_s']:.0f}"


def _drawn(folder: Path) -> str:
    """The curve of the loss in one line, and where its picture is; empty where there are no figures."""
    from longtrain.jobs.exporting.evidence import curves_of
    from longtrain.tables import number, sparkline

    if not on_first_rank() or (curve := curves_of(folder / "metrics.csv").get("train/loss")) is None:
        return ""
    first, last = number(curve.values[0]), number(curve.values[-1])
    picture = f" picture={folder / 'curves.png'}" if (folder / "curves.png").is_file() else ""
    return f"loss {sparkline(curve.values)} {first} to {last}{picture}"


def check(cfg: DictConfig) -> None:
    """Refuse wrong settings and what this machine lacks; loads nothing.

    A dry run, which may be done where a job is sent from, asks for the target, and not for a GPU; a run asks
    for the GPU, and not for the target, which a job before it may fetch. A dry run that torchrun or srun
    started also tries what the ranks need of each other and of their machines (`ranks_check`).

    Raises:
        ConfigError: a setting is wrong, there is nothing to train, or the target or a GPU is not here.
        ArtifactError: a file of the target is missing.
    """
    import torch

    spec, config, _, loop, _ = _settings(cfg)
    loggers.check(cfg)
    if spec.export is None and cfg.target and (file := outline.config_file(str(cfg.target.path or ""))):
        most = target_key(cfg, "max_positions")
        check_supported(read_config(file.parent), str(cfg.target.path), max_positions=most)
        if spec.check_target is not None:
            spec.check_target(config, outline.target_shape(cfg)[0])
    if not cfg.dry_run:
        if loop.accelerator in ("cuda", "gpu") and not torch.cuda.is_available():
            raise ConfigError(NO_CUDA.format(loop.accelerator))
        return
    if spec.export is None:
        if not (cfg.target and cfg.target.path):
            raise ConfigError(NO_TARGET)
        folder_at_hand(str(cfg.target.path), weights=target_key(cfg, "weights") == "stored")
        outline.trained_weights(spec, config, outline.target_shape(cfg)[0])  # refuses what cannot be built
    from longtrain.jobs import ranks_check  # which imports torch

    if (rank := ranks_check.Rank.here()) is not None:
        ranks_check.check(cfg, rank)


def _settings(cfg: DictConfig) -> tuple[MethodSpec, Any, Optim, LoopConfig, FeatureSettings]:
    """What is typed about the method, the optimizer, the loop and the features, checked."""
    from longtrain.jobs.prepare import data_config
    from longtrain.training.optim import Optim

    spec = _spec(cfg)
    if spec.objective is None:
        raise ConfigError(
            f"method={spec.name} has nothing to train; use it: longtrain generate method={spec.name} "
            "prompt=TEXT"
        )
    config: Any = typed(spec.config, plain(cfg.method), "method", ignore=("name",))
    if spec.check_data is not None:
        spec.check_data(config, data_config(cfg))
    optim = typed(Optim, plain(cfg.optim), "optim")
    settings, keeping = _loop(cfg), features.settings_of(cfg)
    return spec, config, optim, settings, keeping


def _spec(cfg: DictConfig) -> MethodSpec:
    if cfg.method is None:
        raise ConfigError(
            "no method is chosen (method=null); pass +recipe=NAME, or method=NAME with one of: "
            f"{', '.join(methods.names())}"
        )
    return methods.get(str(cfg.method.name))


def _loop(cfg: DictConfig) -> LoopConfig:
    """`cfg.trainer`, its strategy and further Lightning arguments built from their `_target_`."""
    from hydra.utils import instantiate

    from longtrain.training import zero
    from longtrain.training.settings import LoopConfig

    values = plain(cfg.trainer)
    outline.check_strategy(cfg)
    zero.check_installed(values.get("strategy"))
    for key in ("strategy", "lightning"):
        if isinstance(values.get(key), Mapping):
            values[key] = instantiate(values[key], _convert_="all")
    return typed(LoopConfig, values, "trainer").settled()


def _data(
    cfg: DictConfig,
    spec: MethodSpec,
    config: Any,
    *,
    trainer: Any,
    settings: LoopConfig,
    target: Target | None,
) -> Any:
    """The method's own rows, or documents prepared now if they are missing or out of date."""
    from longtrain.methods.spec import DataRun
    from longtrain.training.ranks import first

    about = DataRun(
        home=Path(cfg.home),
        max_steps=settings.max_steps,
        accumulate=settings.accumulate_grad_batches,
        world=trainer.world_size,
        rank=trainer.global_rank,
        seed=int(cfg.seed),
        pin_memory=trainer.strategy.root_device.type == "cuda",
    )

    def make() -> Any:
        if spec.data is not None:
            return spec.data(config, plain(cfg.data) if cfg.data else {}, about)
        try:
            return _documents(cfg, about, target)
        finally:
            if target is not None and about.rank == 0:
                target.settle()  # after a failure too: so the others come to where they are told of it

    if target is not None and about.rank > 0:
        target.settle()  # the first rank may have it write answers
    return first(trainer, make)


def _documents(cfg: DictConfig, about: DataRun, target: Target | None) -> Any:
    from longtrain.data.rows.module import DataModule
    from longtrain.jobs.prepare import data_config, ensure_prepared

    tokenizer = target.tokenizer if target is not None else None
    context = target.info.max_positions if target is not None else None
    return DataModule(
        ensure_prepared(cfg, tokenizer, context_tokens=context, target=target),
        data_config(cfg),
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
    """`trainer.max_steps`, or how long the data lasts; that must be long enough."""
    steps = planned if asked is None else asked
    if steps is None:
        raise ConfigError("trainer.max_steps=null, and the data does not say how long the run is; set it")
    if planned is not None and steps > planned:
        raise ConfigError(
            f"data.stages hold {planned} optimizer steps, trainer.max_steps={asked} asks for more; lengthen "
            "data.stages or lower trainer.max_steps"
        )
    return steps


def _load_init(cfg: DictConfig, spec: MethodSpec, module: nn.Module, target: Target | None) -> dict[str, Any]:
    """Start from the weights of `cfg.init`, if it names an artifact; what it was, as a fact of the run."""
    if not cfg.init:
        return {"init": None}
    artifact = load_artifact(str(cfg.init), cfg)
    if artifact.method != spec.name and artifact.method not in spec.begins:
        raise ConfigError(
            f"init={cfg.init} was trained by method={artifact.method}, this run is method={spec.name}"
        )
    if target is not None:
        artifact.target.check(target.info)
    advice = f"use the settings it was trained with: {artifact.config}"
    tensors: Mapping[str, Tensor] = artifact.tensors
    if artifact.method != spec.name:
        config: Any = typed(spec.config, plain(cfg.method), "method", ignore=("name",))
        tensors = spec.begins[artifact.method](config, tensors, artifact.config)
        tensors = {**module.state_dict(), **tensors}
    load_tensors(module, tensors, f"init={cfg.init}", advice)
    log.info("init=%s", cfg.init)
    return {"init": {"artifact": str(cfg.init), "step": artifact.provenance.get("step")}}


def _facts(cfg: DictConfig, info: TargetInfo | None, data: Any) -> dict[str, Any]:
    """What a resumed run must share with the run before: who was trained on what, in which order."""
    who = (
        {}
        if info is None
        else {
            "name": info.name,
            "shape": [info.n_layers, info.hidden_size, info.vocab_size],
            "weights": info.weights_hash,
            "tokenizer": info.tokenizer_hash,
        }
    )
    stages = plain(cfg.data).get("stages") if cfg.data else None
    return {
        "seed": int(cfg.seed),
        "method": plain(cfg.method),
        "optim": plain(cfg.optim),
        "data": {
            "name": cfg.data.name if cfg.data else None,
            "sha256": data.sha256,
            "stages": stages,
        },
        "target": who,
    }

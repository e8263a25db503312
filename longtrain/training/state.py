"""Collects a run's state from the trainer for a checkpoint, and restores it, for any strategy.

A checkpoint is always taken between two optimiser steps, so the step count determines where the data
continues, even if the same sequences are then distributed over other ranks. Lightning's own checkpoints and
loop state are not used.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longtrain.errors import ArtifactError
from longtrain.training import checkpoint, ranks, zero
from longtrain.training.checkpoint import OPTIMIZER, STATE, WEIGHTS, Saved
from longtrain.training.module import TrainModule
from longtrain.training.plain import pack, unpack
from longtrain.training.tensor_file import Piece, pieces_of
from longtrain.training.zero import ZeroShards


def save(trainer: Any, folder: Path) -> Path:
    """Save the run as `last.ckpt` of a folder and keep the one before; every rank calls this.

    Raises:
        TrainingError: the disk is full or cannot be written; the earlier checkpoints are unchanged.
    """
    module: TrainModule = trainer.lightning_module
    engine = zero.engine_of(trainer)
    tensors: dict[str, Tensor] = {}
    about = {
        "step": trainer.global_step,
        "ranks": trainer.world_size,
        "facts": module.facts,
        "seen": dict(module.seen),
        "state": pack(_rest(trainer), tensors, "state"),
    }
    pieces = {
        WEIGHTS: _weights(module.trained, engine),
        OPTIMIZER: engine.moments() if engine else _moments(trainer.optimizers[0], module.trained),
        STATE: pieces_of(tensors),
    }
    failed = checkpoint.write(folder, about, pieces, writer=trainer.is_global_zero)
    failed = trainer.strategy.broadcast(failed)
    if failed is not None:
        raise checkpoint.cannot_save(folder, trainer.global_step, failed)
    return folder / checkpoint.LAST


def restore(trainer: Any, module: TrainModule, saved: Saved) -> None:
    """Resume a run at the start of its next optimiser step; called on every rank, with its optimiser.

    Raises:
        ArtifactError: a trained tensor is missing, has another shape, or is unknown to this module.
    """
    engine = zero.engine_of(trainer)
    _load_weights(module.trained, saved.tensors(WEIGHTS), engine)
    moments = saved.tensors(OPTIMIZER)
    if engine:
        engine.load_moments(moments)
    else:
        _load_moments(trainer.optimizers[0], module.trained, moments)
    _load_rest(trainer, unpack(saved.about["state"], saved.tensors(STATE)), module)
    module.seen.update(saved.about["seen"])
    _go_to(trainer, saved.step)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the saved tensors of a module: parameters, frozen ones too, and persistent buffers, by name."""
    return module.state_dict(keep_vars=True)


def _weights(module: nn.Module, engine: ZeroShards | None) -> list[Piece]:
    def piece(name: str, value: Tensor) -> Piece:
        if engine and value.requires_grad:
            return Piece(name, tuple(value.shape), torch.float32, lambda: engine.full(value))
        return Piece(name, tuple(value.shape), value.dtype, lambda: value)

    return [piece(name, value) for name, value in weights_of(module).items()]


def _load_weights(module: nn.Module, saved: Mapping[str, Tensor], engine: ZeroShards | None) -> None:
    mine = weights_of(module)
    missing, unknown = sorted(set(mine) - set(saved)), sorted(set(saved) - set(mine))
    shapes = sorted(name for name in set(mine) & set(saved) if mine[name].shape != saved[name].shape)
    if missing or unknown or shapes:
        raise ArtifactError(
            f"checkpoint does not fit the module: missing {missing[:4]}, unknown {unknown[:4]}, "
            f"other shape {shapes[:4]}; use the method's settings it was trained with"
        )
    with torch.no_grad():
        for name, value in mine.items():
            value.copy_(saved[name])
            if engine and value.requires_grad:
                engine.set_full(value)


def _moments(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[Piece]:
    """Return the state of torch's optimiser, as `PARAMETER.KEY` for every tensor of every parameter."""
    named = {
        f"{name}.{key}": value
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    return pieces_of(named)


def _load_moments(optimizer: torch.optim.Optimizer, module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    states = zero.by_parameter(saved)
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {key: saved[f"{name}.{key}"].clone() for key in states[name]}
        for index, name in enumerate(names[id(parameter)] for parameter in order)
        if name in states
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _rest(trainer: Any) -> dict[str, Any]:
    """Return schedule, loss scaler, callbacks, and the random states of all ranks."""
    callbacks = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
    return {
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "scaler": trainer.precision_plugin.state_dict(),
        "callbacks": {key: value for key, value in callbacks.items() if value},
        "random": ranks.gather(trainer, random_state()),
    }


def _load_rest(trainer: Any, rest: Mapping[str, Any], module: TrainModule) -> None:
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    scheduler.load_state_dict(rest["schedule"])
    # LambdaLR sets the rate only at its next step, so the first step after a resume needs it here.
    for group, rate in zip(scheduler.optimizer.param_groups, rest["schedule"]["_last_lr"], strict=True):
        group["lr"] = rate
    if rest["scaler"]:
        trainer.precision_plugin.load_state_dict(rest["scaler"])
    for callback in trainer.callbacks:
        if callback.state_key in rest["callbacks"]:
            callback.load_state_dict(rest["callbacks"][callback.state_key])
    if len(rest["random"]) == trainer.world_size:  # with another number of ranks data is distributed anew
        module.after_resume = _setter(rest["random"][trainer.global_rank])


def _setter(state: Mapping[str, Any]) -> Callable[[], None]:
    return lambda: set_random_state(state)


def _go_to(trainer: Any, step: int) -> None:
    """Set Lightning's counters, which determine `global_step`, and the first batch of the data."""
    epoch = trainer.fit_loop.epoch_loop
    epoch.automatic_optimization.optim_progress.optimizer.step.total.completed = step
    epoch._batches_that_stepped = step
    # micro-batches of one rank; with other ranks or accumulation the number differs, the data does not
    rows = step * trainer.accumulate_grad_batches
    total: Any = epoch.batch_progress.total
    total.ready = total.started = total.processed = total.completed = rows
    data = getattr(trainer, "datamodule", None)
    if data is not None:
        data.start_batch = rows


def random_state() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators, as numbers and tensors."""
    version, words, gauss = random.getstate()
    state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, np_gauss = state
    return {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [
            name,
            torch.from_numpy(keys.astype(np.int64)),
            int(position),
            int(has_gauss),
            float(np_gauss),
        ],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the states that `random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())

"""DeepSpeed's ZeRO-1 and 2: settings under Lightning, and access to whole tensors behind the shards.

It relies on internals of DeepSpeed 0.19.8 and Lightning 2.6.6; each is used in one place.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor

from longtrain.errors import ConfigError
from longtrain.training.strategy import check_stage, is_deepspeed
from longtrain.training.tensor_file import Piece


class RowPrecision(DeepSpeedPrecision):
    """Keeps trained weights in fp32 as under DDP, with autocast if the trainer's precision is bf16-mixed.

    Lightning's own plugin would cast the trained weights to bf16 (DeepSpeed's `bf16` section), so that
    losses differ from DDP's by about 0.4%.

    Args:
        precision: bf16-mixed or 32-true.
    """

    def __init__(self, precision: str) -> None:
        super().__init__("32-true")
        self.mixed = precision == "bf16-mixed"

    def convert_input(self, data: Any) -> Any:
        """Return the batch unchanged: token ids and masks need no conversion."""
        return data

    def autocast(self, device: str) -> AbstractContextManager[Any]:
        """Return the autocast context for use inside the engine's forward, which disables outer ones."""
        return torch.autocast(device, torch.bfloat16) if self.mixed else nullcontext()

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Backpropagate through the engine.

        Lightning has divided the loss by the accumulated micro-batches, and `engine.backward` would do it
        again unless `scale_wrt_gas` is False.
        """
        super().backward(tensor, model, optimizer, *args, scale_wrt_gas=False, **kwargs)


def check_installed(strategy: Any) -> None:
    """Refuse to train with DeepSpeed if it is not installed.

    Args:
        strategy: `trainer.strategy`, typed or built.

    Raises:
        ConfigError: it is not installed; the message says how to install it.
    """
    if is_deepspeed(strategy) and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "trainer.strategy needs DeepSpeed, which is not installed; run: pip install "
            "'longtrain[deepspeed]', or choose trainer=one_gpu or trainer=ddp"
        )


def prepare(strategy: DeepSpeedStrategy, precision: str) -> RowPrecision:
    """Complete the configuration that Lightning passes to DeepSpeed; return the matching precision plugin.

    Raises:
        ConfigError: another stage than 1 and 2, which DeepSpeed's own configuration may name.
    """
    config: Any = strategy.config
    check_stage((config.get("zero_optimization") or {}).get("stage"))
    # Lightning takes this size from the loader's batch sampler, but ours has none; DeepSpeed only prints it.
    config.setdefault("train_micro_batch_size_per_gpu", 1)
    # With offload DeepSpeed refuses torch's AdamW by default; its own needs a compiler on every node.
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    return RowPrecision(precision)


def engine_of(trainer: Any) -> ZeroShards | None:
    """Return access to the shards of a trainer that is set up with DeepSpeed, else None."""
    if not isinstance(trainer.strategy, DeepSpeedStrategy):
        return None
    return ZeroShards(trainer.strategy.deepspeed_engine, trainer.lightning_module.trained)


class ZeroShards:
    """Gives access to trained weights and optimiser state behind DeepSpeed's shards, one parameter at a time.

    Every rank calls the methods that return whole tensors, for the same parameters in the same order.

    Args:
        engine: DeepSpeed's engine, of ZeRO-1 or 2.
        module: the trained module, whose parameters the engine's optimiser has.
    """

    def __init__(self, engine: Any, module: torch.nn.Module) -> None:
        self.engine, self.module = engine, module
        self.optimizer: Any = engine.optimizer
        """DeepSpeed's optimiser: a flat fp32 partition per parameter group, and torch's optimiser of it."""

    def grad_norm(self) -> Tensor | float:
        """Return the last step's global gradient norm before clipping; infinite if it was skipped."""
        return self.engine.get_global_grad_norm()

    def full(self, parameter: Tensor) -> Tensor:
        """Return a parameter's fp32 weights, whole, on its device."""
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter)

    def set_full(self, parameter: Tensor) -> None:
        """Copy the parameter's values to this rank's partition."""
        from deepspeed.utils import safe_set_full_fp32_param

        safe_set_full_fp32_param(parameter, parameter.detach().float())

    def moments(self) -> list[Piece]:
        """Return the optimiser's state, `PARAMETER.KEY` in fp32, each piece gathered when it is read."""
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_states()
        found = []
        for name, parameter, state in self._states():
            for key, flat in sorted(state.items()):
                shape = tuple(parameter.shape) if flat.ndim else ()

                def read(parameter: Tensor = parameter, key: str = key, flat: Tensor = flat) -> Tensor:
                    return safe_get_full_optimizer_state(parameter, key) if flat.ndim else flat

                found.append(Piece(f"{name}.{key}", shape, torch.float32, read))
        return found

    def load_moments(self, saved: Mapping[str, Tensor]) -> None:
        """Load this rank's share of every parameter's optimiser state into its partition."""
        from deepspeed.utils import safe_set_full_optimizer_state

        states = by_parameter(saved)
        self._make_states({key for keys in states.values() for key in keys})
        for name, parameter, state in self._states():
            for key in states.get(name, ()):
                value = saved[f"{name}.{key}"].to(state[key].device, torch.float32)
                if value.ndim:
                    safe_set_full_optimizer_state(parameter, value, key)
                else:  # the step count, shared by a group's parameters
                    state[key].copy_(torch.maximum(state[key], value))

    def _states(self) -> list[tuple[str, Tensor, dict[str, Tensor]]]:
        """Return name, parameter and flat state of its group (empty before a first step) for all."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        flat = self.optimizer.single_partition_of_fp32_groups
        inner = self.optimizer.optimizer.state
        return [
            (names[id(parameter)], parameter, inner.get(flat[index], {}))
            for index, group in enumerate(self.optimizer.bit16_groups)
            for parameter in group
        ]

    def _make_states(self, keys: set[str]) -> None:
        """Create the optimiser's state before its first step, in which torch would create it."""
        inner = self.optimizer.optimizer
        for group, flat in zip(
            inner.param_groups, self.optimizer.single_partition_of_fp32_groups, strict=True
        ):
            on = flat.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
            inner.state[flat] = {
                key: torch.zeros((), device=on) if key == "step" else torch.zeros_like(flat) for key in keys
            }
        self._link_states()

    def _link_states(self) -> None:
        """Link every parameter to its part of the flat state.

        DeepSpeed does this when its first group has taken a first step, and then never again, so that the
        parameters of the other groups would have none.
        """
        self.optimizer._hp_optimizer_states_linked = False
        self.optimizer._lazy_init_hp_params_optimizer_state()


def by_parameter(saved: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return parameter name -> keys of its state, from names such as `layer.weight.exp_avg`."""
    found: dict[str, list[str]] = {}
    for name in saved:
        parameter, _, key = name.rpartition(".")
        found.setdefault(parameter, []).append(key)
    return found

"""DeepSpeed, for those who have several GPUs and installed the extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from torch import Tensor

from longtrain.errors import ConfigError


class RowPrecision(DeepSpeedPrecision):
    """DeepSpeed's precision, leaving the batch alone: token ids and masks have nothing to convert."""

    def convert_input(self, data: Any) -> Any:
        """The batch as it is."""
        return data


def is_deepspeed(strategy: Any) -> bool:
    """Whether a strategy's configuration (`trainer.strategy`) means DeepSpeed."""
    name = strategy.get("_target_", "") if isinstance(strategy, Mapping) else str(strategy)
    return "deepspeed" in name.lower()


def check_available(strategy: Any) -> None:
    """Say which extra is missing before Lightning does in its own words.

    Raises:
        ConfigError: DeepSpeed is asked for and not installed.
    """
    if is_deepspeed(strategy) and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            "trainer.strategy needs DeepSpeed, which is not installed; run: pip install "
            "'longtrain[deepspeed]', or choose trainer=one_gpu or trainer=ddp"
        )


def full_state(folder: Path) -> dict[str, Tensor]:
    """The fp32 weights of a DeepSpeed checkpoint, its shards put together.

    Raises:
        ConfigError: DeepSpeed is not installed.
    """
    check_available("deepspeed")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(
        str(folder), tag="checkpoint", exclude_frozen_parameters=True
    )

"""The loggers of a training run: which packages they need, how they are built, and the id of a W&B run."""

from __future__ import annotations

import secrets
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from longtrain import files, provenance
from longtrain.errors import ConfigError
from longtrain.log import on_first_rank

LOGGER_PACKAGES = {"wandb": ("wandb",), "tensorboard": ("tensorboard", "tensorboardX")}
"""Loggers of `conf/logger` that need a package of an extra -> the packages of which one must be there."""


def settle_wandb_id(cfg: DictConfig, folder: Path, *, anew: bool) -> None:
    """Give a run its own id for Weights & Biases, and the same one when it goes on.

    Args:
        cfg: the resolved configuration; `logger.wandb.id` is set where it is null.
        folder: of the run; the id is kept in it.
        anew: draw another one, for a run that starts again.
    """
    wandb = (cfg.get("logger") or {}).get("wandb")
    if wandb is None or wandb.get("id") is not None or not on_first_rank():
        return
    file = folder / "wandb_id.txt"
    if anew or not file.is_file():
        files.write_text(file, secrets.token_hex(8))
    wandb.id = file.read_text(encoding="utf-8").strip()


def check(cfg: DictConfig) -> None:
    """Refuse a logger whose package is not installed.

    Raises:
        ConfigError: what to install.
    """
    for name, packages in LOGGER_PACKAGES.items():
        if (cfg.get("logger") or {}).get(name) is not None and not any(map(find_spec, packages)):
            raise ConfigError(
                f"logger={name} needs the package {packages[0]}; run: pip install 'longtrain[{name}]', or "
                "pass logger=csv"
            )


def instances(values: DictConfig | None) -> list[Any]:
    """Third-party objects of a group: name -> mapping with `_target_`."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return [instantiate(value) for value in (values or {}).values() if value is not None]
    except InstantiationException as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(
            f"cannot build a logger or callback: {reason}; is its package installed?"
        ) from error


def describe_run(trainer: Any, values: dict[str, Any]) -> None:
    """Give every logger the configuration of the run, without secrets."""
    for logger in trainer.loggers:
        logger.log_hyperparams(provenance.redact(values))

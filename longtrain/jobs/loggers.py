"""Loggers of a training run: required packages, construction, and the id of a W&B run."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain import files
from longtrain.errors import ConfigError
from longtrain.log import on_first_rank

if TYPE_CHECKING:
    from longtrain.config import RunConfig

LOGGER_PACKAGES = {"wandb": ("wandb",), "tensorboard": ("tensorboard", "tensorboardX")}
"""Loggers of `conf/logger` that need an optional package -> the packages of which one must be installed."""


def with_wandb_id(cfg: RunConfig, folder: Path, *, anew: bool) -> RunConfig:
    """A configuration with an id for the run in Weights & Biases; a resumed run gets the same id.

    Args:
        cfg: the configuration; if `logger.wandb.id` is null, it is set.
        folder: the run's folder, in which the id is stored.
        anew: draw a new id, for a run that starts from the beginning.
    """
    wandb = cfg.loggers.get("wandb")
    if wandb is None or wandb.get("id") is not None or not on_first_rank():
        return cfg
    file = folder / "wandb_id.txt"
    if anew or not file.is_file():
        files.write_text(file, secrets.token_hex(8))
    known = {**wandb, "id": file.read_text(encoding="utf-8").strip()}
    return cfg.having(logger={**cfg.loggers, "wandb": known})


def check(asked: Mapping[str, Any]) -> None:
    """Refuse a logger of the group `logger` whose package is not installed.

    Raises:
        ConfigError: a package is missing; the message says what to install.
    """
    for name, packages in LOGGER_PACKAGES.items():
        if asked.get(name) is not None and not any(map(find_spec, packages)):
            raise ConfigError(
                f"logger={name} needs the package {packages[0]}; run: pip install 'longtrain[{name}]', or "
                "pass logger=csv"
            )


def instances(values: Mapping[str, Any] | None) -> list[Any]:
    """Instantiate the third-party objects of a group: name -> mapping with `_target_`."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return [instantiate(value) for value in (values or {}).values() if value is not None]
    except InstantiationException as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(
            f"cannot build a logger or callback: {reason}; is its package installed?"
        ) from error

"""A lock file in the run's folder, so that only one process at a time trains a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from longtrain import files
from longtrain.errors import ConfigError
from longtrain.log import on_first_rank

if TYPE_CHECKING:
    from longtrain.config import RunConfig


@contextmanager
def held(cfg: RunConfig) -> Iterator[bool]:
    """Context manager: hold the run's lock on rank 0; yields False if another process holds it."""
    if not on_first_rank():
        yield True
        return
    with files.lock(_file(cfg)) as alone:
        yield alone


def refuse_running(cfg: RunConfig) -> None:
    """Refuse to train a run that another process is training now; creates and loads nothing.

    Raises:
        ConfigError: another process is training it.
    """
    if on_first_rank() and _file(cfg).exists():
        with files.lock(_file(cfg)) as alone:
            refuse_second(cfg, alone)


def refuse_second(cfg: RunConfig, alone: bool) -> None:
    """Refuse to train a run that another process is training.

    Args:
        cfg: the configuration.
        alone: the value yielded by `held`.

    Raises:
        ConfigError: another process is training it.
    """
    if not alone:
        raise ConfigError(
            f"name={cfg.name} is being trained by another process ({cfg.run_dir}); wait for it, or pass "
            "name=OTHER"
        )


def _file(cfg: RunConfig) -> Path:
    """The lock file of a run."""
    return cfg.run_dir / ".train.lock"

"""A lock file in the run's folder, so that only one process at a time trains a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longtrain import files
from longtrain.errors import ConfigError
from longtrain.log import on_first_rank

LOCK = ".train.lock"
"""The lock file in a run's folder."""


@contextmanager
def held(run_dir: Path) -> Iterator[bool]:
    """Context manager: hold a run's lock on rank 0; yields False if another process holds it."""
    if not on_first_rank():
        yield True
        return
    with files.lock(run_dir / LOCK) as alone:
        yield alone


def refuse_running(name: str, run_dir: Path) -> None:
    """Refuse to train a run that another process is training now; creates and loads nothing.

    Raises:
        ConfigError: another process is training it.
    """
    if on_first_rank() and (run_dir / LOCK).exists():
        with files.lock(run_dir / LOCK) as alone:
            refuse_second(name, run_dir, alone)


def refuse_second(name: str, run_dir: Path, alone: bool) -> None:
    """Refuse to train a run that another process is training.

    Args:
        name: the name of the run.
        run_dir: its folder.
        alone: the value yielded by `held`.

    Raises:
        ConfigError: another process is training it.
    """
    if not alone:
        raise ConfigError(
            f"name={name} is being trained by another process ({run_dir}); wait for it, or pass name=OTHER"
        )

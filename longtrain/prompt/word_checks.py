"""Checks that need no torch import: formats, reports, uploads and stages."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from longtrain import methods
from longtrain.assets import manifest_of
from longtrain.data.config import NO_STAGES
from longtrain.errors import ConfigError, missing_package
from longtrain.files import read_json

if TYPE_CHECKING:
    from longtrain.config import RunConfig


def exported(cfg: RunConfig) -> None:
    """Refuse an unknown format, one that the method lacks, and an upload that cannot succeed.

    Raises:
        ConfigError: a value is wrong; the message says what is allowed.
    """
    from longtrain.jobs.exporting import formats, push

    if (form := formats.asked(cfg)) is not None:
        own = all(Path(name).name == cfg.name for name in cfg.artifacts)
        asked = [cfg.method.name] if cfg.method is not None and own else _methods_of_artifacts(cfg)
        for method in asked:
            if form not in methods.formats().get(method, ()):
                formats.refuse_method(method, form)
        if form == "peft" and find_spec("peft") is None:
            raise missing_package("format=peft", "peft")
    if cfg.push:
        push.check(cfg)


def _methods_of_artifacts(cfg: RunConfig) -> list[str]:
    """The methods of the named artifacts that are on this machine."""
    found = []
    for name in cfg.artifacts:
        if (file := manifest_of(name, cfg.checkpoints)) is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):  # raises when it is loaded
                found.append(str(read_json(file)["method"]))
    return found


def staged(cfg: RunConfig) -> None:
    """Refuse training on data without stages, which only preparing does not need.

    Raises:
        ConfigError: there are no stages.
    """
    if "sources" in cfg.data_values and not cfg.data_values.get("stages"):
        raise ConfigError(NO_STAGES)

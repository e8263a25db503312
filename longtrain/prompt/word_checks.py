"""Checks that need no torch import: formats, reports, uploads and stages."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from longtrain import methods
from longtrain.assets import MANIFEST, bundled_artifacts
from longtrain.errors import ConfigError, missing_package
from longtrain.files import read_json
from longtrain.settings import wrong

if TYPE_CHECKING:
    from longtrain.config import RunConfig

NO_STAGES = (
    "data.stages is empty; give e.g. data.stages=[{fraction: 1, sequence_tokens: 4096, doc_tokens: 4096}]"
)


def exported(cfg: RunConfig) -> None:
    """Refuse an unknown format, one that the method lacks, and an upload that cannot succeed.

    Raises:
        ConfigError: a value is wrong; the message says what is allowed.
    """
    form = cfg.export.format
    if form is not None:
        known = methods.formats()
        names = sorted({name for formats in known.values() for name in formats})
        if form not in names:
            raise wrong("format", form, ", ".join(names))
        own = all(Path(name).name == cfg.name for name in cfg.artifacts)
        asked = [cfg.method.name] if cfg.method is not None and own else _methods_of_artifacts(cfg)
        for method in asked:
            if form not in known.get(method, ()):
                from longtrain.jobs.exporting import formats

                formats.refuse_method(method, form)
        if form == "peft" and find_spec("peft") is None:
            raise missing_package("format=peft", "peft")
    if cfg.push:
        from longtrain.jobs.exporting import push

        push.check(cfg)


def _methods_of_artifacts(cfg: RunConfig) -> list[str]:
    """The methods of the named artifacts that are on this machine."""
    found, shipped = [], bundled_artifacts()
    for name in cfg.artifacts:
        places = (Path(name), cfg.checkpoints / name, shipped.get(name, Path(name)))
        file = next((one / MANIFEST for one in places if (one / MANIFEST).is_file()), None)
        if file is not None:
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

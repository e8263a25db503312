"""Words that no job could use, told before torch is imported: formats, reports, uploads and stages."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from longtrain import methods
from longtrain.assets import MANIFEST, bundled_artifacts
from longtrain.errors import ConfigError
from longtrain.files import read_json
from longtrain.jobs.setup import artifact_names, plain
from longtrain.settings import wrong

if TYPE_CHECKING:
    from omegaconf import DictConfig

NO_STAGES = "data.stages is empty; give e.g. data.stages=[{fraction: 1, row_tokens: 4096, doc_tokens: 4096}]"


def exported(cfg: DictConfig) -> None:
    """Refuse a format that there is not, or not for the method, and an upload that cannot be.

    Raises:
        ConfigError: what is wrong, and what is allowed.
    """
    if cfg.format is not None:
        known = methods.formats()
        names = sorted({name for formats in known.values() for name in formats})
        if cfg.format not in names:
            raise wrong("format", cfg.format, ", ".join(names))
        own = all(Path(name).name == str(cfg.name) for name in artifact_names(cfg))
        asked = [str(cfg.method.name)] if cfg.method is not None and own else _methods_of_artifacts(cfg)
        for method in asked:
            if cfg.format not in known.get(method, ()):
                from longtrain.jobs.exporting import formats

                formats.refuse_method(method, str(cfg.format))
        if cfg.format == "peft" and find_spec("peft") is None:
            raise ConfigError("format=peft needs the package peft; run: pip install 'longtrain[peft]'")
    if cfg.push:
        from longtrain.jobs.exporting import push

        push.check(cfg)


def _methods_of_artifacts(cfg: DictConfig) -> list[str]:
    """The methods of the artifacts that are named and lie on this machine."""
    found, shipped = [], bundled_artifacts()
    for name in artifact_names(cfg):
        places = (Path(name), Path(cfg.home) / "checkpoints" / name, shipped.get(name, Path(name)))
        file = next((one / MANIFEST for one in places if (one / MANIFEST).is_file()), None)
        if file is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):  # whoever loads it says what is wrong
                found.append(str(read_json(file)["method"]))
    return found


def reported(cfg: DictConfig) -> None:
    """Refuse a report that there is not, or whose package is missing.

    Raises:
        ConfigError: what is wrong, and what is allowed.
    """
    from longtrain.evaluation.reporting.page import check_plotly
    from longtrain.jobs.finished import compare

    if compare.wants_page(cfg):
        check_plotly()


def staged(cfg: DictConfig) -> None:
    """Refuse to train on data without stages; preparing it needs none.

    Raises:
        ConfigError: there are none.
    """
    data = plain(cfg.get("data"))
    if isinstance(data, Mapping) and "sources" in data and not data.get("stages"):
        raise ConfigError(NO_STAGES)

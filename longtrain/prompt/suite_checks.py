"""What is wrong with the group `suite`, told within a second, without reading the modules of suites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError
from longtrain.jobs.setup import NO_TARGET, artifact_names, plain
from longtrain.settings import AUTO, Lengths, convert

if TYPE_CHECKING:
    from omegaconf import DictConfig

WORDS_FOR_TEXT = ("bundled", "data")
"""Values of a key `text` that are no paths."""


def common_keys(cfg: DictConfig) -> None:
    """Refuse wrong values of keys that mean the same in every suite.

    Raises:
        ConfigError: what is no list of token counts.
        DataError: no text is where it is said to be.
    """
    from longtrain.evaluation.corpora import files_of_kinds, text_files

    for key, value in _leaves("suite", plain(cfg.suite)):
        name = key.rpartition(".")[2]
        if name == "lengths" and value not in (AUTO, None, []):
            convert(value, Lengths, key)
        elif name == "text" and isinstance(value, str) and value not in WORDS_FOR_TEXT:
            text_files(value)
    text, kinds = cfg.suite.get("text"), plain(cfg.suite.get("kinds"))
    if isinstance(text, str) and text not in WORDS_FOR_TEXT and isinstance(kinds, list):
        files_of_kinds(text, kinds=kinds)


def evaluated(cfg: DictConfig) -> None:
    """Refuse a suite of `eval` that cannot be run, or that measures what nothing brings.

    Raises:
        ConfigError: what is wrong, and what is allowed.
        DataError: see `common_keys`.
    """
    from longtrain.evaluation.suites import BROUGHT
    from longtrain.jobs import eval as job

    if cfg.compare is not None:
        return
    job.known_suite(cfg)
    job.parts_of(cfg)
    job.settings_of(cfg)
    common_keys(cfg)
    given, listed = artifact_names(cfg), plain(cfg.suite.get("policies") or cfg.suite.get("systems")) or []
    if (said := BROUGHT.get(str(cfg.suite.name))) and not (given or cfg.method or listed):
        raise ConfigError(said)
    if not (
        given
        or (cfg.target and cfg.target.path)
        or any("artifact" in one for one in listed if isinstance(one, Mapping))
    ):
        raise ConfigError(NO_TARGET)  # artifacts know theirs


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every key within a mapping, dotted, with its value."""
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, inside in value.items():
        yield from _leaves(f"{key}.{name}", inside)

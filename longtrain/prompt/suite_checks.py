"""Quick checks of the group `suite`, without importing the suites' modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from longtrain.config import NO_TARGET
from longtrain.errors import ConfigError, Gathered
from longtrain.settings import AUTO, Lengths, convert

if TYPE_CHECKING:
    from longtrain.config import RunConfig

WORDS_FOR_TEXT = ("bundled", "data")
"""Values of a key `text` that are not paths."""


def common_keys(cfg: RunConfig) -> None:
    """Refuse wrong values of keys with the same meaning in every suite.

    Raises:
        ConfigError: a value is not a list of token counts.
        DataError: a text's path does not exist.
    """
    from longtrain.evaluation.corpora import files_of_kinds, text_files

    for key, value in _leaves("suite", cfg.suite.values):
        name = key.rpartition(".")[2]
        if name == "lengths" and value not in (AUTO, None, []):
            convert(value, Lengths, key)
        elif name == "text" and isinstance(value, str) and value not in WORDS_FOR_TEXT:
            text_files(value)
    text, kinds = cfg.suite.values.get("text"), cfg.suite.values.get("kinds")
    if isinstance(text, str) and text not in WORDS_FOR_TEXT and isinstance(kinds, list):
        files_of_kinds(text, kinds=kinds)


def evaluated(cfg: RunConfig) -> None:
    """Refuse a suite of `eval` that cannot run, or whose required draft, evictor or selector is missing.

    Raises:
        ConfigError: the suite cannot run; the message says what is allowed.
        DataError: see `common_keys`.
    """
    from longtrain.evaluation.suites import BROUGHT
    from longtrain.jobs import eval as job

    gathered = Gathered()
    with gathered.one():
        if cfg.evaluation.compare is not None:
            return
        cfg.evaluation.part()
    with gathered.one():
        job.known_suite(cfg.suite.name)
    with gathered.one():
        _ = cfg.suite.harness
    with gathered.one():
        common_keys(cfg)
    with gathered.one():
        suite, given = cfg.suite.values, cfg.artifacts
        listed = suite.get("policies") or suite.get("systems") or []
        if (message := BROUGHT.get(cfg.suite.name)) and not (given or cfg.method or listed):
            raise ConfigError(message)
        named = any("artifact" in one for one in listed if isinstance(one, Mapping))
        if not (given or cfg.target.path or named):
            raise ConfigError(NO_TARGET)  # artifacts name their target
    gathered.raise_all()


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every nested key of a mapping in dotted form, with its value."""
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, inside in value.items():
        yield from _leaves(f"{key}.{name}", inside)

"""What the benches of single operators share: measure row by row, keep what is there, show a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from longtrain import provenance
from longtrain.bench import report
from longtrain.costs.model import Sizes
from longtrain.errors import ConfigError
from longtrain.jobs.setup import convert, plain
from longtrain.settings import parse_tokens
from longtrain.targets.shapes import SHAPES

SIZE_KEYS = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size",
    "vocab_size",
)  # fmt: skip
"""What a shape given as a mapping must have; `head_dim` may be left out."""


def lengths_of(cfg: DictConfig) -> list[int]:
    """`suite.lengths` in tokens.

    Raises:
        ConfigError: no list, an empty one, or one with what is no token count.
    """
    given = plain(cfg.suite.lengths)
    if not isinstance(given, list) or not given:
        raise ConfigError(f"lengths={given}; allowed: one or more prompt lengths, e.g. [1k,4k]")
    return [parse_tokens(length) for length in given]


def batches_of(cfg: DictConfig) -> list[int]:
    """`suite.batches`.

    Raises:
        ConfigError: no list, an empty one, or one with a number below 1.
    """
    batches: list[int] = convert(plain(cfg.suite.batches), list[int], "suite.batches")
    if not batches or min(batches) < 1:
        raise ConfigError(f"suite.batches={batches}; allowed: one or more batch sizes, each 1 or more")
    return batches


def keys_of(shape: Any) -> dict[str, Any]:
    """`suite.shape` as the keys of a `config.json`.

    Raises:
        ConfigError: no such name, or a mapping in which a size is missing or is none.
    """
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ConfigError(f"suite.shape={shape}; known: {', '.join(SHAPES)}")
        return dict(SHAPES[shape])
    if not isinstance(shape, Mapping):
        raise ConfigError(f"suite.shape={shape}; allowed: {', '.join(SHAPES)}, or a mapping")
    if missing := [key for key in SIZE_KEYS if key not in shape]:
        raise ConfigError(f"suite.shape={shape} lacks {', '.join(missing)}; add them, or pass a name")
    for key in (*SIZE_KEYS, "head_dim"):
        value = shape.get(key)
        if value is None and key == "head_dim":
            continue
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"suite.shape has {key}={value}; allowed: 1 or more")
    if Sizes.of_keys(shape).head_dim < 1:
        raise ConfigError(f"suite.shape={shape} leaves heads of size 0; add head_dim, or raise hidden_size")
    return dict(shape)


def show(
    cfg: DictConfig, name: str, measured: Iterable[dict[str, Any]], columns: Mapping[str, str]
) -> tuple[Path, list[dict[str, Any]]]:
    """Write `NAME.json` again whenever there is a new row, then print the table.

    Args:
        cfg: of the run; settings that were wrong have been refused.
        name: of the file.
        measured: rows as they come.
        columns: heading -> key of a row.

    Returns:
        the file and its rows.
    """
    folder = Path(cfg.run_dir) / "bench"
    provenance.write(folder, plain(cfg))
    rows: list[dict[str, Any]] = []
    path = folder / f"{name}.json"
    for row in measured:
        rows.append(row)
        path = report.write(folder, name, settings=plain(cfg.suite), rows=rows)
    console = Console(soft_wrap=True, highlight=False)
    console.print(report.table(rows, columns), markup=False)
    console.print(f"wrote {path}", markup=False)
    return path, rows

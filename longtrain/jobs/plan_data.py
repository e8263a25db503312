"""What is known of a recipe's data before it trains: what was counted, and how many documents a row holds."""

from __future__ import annotations

import glob
import math
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from longtrain.data.config import DataConfig

PACKED_TOKENS = 2**28
"""Larger data is not packed for a plan; the mean length of its documents stands for that of each row."""

Lengths = tuple[float, float]
"""Tokens of a document on average: over all rows of a stage, and in the row that holds the most documents."""


def prepared_folder(cfg: DictConfig) -> Path | None:
    """The newest data of this name, whatever its tokenizer; None where there is none yet."""
    folders = f"{glob.escape(str(cfg.data.name))}-{'[0-9a-f]' * 8}"  # one for each tokenizer
    manifests = (Path(cfg.home) / "data").glob(f"{folders}/manifest.json")
    newest = max(manifests, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else newest.parent


def prepared_counts(cfg: DictConfig) -> dict[str, int] | None:
    """What `prepare` counted in the newest data of this name; None where there is none yet."""
    from longtrain.data.rows.prepared import read_manifest

    folder = prepared_folder(cfg)
    manifest = None if folder is None else read_manifest(folder)
    return None if manifest is None else manifest["counts"]


def document_lengths(cfg: DictConfig, rows_per_step: int) -> list[Lengths | None]:
    """How long documents are in the rows of each stage; None where nobody knows.

    Prepared data is packed as the run will pack it. Else prompts have lengths that are log-uniform between
    those of `data.prompt_tokens`, and the longest answer.

    Raises:
        ConfigError: a key of the data is wrong.
        DataError: prepared data is damaged.
    """
    from longtrain.jobs.prepare import data_config

    config = data_config(cfg)
    counts = prepared_counts(cfg)
    if counts is not None and counts["tokens"] <= PACKED_TOKENS and _has_end(cfg, config):
        return _packed(cfg, config, rows_per_step)
    if counts is not None:
        mean = counts["tokens"] / max(1, counts["documents"])
    elif config.prompt_tokens is not None:
        low, high = config.prompt_tokens
        mean = (low if low == high else (high - low) / math.log(high / low)) + config.answer_tokens
    else:
        return [None for _ in config.stages]
    shown = [min(mean, stage.doc_tokens) for stage in config.stages]
    return [(length, length) for length in shown]


def _has_end(cfg: DictConfig, config: DataConfig) -> bool:
    """Whether the length of the run is known, which shares of it need."""
    return cfg.trainer.get("max_steps") is not None or all(one.fraction is None for one in config.stages)


def _packed(cfg: DictConfig, config: DataConfig, rows_per_step: int) -> list[Lengths | None]:
    """From the rows that the run will have."""
    import numpy as np

    from longtrain.data.rows.pack import plan_run
    from longtrain.data.rows.prepared import Prepared

    folder: Any = prepared_folder(cfg)
    plan = plan_run(
        Prepared.open(folder, verify=False),
        config.stages,
        rows_per_step=rows_per_step,
        seed=int(cfg.seed),
        total_steps=cfg.trainer.get("max_steps"),
        min_doc_tokens=config.min_doc_tokens,
    )
    documents, begin = np.diff(plan.row_ptr), 0
    found: list[Lengths | None] = []
    for stage, steps in zip(config.stages, plan.stage_steps, strict=True):
        here = documents[begin : begin + steps * rows_per_step]
        begin += steps * rows_per_step
        rows = (float(here.mean()), int(here.max())) if len(here) else None
        found.append(None if rows is None else (stage.row_tokens / rows[0], stage.row_tokens / rows[1]))
    return found

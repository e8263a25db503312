"""Facts about a recipe's data before training: token counts, and the number of documents in
packed sequences.
"""

from __future__ import annotations

import glob
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longtrain.config import RunConfig
    from longtrain.data.config import DataConfig

PACKED_TOKENS = 2**28
"""Data with more tokens is not packed for a plan; the mean document length is used instead."""

Lengths = tuple[float, float]
"""Mean tokens of a document: over all sequences of a stage, and in the sequence with the most documents."""


def prepared_folder(cfg: RunConfig) -> Path | None:
    """The newest prepared data of this name, for any tokenizer, or None."""
    folders = f"{glob.escape(str(cfg.data_values['name']))}-{'[0-9a-f]' * 8}"  # one per tokenizer
    manifests = (cfg.home / "data").glob(f"{folders}/manifest.json")
    newest = max(manifests, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else newest.parent


def prepared_counts(cfg: RunConfig) -> dict[str, int] | None:
    """Token counts by `prepare` in the newest data of this name, or None if there is none yet."""
    from longtrain.data.packing.prepared import read_manifest

    folder = prepared_folder(cfg)
    manifest = None if folder is None else read_manifest(folder)
    return None if manifest is None else manifest["counts"]


def document_lengths(cfg: RunConfig, sequences_per_step: int) -> list[Lengths | None]:
    """Document lengths in the packed sequences of each stage; None if unknown.

    Prepared data is packed as in the run. Otherwise prompts are assumed to be log-uniform between
    the bounds of `data.prompt_tokens`, each with the longest answer.

    Raises:
        ConfigError: a key of the data is wrong.
        DataError: prepared data is damaged.
    """
    config = cfg.data
    counts = prepared_counts(cfg)
    if counts is not None and counts["tokens"] <= PACKED_TOKENS and _has_end(cfg, config):
        return _packed(cfg, config, sequences_per_step)
    if counts is not None:
        mean = counts["tokens"] / max(1, counts["documents"])
    elif config.prompt_tokens is not None:
        low, high = config.prompt_tokens
        mean = (low if low == high else (high - low) / math.log(high / low)) + config.answer_tokens
    else:
        return [None for _ in config.stages]
    shown = [min(mean, stage.doc_tokens) for stage in config.stages]
    return [(length, length) for length in shown]


def _has_end(cfg: RunConfig, config: DataConfig) -> bool:
    """True if the length of the run is known, which stages given as shares of it need."""
    return cfg.trainer.max_steps is not None or all(one.fraction is None for one in config.stages)


def _packed(cfg: RunConfig, config: DataConfig, sequences_per_step: int) -> list[Lengths | None]:
    """Document lengths from the packed sequences of the run."""
    import numpy as np

    from longtrain.data.packing.pack import plan_run
    from longtrain.data.packing.prepared import Prepared

    folder: Any = prepared_folder(cfg)
    plan = plan_run(
        Prepared.open(folder, verify=False),
        config.stages,
        sequences_per_step=sequences_per_step,
        seed=cfg.seed,
        total_steps=cfg.trainer.max_steps,
        min_doc_tokens=config.min_doc_tokens,
    )
    documents, begin = np.diff(plan.row_ptr), 0
    found: list[Lengths | None] = []
    for stage, steps in zip(config.stages, plan.stage_steps, strict=True):
        here = documents[begin : begin + steps * sequences_per_step]
        begin += steps * sequences_per_step
        rows = (float(here.mean()), int(here.max())) if len(here) else None
        found.append(
            None if rows is None else (stage.sequence_tokens / rows[0], stage.sequence_tokens / rows[1])
        )
    return found

"""The two formats that engines load, and what marks a folder of each."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from longtrain.methods.draft_folders import CONFIG, read_config
from longtrain.methods.dspark.config import FORMATS

SPECULATORS, FLAT = NAMES = FORMATS
DSPARK, DFLASH = "dspark", "dflash"
ARCHITECTURES = {"Qwen3DSparkModel": DSPARK, "DSparkDraftModel": DSPARK, "DFlashDraftModel": DFLASH}
"""Architecture of a flat folder -> its kind."""
MASK_ROW = "mask_embedding.pt"
"""A file that replaces the mask token's embedding in vLLM's DFlash, and in nothing else."""


class BlockKind(NamedTuple):
    """What a folder holds.

    Args:
        form: the format.
        draft: `dspark`, or `dflash`: without a Markov head, and the anchor predicts nothing.
    """

    form: str
    draft: str


def kind_of(folder: Path) -> BlockKind | None:
    """Return what a folder holds, by its `config.json`; None if that is no such draft."""
    if not (folder / CONFIG).is_file():
        return None
    config = read_config(folder)
    if "speculators_model_type" in config:
        draft = config["speculators_model_type"]
        return BlockKind(SPECULATORS, draft) if draft in (DSPARK, DFLASH) else None
    names = config.get("architectures")
    if config.get("model_type") != "qwen3" or not isinstance(names, list):
        return None
    found = [ARCHITECTURES[str(name)] for name in names if str(name) in ARCHITECTURES]
    return BlockKind(FLAT, found[0]) if found else None

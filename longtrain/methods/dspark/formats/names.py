"""The two formats that engines load, and what marks a folder of each."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from longtrain.methods.draft_folders import CONFIG, read_config
from longtrain.methods.dspark.config import FORMATS

SPECULATORS, FLAT = NAMES = FORMATS
DSPARK, DFLASH, DFLASH2 = "dspark", "dflash", "dflash2"
FILL_IN = (DFLASH, DFLASH2)
"""Kinds of drafts whose anchor predicts nothing; engines know no other."""
ARCHITECTURES = {"Qwen3DSparkModel": DSPARK, "DSparkDraftModel": DSPARK, "DFlashDraftModel": DFLASH}
ARCHITECTURES |= {"DFlash2DraftModel": DFLASH2}
"""Architecture of a flat folder -> its kind."""
OPTIONS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Keys of a DFlash2 folder, in `dflash_config`; a speculators folder has them beside the others."""
MASK_ROW = "mask_embedding.pt"
"""A file that replaces the mask token's embedding in vLLM's DFlash, and in nothing else."""


class BlockKind(NamedTuple):
    """What a folder holds.

    Args:
        form: the format.
        draft: `dspark`, or `dflash`: without a Markov head, and the anchor predicts nothing, or `dflash2`: as
            `dflash`, with convolutions and a selector.
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
        return BlockKind(SPECULATORS, draft) if draft in (DSPARK, *FILL_IN) else None
    names = config.get("architectures")
    if config.get("model_type") != "qwen3" or not isinstance(names, list):
        return None
    found = [ARCHITECTURES[str(name)] for name in names if str(name) in ARCHITECTURES]
    return BlockKind(FLAT, found[0]) if found else None

"""DSpark, DFlash and DFlash2 in the two formats that engines load: `speculators` (vLLM), `flat` (both)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from longtrain.methods.draft_checks import unchanged
from longtrain.methods.draft_folders import (
    CONFIG,
    INDEX,
    MODEL,
    PICKLED,
    engine_files,
    longest_document,
    target_names,
)
from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.formats.card import serving_page
from longtrain.methods.dspark.formats.golden import Blocks
from longtrain.methods.dspark.formats.names import MASK_ROW, NAMES, kind_of
from longtrain.methods.dspark.formats.read import read_folder
from longtrain.methods.dspark.formats.verify import verify_folder
from longtrain.methods.dspark.formats.write import MASK, folder_config, folder_tensors, refuse
from longtrain.methods.dspark.level import without_factors
from longtrain.methods.spec import Formats
from longtrain.methods.vocabulary import IDS, check_vocabulary

if TYPE_CHECKING:
    from longtrain.targets.model import Target


def format_files(
    form: str,
    tensors: Mapping[str, Tensor],
    config: Config,
    target: Target,
    facts: dict[str, Any],
    name: str,
) -> dict[str, bytes]:
    """Return the files of an exported folder, relative path -> content (`Formats.write`).

    Raises:
        ConfigError: engines that read this format would silently ignore a setting, or read it otherwise.
        TargetMismatchError: the draft's vocabulary does not contain an end token of the target.
    """
    refuse(form, config, target.info)
    if IDS in tensors:
        check_vocabulary(tensors[IDS], target.info)
    tensors, config = without_factors(tensors, config)
    known, shown = target_names(target.info)
    outer = folder_config(
        config,
        known,
        form=form,
        mask=int(tensors[MASK]),
        dtype=str(tensors["fc.weight"].dtype).removeprefix("torch."),
        trained_tokens=longest_document(facts),
    )
    return engine_files(
        form,
        config,
        tensors,
        outer=outer,
        inner=folder_tensors(tensors, target.info.vocab_size),
        golden=vars(Blocks.record(tensors, config, target)),
        facts=facts,
        card=serving_page(form, name, config, shown),
    )


FORMATS = Formats(
    names=NAMES,
    patterns=(CONFIG, MODEL, INDEX, "model-*.safetensors", PICKLED, MASK_ROW, "longtrain/*"),
    reads=lambda folder: kind_of(folder) is not None,
    read=unchanged(read_folder),
    refuse=refuse,
    write=format_files,
    verify=verify_folder,
    serves={"speculators": "vLLM", "flat": "vLLM and SGLang"},
)

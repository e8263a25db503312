"""EAGLE-3 drafts in the two formats that engines load: `speculators` (vLLM) and `flat` (SGLang and vLLM)."""

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
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.formats.card import serving_page
from longtrain.methods.eagle3.formats.golden import Proposals
from longtrain.methods.eagle3.formats.names import NAMES, SPECULATORS, format_of
from longtrain.methods.eagle3.formats.read import read_folder
from longtrain.methods.eagle3.formats.verify import verify_folder
from longtrain.methods.eagle3.formats.write import folder_config, folder_tensors, refuse
from longtrain.methods.spec import Formats
from longtrain.methods.vocabulary import IDS, check_vocabulary

if TYPE_CHECKING:
    from longtrain.targets.model import Target

DRAFTED = 4
"""Default length of a server's drafted chain; shorter if fewer depths were trained."""


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
        ConfigError: engines that read this format would silently ignore a setting.
        TargetMismatchError: the draft's vocabulary does not contain an end token of the target.
    """
    refuse(form, config, target.info)
    check_vocabulary(tensors[IDS], target.info)
    own = tensors.get("embed_tokens.weight")
    embed_VE = target.model.model.embed_tokens.weight.detach() if own is None else own
    inner = folder_tensors(
        tensors,
        config,
        form=form,
        vocab_size=target.info.vocab_size,
        embed_VE=embed_VE.cpu() if form == SPECULATORS else None,
    )
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    known, shown = target_names(target.info)
    drafted = min(DRAFTED, config.depths)
    outer = folder_config(
        config, known, form=form, dtype=dtype, trained_tokens=longest_document(facts), drafted=drafted
    )
    golden = Proposals.record(tensors, config, target.info, embed_VE.to(tensors["fc.weight"].dtype))
    card = serving_page(form, name, config, shown, drafted=drafted)
    return engine_files(
        form, config, tensors, outer=outer, inner=inner, golden=vars(golden), facts=facts, card=card
    )


FORMATS = Formats(
    names=NAMES,
    patterns=(CONFIG, MODEL, INDEX, "model-*.safetensors", PICKLED, "longtrain/*"),
    reads=lambda folder: format_of(folder) is not None,
    read=unchanged(read_folder),
    refuse=refuse,
    write=format_files,
    verify=verify_folder,
    serves={"speculators": "vLLM", "flat": "SGLang and vLLM"},
)

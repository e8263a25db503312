"""EAGLE-3 drafts in the two formats that engines load: `speculators` (vLLM) and `flat` (SGLang and vLLM)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save
from torch import Tensor

from longtrain.files import as_json
from longtrain.log import get_logger
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.formats.card import serving_card
from longtrain.methods.eagle3.formats.golden import GOLDEN, RECORD, Proposals
from longtrain.methods.eagle3.formats.names import (
    CONFIG,
    IDS,
    INDEX,
    MODEL,
    NAMES,
    PICKLED,
    SPECULATORS,
    format_of,
)
from longtrain.methods.eagle3.formats.read import read_folder
from longtrain.methods.eagle3.formats.verify import fresh_norms, refuse_changed, verify_folder
from longtrain.methods.eagle3.formats.write import folder_config, folder_tensors, refuse
from longtrain.methods.eagle3.vocabulary import check_vocabulary
from longtrain.methods.spec import Formats, Imported
from longtrain.methods.written_folders import checksums

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)

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
    """Return the files of an exported folder, relative path -> content.

    Args:
        form: one of `NAMES`.
        tensors: the module's state, by name.
        config: hyperparameters.
        target: the frozen target, for its embeddings and sizes.
        facts: provenance of the training run.
        name: the folder's name.

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
    at_hand = Path(target.info.name)
    known = replace(target.info, name=str(at_hand.absolute())) if at_hand.is_dir() else target.info
    drafted = min(DRAFTED, config.depths)
    outer = folder_config(
        config, known, form=form, dtype=dtype, trained_tokens=longest_document(facts), drafted=drafted
    )
    stored_VE = embed_VE.to(tensors["fc.weight"].dtype)
    golden = Proposals.record(tensors, config, target.info, stored_VE)
    fresh = fresh_norms(tensors)
    if fresh and facts.get("step"):
        log.warning(
            "norms=%s are all ones after steps=%s: not trained, or not yet", ",".join(fresh), facts["step"]
        )
    files = {
        CONFIG: as_json(outer),
        MODEL: save(inner, metadata={"format": "pt"}),
        GOLDEN: save({key: part.contiguous() for key, part in vars(golden).items()}),
    }
    record = {
        "format": form,
        "method": vars(config),
        "config": outer,
        "fresh": fresh,
        "steps": facts.get("step"),
        "files": checksums(files),
    }
    shown = replace(target.info, name=at_hand.name) if at_hand.is_dir() else target.info
    card = serving_card(form, name, config, shown, drafted=drafted)
    return {**files, RECORD: as_json(record), "README.md": card.encode()}


def longest_document(facts: Mapping[str, Any]) -> int | None:
    """Return the tokens of the longest training document, from the provenance; None if unknown."""
    stages = (facts.get("data") or {}).get("stages") or []
    return max((int(stage["doc_tokens"]) for stage in stages if "doc_tokens" in stage), default=None)


def _read(folder: Path, trained_by: str | None) -> Imported:
    """Read the draft of a folder; one written by longtrain must be unchanged; see `read_folder`.

    Raises:
        ArtifactError: see `read_folder`; or the folder was changed after the export.
    """
    found = read_folder(folder, trained_by)  # first, since its messages on damage are more specific
    refuse_changed(folder)
    return found


FORMATS = Formats(
    names=NAMES,
    patterns=(CONFIG, MODEL, INDEX, "model-*.safetensors", PICKLED, "longtrain/*"),
    reads=lambda folder: format_of(folder) is not None,
    read=_read,
    refuse=refuse,
    write=format_files,
    verify=verify_folder,
    serves={"speculators": "vLLM", "flat": "SGLang and vLLM"},
)

"""Checks a folder of either format against its own record, and any folder against what engines need.

Engines check little: a missing tensor, another rotary base or a wrong vocabulary map lowers acceptance
without a message.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.errors import ArtifactError, LongtrainError, TargetMismatchError
from longtrain.methods.draft_checks import again_fresh, changes, read_record, replayed, unhealthy
from longtrain.methods.draft_folders import CONFIG, read_config, read_tensors
from longtrain.methods.eagle3.formats.golden import Proposals
from longtrain.methods.eagle3.formats.names import EMBEDDINGS, FLAT, format_of, inside
from longtrain.methods.eagle3.formats.read import read_folder
from longtrain.methods.eagle3.formats.sglang import sglang_problems
from longtrain.methods.eagle3.formats.smoke import smoke
from longtrain.methods.vocabulary import IDS, lacking

if TYPE_CHECKING:
    from longtrain.methods.spec import Imported
    from longtrain.targets.model import Target


def verify_folder(folder: Path, target: Target | None, trained_by: str | None) -> list[str]:
    """Compare a folder with its record, if it has one, and with what engines need (`Formats.verify`).

    Raises:
        ArtifactError: a check failed; the message lists all failures in one line.
    """
    if format_of(folder) is None:
        raise ArtifactError(f"{folder} holds no EAGLE-3 draft: no {CONFIG} that says so; allowed: its folder")
    wrong, said = [], []
    record = read_record(folder)
    if record is not None:
        wrong += changes(folder, record)
        said.append(f"files={len(record['files'])} config.json={'changed' if wrong else 'as exported'}")
    try:
        found = read_folder(folder, trained_by)
    except LongtrainError as error:
        raise ArtifactError("; ".join([str(error), *wrong])) from None
    wrong += unhealthy(found.tensors)
    embed_VE, misshapen = _embeddings(folder, found)
    wrong += misshapen
    said.append(f"tensors={len(found.tensors)} format={found.about['format']}")
    lines, again = again_fresh(found.tensors, record)
    said += lines
    wrong += again
    if record is not None:
        wrong += _replay(folder, found, embed_VE)
        said.append("golden proposals replayed")
    if found.about["format"] == FLAT:
        wrong += sglang_problems(read_config(folder), _weight_names(folder))
        said.append("SGLang's rules of loading hold")
    if target is not None:
        try:
            wrong += _with_target(found, target, embed_VE, said)
        except TargetMismatchError as error:
            wrong.append(str(error))
    if wrong:
        raise ArtifactError(f"{folder}: {'; '.join(wrong)}")
    return said


def _embeddings(folder: Path, found: Imported) -> tuple[Tensor | None, list[str]]:
    """Return the folder's embeddings [V, E], if they are valid, and messages on what is wrong with them."""
    named = {inside(name): tensor for name, tensor in read_tensors(folder).items()}
    embed_VE, shape = named.get(EMBEDDINGS), (found.target.vocab_size, found.target.hidden_size)
    if embed_VE is None:
        if found.about["format"] == FLAT:
            return None, []
        return None, [f"{EMBEDDINGS} is missing, and a speculators folder must hold it"]
    if tuple(embed_VE.shape) != shape or not embed_VE.is_floating_point():
        return None, [f"{EMBEDDINGS} is {embed_VE.dtype} {tuple(embed_VE.shape)}; allowed: floats {shape}"]
    return embed_VE, []


def _replay(folder: Path, found: Imported, embed_VE: Tensor | None) -> list[str]:
    from longtrain.methods.eagle3.config import Config

    def replay(golden: Proposals) -> list[str]:
        wrong = golden.replay(found.tensors, Config(**found.config), found.target)
        if found.about["format"] == FLAT or embed_VE is None:
            return wrong
        same = torch.equal(embed_VE[golden.ids_T].float(), golden.first_TE)
        return wrong if same else [*wrong, "embed_tokens.weight has other rows than were exported"]

    return replayed(folder, Proposals, replay)[1]


def _weight_names(folder: Path) -> list[str]:
    return [name for name in read_tensors(folder) if inside(name) != EMBEDDINGS]


def _with_target(found: Imported, target: Target, embed_VE: Tensor | None, said: list[str]) -> list[str]:
    """Check shapes, vocabulary and embeddings against a target, and the draft's agreement with it on text."""
    found.target.check(target.info)
    missing = lacking(found.tensors[IDS], target.info)
    wrong = [missing] if missing else []
    mine_VE = target.model.model.embed_tokens.weight
    if embed_VE is not None and not found.config["own_embeddings"]:
        mine_VE = mine_VE.detach().cpu().float()
        if not torch.allclose(embed_VE.float(), mine_VE, rtol=1e-2, atol=1e-3):
            wrong.append(
                "embed_tokens.weight is no copy of the target's, and the folder says that it was not trained"
            )
    lines, problems = smoke(found, target)
    said += lines
    return wrong + problems

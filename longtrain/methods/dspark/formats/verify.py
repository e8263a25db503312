"""Checks a folder of either format against its own record, and any folder against what engines make of it.

Engines check little: a block that is read with the other layout, layer ids off by one or rows that see less
of their block lower acceptance without a message.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from longtrain.errors import ArtifactError, LongtrainError, TargetMismatchError
from longtrain.methods.draft_checks import again_fresh, changes, read_record, replayed, unhealthy
from longtrain.methods.draft_folders import CONFIG, read_config, read_tensors
from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.formats.golden import Blocks
from longtrain.methods.dspark.formats.names import FILL_IN, FLAT, MASK_ROW, SPECULATORS, kind_of
from longtrain.methods.dspark.formats.read import COPIES, BlockKeys, read_folder
from longtrain.methods.dspark.formats.smoke import smoke
from longtrain.methods.folder_keys import Keys
from longtrain.methods.vocabulary import IDS, lacking

if TYPE_CHECKING:
    from longtrain.methods.spec import Imported
    from longtrain.targets.model import Target


def verify_folder(folder: Path, target: Target | None, trained_by: str | None) -> list[str]:
    """Compare a folder with its record, if it has one, and with what engines make of it (`Formats.verify`).

    Raises:
        ArtifactError: a check failed; the message lists all failures in one line.
    """
    if kind_of(folder) is None:
        raise ArtifactError(
            f"{folder} holds no DSpark or DFlash draft: no {CONFIG} that says so; allowed: its folder"
        )
    wrong, said = [], []
    record = read_record(folder)
    if record is not None:
        wrong += changes(folder, record)
        said.append(f"files={len(record['files'])} config.json={'changed' if wrong else 'as exported'}")
    try:
        wrong += engine_problems(folder, trained_by)
        found = read_folder(folder, trained_by)
    except LongtrainError as error:
        raise ArtifactError("; ".join([str(error), *wrong])) from None
    config = Config(**found.config)
    wrong += drafted_beyond(folder, config.block_size)
    wrong += unhealthy(found.tensors)
    said.append(f"tensors={len(found.tensors)} format={found.about['format']}")
    said.append("rows of a block see all of it in vLLM and SGLang")
    if config.draft_vocab_size:
        said.append(
            f"an LM head of its own over {config.draft_vocab_size} tokens, which SGLang does not have"
        )
    if config.windows is not None:
        said.append("engines move a window with the slot: later slots see a little less than was trained")
    golden = None
    lines, again = again_fresh(found.tensors, record)
    said += lines
    wrong += again
    if record is not None:
        golden, differences = replayed(
            folder, Blocks, lambda then: then.replay(found.tensors, config, found.target)
        )
        wrong += differences
        said.append("golden blocks replayed")
    if target is not None:
        try:
            wrong += _with_target(folder, found, target, golden, said)
        except TargetMismatchError as error:
            wrong.append(str(error))
    elif record is None:
        said.append(
            "not tried on a text: layer ids, layout and Markov tables of a folder without a record are "
            "unchecked; pass target.path=FOLDER"
        )
    if wrong:
        raise ArtifactError(f"{folder}: {'; '.join(wrong)}")
    return said


def engine_problems(folder: Path, trained_by: str | None) -> list[str]:
    """Return the differences between what was trained and what engines would run; empty if there are none.

    Source: `update_dflash`, `update_dspark` and `_dflash_layer_causal` of vLLM 0.33; the mask of speculators
        0.9.0 (`create_anchor_block_mask_mod`); `_get_dflash_layer_attention_params` of SGLang 0.5.23.

    Raises:
        ArtifactError: a key that decides it is of another kind.
    """
    keys, wrong = BlockKeys.of(folder, trained_by), []
    pairs = enumerate(zip(keys.trained_causal(), keys.served_causal(), strict=True))
    if apart := [layer for layer, (then, now) in pairs if then != now]:
        seen = "only rows before them" if keys.served_causal()[apart[0]] else "all rows of their block"
        known = "for all layers at once" if keys.kind.draft in FILL_IN else "not at all"
        wrong.append(
            f"vLLM lets rows see {seen} in layers {apart}, which were trained the other way (it knows "
            f"sliding_window_non_causal {known} here); add is_causal to transformer_layer_config"
        )
    if (folder / MASK_ROW).is_file():
        wrong.append(
            f"{MASK_ROW} replaces the mask token's embedding in vLLM's DFlash, and neither in its DSpark nor "
            "in SGLang nor here; remove it, or put its row into the target's embeddings"
        )
    rope = keys.layer.part("rope_parameters")
    if keys.kind.form == FLAT and not rope.values and not keys.layer.has("rope_theta"):
        wrong.append("rope_theta is missing: vLLM takes 1000000, SGLang 10000")
    return wrong


def drafted_beyond(folder: Path, slots: int) -> list[str]:
    """Return a message if a speculators folder lets vLLM draft more tokens a cycle than a block has slots."""
    part = Keys(folder / CONFIG, read_config(folder)).part("speculators_config").values
    listed = part.get("proposal_methods")
    methods = listed if isinstance(listed, list) else []
    asked = [one.get("speculative_tokens") for one in methods if isinstance(one, dict)]
    return [
        f"speculative_tokens={one} in speculators_config, which vLLM drafts in a cycle: a block of it "
        f"has {slots} slots; write {slots} or less"
        for one in asked
        if isinstance(one, int) and one > slots
    ]


def window_less(form: str) -> int:
    """Return how many tokens less engines see than the format's own definition of `sliding_window` says."""
    return 1 if form == SPECULATORS else 0


def _with_target(
    folder: Path, found: Imported, target: Target, golden: Blocks | None, said: list[str]
) -> list[str]:
    """Check shapes and embeddings against a target, and the draft's agreement with it on text."""
    found.target.check(target.info)
    mask, wrong = int(found.tensors["mask_id"]), []
    if not bool(target.embed_weight[mask].any()):
        wrong.append(f"the embedding of mask token {mask} is zero in {target.info.name}")
    if IDS in found.tensors and (missing := lacking(found.tensors[IDS], target.info)):
        wrong.append(missing)
    if golden is not None:
        wrong += golden.compare(target, mask, Config(**found.config).candidates)
    inside = {name.removeprefix("model."): part for name, part in read_tensors(folder).items()}
    for name, own in COPIES.items():
        if name in inside and name not in found.tensors:
            mine = getattr(target, own).detach().cpu().float()
            if inside[name].shape != mine.shape or not torch.allclose(
                inside[name].float(), mine, rtol=1e-2, atol=1e-3
            ):
                wrong.append(f"{name} is no copy of the target's, which alone longtrain and SGLang use")
    lines, problems = smoke(found, target, window_less(found.about["format"]))
    said += lines
    return wrong + problems

"""Chooses the draft's vocabulary, the most frequent tokens of the training answers, and maps it in folders.

Shapes: V tokens of the target's vocabulary, K of the draft's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from longtrain.data.packing.prepared import Prepared, label_counts
from longtrain.errors import ArtifactError, ConfigError, TargetMismatchError
from longtrain.log import get_logger

if TYPE_CHECKING:
    from longtrain.targets.info import TargetInfo

log = get_logger(__name__)

IDS = "draft_ids_K"
"""Name of the vocabulary in a draft's module."""
OFFSETS, MARKS = "d2t", "t2d"
"""Names of its maps in a folder that engines load: each token minus its place, and which tokens are known."""


def most_frequent(counts_V: np.ndarray, size: int, *, always: tuple[int, ...] = ()) -> Tensor:
    """Return the most frequent tokens, ascending, int64_K.

    Args:
        counts_V: how often each token is a label.
        size: K; if fewer tokens occur, the smallest other ids fill up.
        always: tokens that are included whatever their counts.

    Note: of equally frequent tokens the smaller id is taken, as by speculators, so the choice depends on the
        counts alone. End-of-text tokens are always included here: a draft without them could not end a text.
    """
    rank_V = counts_V.astype(np.int64)
    rank_V[list(always)] = np.iinfo(np.int64).max
    order_V = np.lexsort((np.arange(len(rank_V)), -rank_V))
    return torch.from_numpy(np.sort(order_V[:size]))


def from_data(module: nn.Module, config: Any, info: TargetInfo, data: Prepared) -> dict[str, Any]:
    """Choose a new draft's vocabulary from the labels of the prepared data; return its facts for provenance.

    Args:
        module: a draft with `draft_ids_K`, which is changed in place.
        config: its settings; `draft_vocab_size` is named in the error.
        info: the target.
        data: the prepared data.

    Raises:
        ConfigError: the vocabulary is smaller than the number of end-of-text tokens.
    """
    draft_ids_K = module.get_buffer("draft_ids_K")
    size = len(draft_ids_K)
    if size < len(info.eos_ids):
        raise ConfigError(
            f"method.draft_vocab_size={config.draft_vocab_size}; target {info.name} allows 0 (all), or at "
            f"least the {len(info.eos_ids)} tokens that end its texts"
        )
    counts_V = label_counts(data, info.vocab_size)
    ids_K = most_frequent(counts_V, size, always=info.eos_ids)
    draft_ids_K.copy_(ids_K)
    total = int(counts_V.sum())
    coverage = float(counts_V[ids_K.numpy()].sum() / max(total, 1))
    log.info(
        "draft_vocabulary tokens=%d of=%d labels=%d coverage=%.5f", size, info.vocab_size, total, coverage
    )
    digest = hashlib.sha256(ids_K.numpy().astype("<i8").tobytes()).hexdigest()
    return {"draft_vocabulary": {"tokens": size, "coverage": coverage, "sha256": digest}}


def lacking(draft_ids_K: Tensor, info: TargetInfo) -> str:
    """Describe an end-of-text token of the target that the draft cannot propose; empty if there is none."""
    missing = sorted({*info.eos_ids} - {*draft_ids_K.tolist()})
    if not missing:
        return ""
    return (
        f"the draft's vocabulary of {len(draft_ids_K)} tokens lacks token {missing[0]}, which ends texts of "
        f"target {info.name}"
    )


def check_attached(draft_ids_K: Tensor, info: TargetInfo, what: str) -> None:
    """Refuse a draft whose vocabulary the target lacks; warn of one that cannot end a text.

    Args:
        draft_ids_K: the draft's vocabulary.
        info: the target.
        what: the draft, for the message.

    Raises:
        TargetMismatchError: a token that the target does not have.
    """
    if (last := int(draft_ids_K.max())) >= info.vocab_size:
        raise TargetMismatchError(
            f"{what} whose vocabulary reaches token {last}; target {info.name} has {info.vocab_size} tokens"
        )
    if missing := lacking(draft_ids_K, info):
        log.warning("%s; it is never drafted", missing)


def check_vocabulary(draft_ids_K: Tensor, info: TargetInfo) -> None:
    """Refuse an invalid vocabulary, or one without the target's end-of-text tokens.

    Raises:
        TargetMismatchError: an end-of-text token is missing; or ids that do not ascend, or are not the
            target's.
    """
    if missing := lacking(draft_ids_K, info):
        raise TargetMismatchError(
            f"{missing}; train a draft with a vocabulary chosen from data of this target"
        )
    ids = draft_ids_K.tolist()
    if ids and (ids[0] < 0 or ids[-1] >= info.vocab_size or any(np.diff(ids) <= 0)):
        raise TargetMismatchError(
            f"the draft's vocabulary (draft_ids_K) holds tokens {min(ids)}..{max(ids)}; need ascending, "
            f"different tokens below {info.vocab_size}, the vocabulary of target {info.name}"
        )


def vocabulary_map(draft_ids_K: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return a vocabulary as folders hold it: offsets [K] int64, and which of the target's tokens, bool [V].

    Args:
        draft_ids_K: the target's id of each token, ascending.
        vocab_size: V.
    """
    ids_K = draft_ids_K.long().cpu()
    marked_V = torch.zeros(vocab_size, dtype=torch.bool)
    marked_V[ids_K] = True
    return {OFFSETS: ids_K - torch.arange(len(ids_K)), MARKS: marked_V}


def read_vocabulary(tensors: Mapping[str, Tensor], *, size: int, whole: int, where: Path) -> Tensor:
    """Return the target token of each draft token, [K] int64, from a folder's vocabulary map.

    Args:
        tensors: the folder's tensors, under its own names.
        size: size of the draft's vocabulary, K.
        whole: size of the target's vocabulary, V.
        where: the folder, for messages.

    Raises:
        ArtifactError: the map is missing or invalid.
    """
    offsets_K = tensors.get(OFFSETS)
    if offsets_K is None:
        if size == whole:
            return torch.arange(size)
        raise ArtifactError(
            f"{where} has no {OFFSETS}, and its draft knows {size} of {whole} tokens: engines would draft "
            "the wrong ones; copy or export it again"
        )
    if offsets_K.shape != (size,) or offsets_K.is_floating_point():
        raise ArtifactError(
            f"{where}: {OFFSETS} is {offsets_K.dtype} {tuple(offsets_K.shape)}; allowed: int64 ({size},)"
        )
    ids_K = offsets_K.long() + torch.arange(size)
    ascending = bool((ids_K[1:] > ids_K[:-1]).all())
    if not ascending or int(ids_K[0]) < 0 or int(ids_K[-1]) >= whole:
        raise ArtifactError(
            f"{where}: {OFFSETS} is no map of offsets: it gives tokens {int(ids_K.min())} to "
            f"{int(ids_K.max())}, {'ascending' if ascending else 'not in ascending order'}; allowed: "
            f"different ones from 0 to {whole - 1}, ascending (each entry is the token minus its place)"
        )
    marked_V = tensors.get(MARKS)
    if marked_V is not None:
        known_V = torch.zeros(whole, dtype=torch.bool)
        known_V[ids_K] = True
        if marked_V.shape != (whole,) or not torch.equal(marked_V.bool(), known_V):
            raise ArtifactError(f"{where}: {MARKS} does not mark the tokens that {OFFSETS} names")
    return ids_K

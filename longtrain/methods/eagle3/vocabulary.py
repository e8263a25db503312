"""Chooses the draft's vocabulary: the most frequent tokens of the training answers.

Shapes: V tokens of the target's vocabulary, K of the draft's.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from longtrain.data.packing.prepared import Prepared, label_counts
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.log import get_logger

if TYPE_CHECKING:
    from longtrain.methods.eagle3.config import Config
    from longtrain.targets.info import TargetInfo

log = get_logger(__name__)


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


def from_data(module: nn.Module, config: Config, info: TargetInfo, data: Prepared) -> dict[str, Any]:
    """Choose a new draft's vocabulary from the labels of the prepared data; return its facts for provenance.

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

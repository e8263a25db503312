"""Predicted scores of the contexts of a packed sequence, and their labels from the target's repetition.

Shapes: B contexts together, S positions, L layers, G KV heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.methods.kvzap.modules import PredictedScores
from longtrain.methods.repetition import RepeatLabels, repeat_labels

if TYPE_CHECKING:
    from longtrain.methods.kvzap.config import Config
    from longtrain.methods.kvzap.modules import KVzap
    from longtrain.methods.samples import Sample
    from longtrain.targets.model import Target

_DRAWN = 256
"""Random tokens from which a new module's mean score is measured."""


def groups(found: Sequence[Sample], most: int) -> Iterator[list[Sample]]:
    """Yield groups of contexts of similar length, longest first, with at most `most` padded tokens each."""
    group: list[Sample] = []
    for sample in sorted(found, key=lambda one: -one.length):
        if group and (len(group) + 1) * group[0].length > most:
            yield group
            group = []
        group.append(sample)
    if group:
        yield group


def labelled(
    module: KVzap, target: Target, config: Config, contexts: Sequence[Tensor], *, train: bool
) -> tuple[Tensor, RepeatLabels]:
    """Prefill contexts with the module observing, then have the target repeat them for the labels.

    Args:
        module: predicts the scores.
        target: the frozen target.
        config: hyperparameters.
        contexts: token ids of each context.
        train: True if gradients reach the module.

    Returns:
        Predicted scores pred_LBGS, and the labels.
    """
    reading = PredictedScores(module, train=train)
    labels = _labels(target, config, [ids.tolist() for ids in contexts], reading)
    return torch.stack(reading.scores), labels


def usual(target: Target, config: Config) -> Tensor:
    """Return the mean label of each layer and KV head, [L, G], over random tokens, for a new module.

    Every rank draws the same tokens.
    """
    gen = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.info.vocab_size, (_DRAWN,), generator=gen).tolist()
    labels = _labels(target, config, [tokens], None)
    target.join_ranks()
    return labels.true_LBGS.sum((1, 3)) / labels.counts_LBGS.sum((1, 3)).clamp(min=1)


def _labels(
    target: Target, config: Config, contexts: Sequence[Sequence[int]], hook: PredictedScores | None
) -> RepeatLabels:
    plus = config.labels == "kvzip_plus"
    return repeat_labels(target, contexts, chunk=config.chunk, sinks=config.sinks, plus=plus, hook=hook)

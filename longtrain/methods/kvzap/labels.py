"""What the module foretells of the contexts of a packed row, beside their labels.

Shapes: B contexts together, S slots, L layers, G KV heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.methods.kvzap.modules import Foretelling
from longtrain.methods.repetition import RepeatLabels, repeat_labels

if TYPE_CHECKING:
    from longtrain.methods.kvzap.config import Config
    from longtrain.methods.kvzap.modules import KVzap
    from longtrain.methods.samples import Sample
    from longtrain.targets.model import Target

_DRAWN = 256
"""Tokens that tell a fresh module what scores usually are."""


def groups(found: Sequence[Sample], most: int) -> Iterator[list[Sample]]:
    """Contexts of about one length together, the longest first, at most `most` slots of a group."""
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
    """Read some contexts once, the module beside the target, and have the target repeat them.

    Args:
        module: foretells.
        target: frozen.
        config: hyperparameters.
        contexts: token ids of each.
        train: whether gradients reach the module.

    Returns:
        Foretold scores pred_LBGS, and the labels.
    """
    reading = Foretelling(module, train=train)
    labels = _labels(target, config, [ids.tolist() for ids in contexts], reading)
    return torch.stack(reading.scores), labels


def usual(target: Target, config: Config) -> Tensor:
    """The mean label of each layer and KV head, [L, G], over drawn tokens: where a fresh module begins.

    Every rank draws the same.
    """
    gen = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.info.vocab_size, (_DRAWN,), generator=gen).tolist()
    labels = _labels(target, config, [tokens], None)
    target.settle()
    return labels.true_LBGS.sum((1, 3)) / labels.counts_LBGS.sum((1, 3)).clamp(min=1)


def _labels(
    target: Target, config: Config, contexts: Sequence[Sequence[int]], watch: Foretelling | None
) -> RepeatLabels:
    plus = config.labels == "kvzip_plus"
    return repeat_labels(target, contexts, chunk=config.chunk, sinks=config.sinks, plus=plus, watch=watch)

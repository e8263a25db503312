"""KVzip's scores of the contexts of a packed row, and what the module foretells of them.

Shapes: B contexts together, S slots, L layers, G KV heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.decoding.evict import Budget, PromptRun
from longtrain.decoding.prefill import pad
from longtrain.methods.kvzap.modules import Reading
from longtrain.methods.lookaheadkv.samples import Sample
from longtrain.methods.policies.kvzip import KVzip
from longtrain.targets.step import Rows, Want

if TYPE_CHECKING:
    from longtrain.methods.kvzap.config import Config
    from longtrain.methods.kvzap.modules import KVzap
    from longtrain.targets.attention import Watch
    from longtrain.targets.model import Target

_DRAWN = 256
"""Tokens that tell a fresh module what scores usually are."""


@dataclass(frozen=True)
class Labelled:
    """Some contexts, right-padded.

    Args:
        lengths: tokens of each.
        pred_LBGS: what the module foretells, with gradients where it trains.
        true_LBGS: logarithms of KVzip's scores; 0 where there is no label.
        counts_LBGS: bool, whether there is one.
    """

    lengths: tuple[int, ...]
    pred_LBGS: Tensor
    true_LBGS: Tensor
    counts_LBGS: Tensor


def teacher(config: Config) -> KVzip:
    """The policy whose scores are learned."""
    plus = config.labels == "kvzip_plus"
    return KVzip(Budget(ratio=1.0), chunk=config.chunk, sinks=config.sinks, value_norm=plus, row_norm=plus)


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
) -> Labelled:
    """Read some contexts once, the module beside the target, and have the target repeat them for KVzip.

    Args:
        module: foretells.
        target: frozen.
        config: hyperparameters.
        contexts: token ids of each, on the target's device.
        train: whether gradients reach the module.

    Raises:
        ConfigError: the target has no tokenizer, whose chat format the request to repeat is written in.
    """
    reading = Reading(module, train=train)
    lengths, true_LBGS, counts_LBGS = _repeated(target, config, [ids.tolist() for ids in contexts], reading)
    return Labelled(lengths, torch.stack(reading.scores), true_LBGS, counts_LBGS)


def usual(target: Target, config: Config) -> Tensor:
    """The mean label of each layer and KV head, [L, G], over drawn tokens: where a fresh module begins.

    Every rank draws the same.
    """
    gen = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.info.vocab_size, (_DRAWN,), generator=gen).tolist()
    _, true_LBGS, counts_LBGS = _repeated(target, config, [tokens], None)
    target.settle()
    return true_LBGS.sum((1, 3)) / counts_LBGS.sum((1, 3)).clamp(min=1)


@torch.no_grad()
def _repeated(
    target: Target, config: Config, contexts: Sequence[Sequence[int]], watch: Watch | None
) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """Lengths of the contexts, logarithms of their KVzip scores, and which of them are labels."""
    policy, lengths, device = teacher(config), tuple(map(len, contexts)), target.device
    longest = max(lengths)
    tokens_BS, n_B = pad(contexts, device)
    cache = target.new_cache(len(contexts), longest, policy.extra_rows(longest))
    pos_BS = torch.arange(longest, device=device).expand_as(tokens_BS)
    target.forward(Rows(pos_BS, tokens_BS, n_B=n_B), cache, want=Want("none"), watch=watch)
    cache.commit(None, n_B)
    s_LBGS = policy.scores(PromptRun(target, cache, lengths, tokens_BS, n_B, torch.zeros_like(n_B)))
    slot_S = torch.arange(longest, device=device)
    inside_BS = (slot_S >= config.sinks) & (slot_S < n_B[:, None])
    counts_LBGS = inside_BS[:, None] & (s_LBGS > 0)  # a chat header has no score
    return lengths, s_LBGS.log().where(counts_LBGS, 0.0), counts_LBGS

"""KVzip's scores as labels: logarithms of the attention that the target needs to repeat a context.

Shapes: B contexts together, S positions, L layers, G KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.decoding.evict import Budget, PromptRun
from longtrain.decoding.prefill import pad
from longtrain.methods.policies.kvzip import KVzip
from longtrain.methods.policies.repeat import LONGEST_REQUEST
from longtrain.targets.step import OutputRequest, TokenBatch

if TYPE_CHECKING:
    from longtrain.targets.attention import AttentionHook
    from longtrain.targets.model import Target

__all__ = ["LONGEST_REQUEST", "RepeatLabels", "repeat_labels"]


@dataclass(frozen=True)
class RepeatLabels:
    """Labels of some contexts, right-padded.

    Args:
        lengths: tokens of each context.
        true_LBGS: logarithms of KVzip's scores in fp32 (fp64 for fp64); 0 where there is no label.
        counts_LBGS: bool, True where there is a label: not for sinks, a chat header and padding.
    """

    lengths: tuple[int, ...]
    true_LBGS: Tensor
    counts_LBGS: Tensor


@torch.no_grad()
def repeat_labels(
    target: Target,
    contexts: Sequence[Sequence[int]],
    *,
    chunk: int,
    sinks: int,
    plus: bool,
    hook: AttentionHook | None = None,
) -> RepeatLabels:
    """Prefill some contexts, and have the target repeat them.

    Args:
        target: the frozen target.
        contexts: token ids of each context.
        chunk: as in `KVzip`.
        sinks: as in `KVzip`.
        plus: KVzip+: with both norms.
        hook: observes the prefill.

    Raises:
        ConfigError: the target has no tokenizer, whose chat format the request to repeat is written in.
    """
    policy = KVzip(Budget(ratio=1.0), chunk=chunk, sinks=sinks, value_norm=plus, row_norm=plus)
    lengths, device = tuple(map(len, contexts)), target.device
    longest = max(lengths)
    tokens_BS, n_B = pad(contexts, device)
    cache = target.plain_cache(len(contexts), longest, policy.extra_tokens(longest))
    pos_BS = torch.arange(longest, device=device).expand_as(tokens_BS)
    target.forward(TokenBatch(pos_BS, tokens_BS, n_B=n_B), cache, outputs=OutputRequest("none"), hook=hook)
    cache.commit(None, n_B)
    s_LBGS = policy.scores(PromptRun(target, cache, lengths, tokens_BS, n_B, torch.zeros_like(n_B)))
    slot_S = torch.arange(longest, device=device)
    inside_BS = (slot_S >= sinks) & (slot_S < n_B[:, None])
    counts_LBGS = inside_BS[:, None] & (s_LBGS > 0)
    return RepeatLabels(lengths, s_LBGS.log().where(counts_LBGS, 0.0), counts_LBGS)

"""Prefilled batches for policies, without an engine; and what a policy kept, as plain lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longtrain.decoding.evict import Evictor, Keep, PromptRun
from longtrain.targets.model import Target
from longtrain.targets.step import TokenBatch


@torch.no_grad()
def prefilled(
    target: Target, prompts: Sequence[Sequence[int]], policy: Evictor, *, max_new_tokens: int = 16
) -> PromptRun:
    """Prompts run and committed as an engine does it; padding holds ids that must never be looked at."""
    lengths = tuple(map(len, prompts))
    longest = max(lengths)
    junk = torch.Generator().manual_seed(5)
    rows = [
        [*prompt, *torch.randint(2, 90, (longest - len(prompt),), generator=junk).tolist()]
        for prompt in prompts
    ]
    tokens_BS, n_B = torch.tensor(rows, device=target.device), torch.tensor(lengths, device=target.device)
    room = max_new_tokens + policy.extra_tokens(longest)
    cache = target.plain_cache(len(prompts), longest + room, 1)
    watched = policy.hook(lengths)
    pos_BS = torch.arange(longest, device=target.device).expand_as(tokens_BS)
    step = target.forward(TokenBatch(pos_BS, tokens_BS, n_B=n_B), cache, hook=watched)
    cache.commit(None, n_B)
    assert step.logits_BTV is not None
    return PromptRun(
        target=target,
        cache=cache,
        lengths=lengths,
        tokens_BS=tokens_BS,
        n_B=n_B,
        root_B=step.logits_BTV[:, -1].argmax(-1),
        watched=watched,
        max_new_tokens=max_new_tokens,
        logits_BV=step.logits_BTV[:, -1],
    )


def kept(keep: Keep | None, seq: int) -> list[list[list[int]]]:
    """Kept rows of each layer and KV head of a sequence."""
    assert keep is not None
    n_LG, idx_LGK = keep.n_LBG[:, seq].tolist(), keep.idx_LBGK[:, seq].tolist()
    return [
        [idx[:n] for idx, n in zip(heads, counts, strict=True)]
        for heads, counts in zip(idx_LGK, n_LG, strict=True)
    ]


def prompts_of(*lengths: int, seed: int = 0, vocab: int = 97) -> list[list[int]]:
    """Random prompts without the micro shapes' special ids."""
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab, (n,), generator=rng).tolist() for n in lengths]

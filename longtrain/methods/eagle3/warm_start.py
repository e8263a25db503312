"""A draft's first weights, taken from the target it drafts for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from longtrain.methods.eagle3.modules import Eagle3Draft
    from longtrain.targets.model import Target


@torch.no_grad()
def warm_start(draft: Eagle3Draft, target: Target) -> None:
    """Begin with the target's LM head over the draft's vocabulary and the norm before it; the rest is random.

    Args:
        draft: changed in place; it may be on another device and in another dtype than the target.
        target: gives the weights. A draft's own embeddings begin as the target's.

    Note: over 40 steps on the bundled target this learned faster than random weights, and faster than with
        the last layer's MLP copied too: the layer predicts the token after next, which no layer of the target
        does.
    """
    draft.lm_head.weight.copy_(target.head_weight[draft.draft_ids_K.to(target.device)])
    draft.norm.weight.copy_(target.final_norm_weight)
    if draft.embed_tokens is not None:
        ids = torch.arange(target.info.vocab_size, device=target.device)
        draft.embed_tokens.weight.copy_(target.embed(ids))

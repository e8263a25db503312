"""A draft's first weights, taken from the target it drafts for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from longtrain.methods.eagle3.modules import Eagle3Draft
    from longtrain.targets.model import Target


@torch.no_grad()
def warm_start(draft: Eagle3Draft, target: Target) -> None:
    """Begin with the highest level as the feature, the first layer's MLP, and the target's LM head.

    `fc` passes the highest level on and nothing else, the MLP and its norm are those of layer 0 where their
    shapes fit, head (over the draft's vocabulary) and last norm the target's; the attention is random.

    Args:
        draft: changed in place; it may be on another device and in another dtype than the target.
        target: gives the weights. A draft's own embeddings begin as the target's.

    Note: this project's own. Early in training for the bundled target, a draft that began with all of these
        copies was closer to the target than one that began with random weights, than one that began with only
        some of the copies, and than one whose MLP or attention was copied from the target's last layer.
    """
    first, E = target.layer_state(0), draft.norm.weight.numel()
    draft.fc.weight.zero_()
    draft.fc.weight[:, -E:].fill_diagonal_(1.0)
    _copy(draft.mlp, first, "mlp.")
    _copy(draft.post_attention_layernorm, first, "post_attention_layernorm.")
    draft.lm_head.weight.copy_(target.head_weight[draft.draft_ids_K.to(target.device)])
    draft.norm.weight.copy_(target.final_norm_weight)
    if draft.embed_tokens is not None:
        ids = torch.arange(target.info.vocab_size, device=target.device)
        draft.embed_tokens.weight.copy_(target.embed(ids))


def _copy(module: nn.Module, state: Mapping[str, Tensor], prefix: str) -> None:
    """Every parameter of `module` from the entry of its name, if all shapes fit."""
    named = list(module.named_parameters())
    if all(tensor.shape == state[prefix + name].shape for name, tensor in named):
        for name, tensor in named:
            tensor.copy_(state[prefix + name])

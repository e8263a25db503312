"""Initialises a draft from the weights of the target it drafts for.

Shapes: K tokens of the draft's vocabulary, E hidden dim, T tokens of the probe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from longtrain.features.probe import probed_states

if TYPE_CHECKING:
    from torch import Tensor, nn

    from longtrain.methods.eagle3.config import Config
    from longtrain.methods.eagle3.modules import Eagle3Draft
    from longtrain.targets.model import Target

SPREAD = 0.5
"""Standard deviation of the logits of a random direction after the last norm is scaled down: the initial loss
is then about an eighth of a nat above the uniform distribution's."""


@torch.no_grad()
def warm_start(draft: Eagle3Draft, target: Target, config: Config) -> None:
    """Initialise with the highest of the read layers as the feature, and the target's LM head.

    `fc` passes on only the states of the highest layer; queries, keys and values are random; the rest follows
    the settings `start_*`. The LM head consists of the rows of the draft's vocabulary.

    Args:
        draft: changed in place; it may be on another device and in another dtype than the target.
        target: provides the weights, also for a draft's own embeddings.
        config: the draft's settings.

    Note: this is longtrain's own. The target's last norm and head turn any vector into a confident guess,
        and the state of token i predicts token i + 1, while position i of the draft predicts token i + 2. So
        a draft initialised as the target's last layers is worse than a uniform distribution.
    """
    E = draft.norm.weight.numel()
    draft.fc.weight.zero_()
    draft.fc.weight[:, -E:].fill_diagonal_(1.0)
    if config.start_mlp == "copied" and target.info.hidden_act == "silu":
        first = target.layer_state(0)
        _copy(draft.mlp, first, "mlp.")
        _copy(draft.post_attention_layernorm, first, f"{target.family.norms[1]}.")
    if config.start_outputs == "zero":
        draft.self_attn.o_proj.weight.zero_()
        draft.mlp.down_proj.weight.zero_()
    draft.lm_head.weight.copy_(target.head_weight[draft.draft_ids_K.to(target.device)])
    if config.start_norm != "ones":
        draft.norm.weight.copy_(target.final_norm_weight)
    if config.start_norm == "scaled":
        draft.norm.weight.mul_(_factor(draft))
    if config.start_inputs == "level":
        _level(draft, target)
    if draft.embed_tokens is not None:
        ids = torch.arange(target.info.vocab_size, device=target.device)
        draft.embed_tokens.weight.copy_(target.embed(ids))


def _factor(draft: Eagle3Draft) -> float:
    """Return the factor that scales the logits of a random direction down to `SPREAD`; at most 1."""
    head_KE = draft.lm_head.weight.float() * draft.norm.weight.float()
    spread = float(head_KE.pow(2).sum(-1).mean().sqrt())
    return min(1.0, SPREAD / max(spread, 1e-12))


def _level(draft: Eagle3Draft, target: Target) -> None:
    """Scale down the channels of the normed states that are larger than the median channel.

    A few channels of a published model's states are many times as large as the rest (massive activations),
    most of all at the first token, so that the norm makes all others small. The factors go into the norms'
    weights, which exported folders contain. Without a norm before `fc` nothing is changed.
    """
    joined = draft.input_norm
    norms = list(draft.fc_norm or ()) if joined is None else [joined]
    states = probed_states(target, draft.layers) if norms else []
    if joined is not None:
        states = [torch.cat(states, -1)]
    for norm, state_TE in zip(norms, states, strict=True):
        normed_TE = state_TE / state_TE.pow(2).mean(-1, keepdim=True).sqrt().clamp(min=1e-12)
        size_E = normed_TE.pow(2).mean(0).sqrt()
        norm.get_parameter("weight").copy_(1 / size_E.clamp(min=float(size_E.median())))


def _copy(module: nn.Module, state: Mapping[str, Tensor], prefix: str) -> None:
    """Copy every parameter of `module` from the entry of its name, if all are there and their shapes fit."""
    named = list(module.named_parameters())
    if all(prefix + name in state and tensor.shape == state[prefix + name].shape for name, tensor in named):
        for name, tensor in named:
            tensor.copy_(state[prefix + name])

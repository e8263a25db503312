"""Initialises a draft from the weights of the target it drafts for.

Shapes: T tokens, E hidden dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from longtrain.data.packing.packed_sequences import positions
from longtrain.methods.longspec.config import source_layer
from longtrain.methods.longspec.indices import make_chunk
from longtrain.targets.step import OutputRequest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from longtrain.methods.longspec.config import Config
    from longtrain.methods.longspec.modules import LongSpecDraft
    from longtrain.targets.model import Target

CROSS_SHARE = 0.3
"""Initial rms of the cross-attention's output relative to the residual stream it joins.

Its weights come from the target's last layer, where the stream is much larger, and would otherwise drown out
the first layer's.
"""

LOUDNESS = 0.8
"""Initial rms of the draft's output relative to the target's: slightly flatter logits."""

PROBE_TOKENS = 256


class _Sizes(NamedTuple):
    """Root mean squares of the stream, the cross-attention's output, and both LM heads' inputs."""

    stream: float
    cross: float
    draft: float
    target: float


@torch.no_grad()
def warm_start(draft: LongSpecDraft, target: Target, config: Config) -> None:
    """Initialise as the target's first layer with a window, plus a small share of its last layer's attention.

    Self-attention, MLP and their norms come from layer 0, whose input is the draft's input: up to the window
    they compute what the target computes, if its layers are built as Llama's. What other families' layers do
    not have, or in another shape, keeps its random values, and so does the MLP if the activation is another.
    Query, output and norm of the cross-attention come from the layer
    whose keys and values it reads, scaled down to the size of the stream. Without a norm before the LM head,
    all outputs are then scaled so that logits have the size the head expects. Sizes are measured on random
    tokens.

    Args:
        draft: changed in place; it may be on another device and in another dtype than the target.
        target: provides the weights.
        config: the draft's hyperparameters.

    Note: this project's. Early in training of a small target's draft, it was closer to the target than with
        the last layer's MLP or self-attention copied instead, zero outputs, or unscaled copies.
    """
    first = target.layer_state(0)
    source = target.layer_state(source_layer(config, target.info))
    _copy(draft.self_attn, first, "self_attn.")
    before_attention, before_mlp = target.family.norms
    _copy(draft.input_layernorm, first, f"{before_attention}.")
    # experts cannot be copied: the draft's MLP stays random, and small
    if target.info.hidden_act == "silu":
        _copy(draft.mlp, first, "mlp.")
    _copy(draft.post_cross_attention_layernorm, first, f"{before_mlp}.")
    outputs = [draft.self_attn.o_proj, draft.mlp.down_proj]
    if draft.cross_attn is not None:
        _copy(draft.cross_attn, source, "self_attn.")
        _copy(draft.post_self_attention_layernorm, source, f"{before_attention}.")
        sizes = _sizes(draft, target, config)
        draft.cross_attn.o_proj.weight.mul_(CROSS_SHARE * sizes.stream / sizes.cross)
        outputs.append(draft.cross_attn.o_proj)
    if draft.norm is not None:
        draft.norm.weight.copy_(target.final_norm_weight)
        return
    for _ in range(2):  # twice, because the embeddings are added unscaled
        sizes = _sizes(draft, target, config)
        for output in outputs:
            output.weight.mul_(LOUDNESS * sizes.target / sizes.draft)


@torch.no_grad()
def _sizes(draft: LongSpecDraft, target: Target, config: Config) -> _Sizes:
    """Run draft and target over one sequence of random tokens, the same every time, and measure the sizes."""
    bounds = (0, min(PROBE_TOKENS, target.info.max_positions))
    gen = torch.Generator().manual_seed(0)
    ids_T = torch.randint(target.info.vocab_size, (bounds[1],), generator=gen).to(target.device)
    pos_T = positions(bounds).to(target.device)
    layer = source_layer(config, target.info)
    step = target.packed(ids_T, pos_T, bounds, OutputRequest("none", hidden=(-1,), kv=(layer,)))
    k_TGD, v_TGD = step.kv[layer]
    here = draft.input_layernorm.weight
    cos_BTD, sin_BTD = target.rope(pos_T[None])
    stream = cross = torch.ones(())
    handles = []
    if draft.cross_attn is not None and draft.post_self_attention_layernorm is not None:

        def keep_stream(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            nonlocal stream
            stream = inputs[0]

        def keep_cross(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
            nonlocal cross
            cross = output

        handles = [
            draft.post_self_attention_layernorm.register_forward_pre_hook(keep_stream),
            draft.cross_attn.o_proj.register_forward_hook(keep_cross),
        ]
    try:
        hidden_TE = draft(
            target.embed(ids_T).to(here),
            (cos_BTD[0].to(here), sin_BTD[0].to(here)),
            (k_TGD.to(here), v_TGD.to(here)),
            make_chunk(bounds, [1], *bounds, window=config.window),
        )
    finally:
        for handle in handles:
            handle.remove()
    parts = (stream, cross, hidden_TE, step.hidden[-1])
    return _Sizes(*(float(part.float().pow(2).mean().sqrt()) for part in parts))


def _copy(module: nn.Module | None, state: dict[str, torch.Tensor], prefix: str) -> None:
    """Copy each parameter of `module` from an entry of its name and shape; biases without one are 0."""
    if module is not None:
        for name, tensor in module.named_parameters():
            stored = state.get(prefix + name)
            if stored is not None and stored.shape == tensor.shape:
                tensor.copy_(stored)
            elif name.endswith(".bias"):
                tensor.zero_()

"""A draft's first weights, taken from the target it drafts for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

    from longtrain.methods.longspec.config import Config
    from longtrain.methods.longspec.modules import LongSpecDraft
    from longtrain.target.model import Target


@torch.no_grad()
def warm_start(draft: LongSpecDraft, target: Target, config: Config) -> None:
    """Copy what fits."""
    last = target.layer_state(config.kv_source_layer % target.info.n_layers)
    _copy(draft.cross_attn, last, "self_attn.")
    _copy(draft.mlp, last, "mlp.")


def _copy(module: nn.Module | None, state: dict[str, torch.Tensor], prefix: str) -> None:
    """Every parameter of `module` from the entry of its name."""
    if module is not None:
        for name, tensor in module.named_parameters():
            tensor.copy_(state[prefix + name])

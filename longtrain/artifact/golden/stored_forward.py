"""Stands in for a target's forward over the golden prompt: returns stored tensors, and computes nothing.

Shapes: B batch (1), T tokens, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.cache.base import KVCache
from longtrain.targets.step import OutputRequest, TargetStep, TokenBatch

if TYPE_CHECKING:
    from longtrain.targets.attention import AttentionHook
    from longtrain.targets.model import Target


class StoredForward:
    """Callable like `Target.forward` that returns stored tensors.

    It writes stored keys and values into the cache, calls the attention hook with stored tensors, and returns
    stored hidden states. Tensors that are not stored, also of rejected tokens, are zeros; the caller detects
    that a module reads one because its name is not among the stored ones.

    Args:
        target: the target (or view of it) that the module is attached to.
        inputs: see `Golden`.
    """

    def __init__(self, target: Target, inputs: Mapping[str, Tensor]) -> None:
        self.target, self.inputs = target, inputs

    def __call__(
        self, rows: TokenBatch, cache: KVCache, *, outputs: OutputRequest, hook: AttentionHook | None = None
    ) -> TargetStep:
        """See `Target.forward`."""
        span = int(rows.pos_BT[0, 0]), rows.pos_BT.shape[1]
        see_inputs = getattr(hook, "see_inputs", None)
        for layer in range(self.target.info.n_layers):
            if see_inputs is not None:
                see_inputs(layer, self._stored(f"input_{layer}", *span))
            k_BGTD, v_BGTD = (self._stored(f"{name}_{layer}", *span).transpose(1, 2) for name in "kv")
            cache.write(layer, k_BGTD, v_BGTD)
            if hook is not None:
                hook(layer, self._stored(f"q_{layer}", *span).transpose(1, 2), k_BGTD, v_BGTD)
        return TargetStep(None, {layer: self._stored(f"hidden_{layer}", *span) for layer in outputs.hidden})

    def _stored(self, name: str, start: int, count: int) -> Tensor:
        """Return a stored tensor's entries [B, T, ...] of `count` tokens from `start` on."""
        info = self.target.info
        of_token: tuple[int, ...] = (info.hidden_size,)
        if name[0] in "qkv":
            of_token = (info.n_heads if name[0] == "q" else info.n_kv_heads, info.head_dim)
        entries = torch.zeros((1, count, *of_token), device=self.target.device, dtype=self.target.dtype)
        found = self.inputs[name][start : start + count] if name in self.inputs else entries[0, :0]
        first = count - len(found) if name[0] == "q" else 0
        entries[0, first : first + len(found)] = found.to(entries)
        return entries

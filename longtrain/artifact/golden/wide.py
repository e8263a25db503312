"""A view of a half-precision target that computes in fp32, so that their difference is rounding noise.

Shapes: V vocabulary, E hidden dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from longtrain.cache.base import KVCache
from longtrain.targets.attention import AttentionHook
from longtrain.targets.model import Target
from longtrain.targets.step import OutputRequest, TargetStep, TokenBatch

HEAD_ROWS = 16384
"""Vocabulary entries of the LM head that are cast to fp32 at once."""


class WideTarget(Target):
    """Target that computes in fp32 (or in its own dtype if that is wider) with another target's weights.

    Each layer is cast only while it runs, so it needs the memory of one layer in fp32 besides the target,
    whose weights it shares. The model's own decoder runs, never the fused one.

    Args:
        target: the target, which is not modified.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target.model, target.info, target.tokenizer)
        self._wide = torch.promote_types(target.dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.final_norm_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return self._wide

    @property
    def head_weight(self) -> Tensor:
        """The LM head's weight [V, E], cast; `head` needs less memory."""
        return super().head_weight.to(self.dtype)

    @property
    def embed_weight(self) -> Tensor:
        """The input embeddings [V, E], cast."""
        return super().embed_weight.to(self.dtype)

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., E] of token ids [...]."""
        return super().embed(ids).to(self.dtype)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of final normed hidden states [..., E]."""
        parts = super().head_weight.split(HEAD_ROWS)
        return torch.cat([linear(hidden, part.to(self.dtype)) for part in parts], -1)

    def forward(
        self,
        rows: TokenBatch,
        cache: KVCache,
        *,
        outputs: OutputRequest = OutputRequest(),  # noqa: B008 (frozen)
        hook: AttentionHook | None = None,
    ) -> TargetStep:
        """See `Target.forward`; the cache's dtype must be this one's (`new_cache`)."""
        rows = TokenBatch(rows.pos_BT, None, rows.embeds(self.embed), rows.mask, rows.n_B)
        with _cast_while_running([*self.model.model.layers, self.model.model.norm], self.dtype):
            return super().forward(rows, cache, outputs=outputs, hook=hook)


@contextmanager
def _cast_while_running(modules: list[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Context manager in which each module's weights have this dtype while the module runs."""
    held: list[tuple[nn.Parameter, Tensor]] = []

    def cast(module: nn.Module, _inputs: Any) -> None:
        for weight in module.parameters():
            if weight.dtype != dtype:
                held.append((weight, weight.data))
                weight.data = weight.data.to(dtype)

    def restore(*_: Any) -> None:
        while held:
            weight, data = held.pop()
            weight.data = data

    hooks = [module.register_forward_pre_hook(cast) for module in modules]
    hooks += [module.register_forward_hook(restore) for module in modules]
    try:
        yield
    finally:
        restore()
        for hook in hooks:
            hook.remove()

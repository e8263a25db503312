"""The one hook between transformers and our caches: an attention function, and no mask function.

Shapes: B batch, T new tokens, H query heads, G KV heads, D head dim, E hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from transformers import AttentionInterface

from longtrain.cache.base import KVCache, Mask, PrefixOnly
from longtrain.errors import ConfigError

NAME = "longtrain"
"""The `attn_implementation` that a target's model is built with."""

Watch: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], None]
"""Called once a layer with (layer, q_BHTD, k_BGTD, v_BGTD) of the new rows, after RoPE and q/k norm, right
after K and V were written and before attention. It may keep views; it must not write into them.

A watch, or a cache, that also has a method `see_inputs(layer, x_BTE)` is shown what each layer's attention
reads (the output of the norm before it), before its queries, keys and values are made."""

Inputs: TypeAlias = Callable[[int, Tensor], None]
"""Called once a layer with (layer, x_BTE)."""


@dataclass(frozen=True)
class Pass:
    """What one forward tells the hook; it travels through the model as the extra keyword `longtrain_pass`.

    Args:
        cache: owner of K and V.
        mask: visibility among the new rows.
        stop_at_layer: leave once this layer's K and V are written.
        watch: sees every layer's queries, keys and values (importance scores are made of them).
    """

    cache: KVCache
    mask: Mask
    stop_at_layer: int | None = None
    watch: Watch | None = None

    @property
    def inputs(self) -> list[Inputs]:
        """Who wants to see what each layer's attention reads: the watch, the cache, both or nobody."""
        found = [getattr(one, "see_inputs", None) for one in (self.watch, self.cache)]
        return [look for look in found if look is not None]


class LeaveEarly(Exception):  # noqa: N818 (a jump out of the model, not an error)
    """Raised by the hook at `Pass.stop_at_layer`, caught by `Target`; never seen outside."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    longtrain_pass: Pass | None = None,
    written: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer by the cache of this forward.

    The name is not registered as a mask function, so transformers builds no mask (and needs no host sync).

    Args:
        module: the model's attention module; only its `layer_idx` is used.
        query: [B, H, T, D] after RoPE (and q_norm).
        key: [B, G, T, D] after RoPE (and k_norm).
        value: [B, G, T, D].
        attention_mask: always None.
        scaling: softmax scale; None means D ** -0.5.
        longtrain_pass: this forward's cache and mask.
        written: whether K and V are in the cache already.

    Returns:
        out [B, T, H, D] as transformers wants it, and no weights.

    Raises:
        ConfigError: the model was called directly and not through `Target`.
    """
    if longtrain_pass is None:
        raise ConfigError(
            "a model built for longtrain was called directly; call Target.forward or Target.packed, "
            "or load it again with attn_implementation='sdpa'"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    cache = longtrain_pass.cache
    if not written and not isinstance(longtrain_pass.mask, PrefixOnly):
        cache.write(layer, key, value)
    if longtrain_pass.watch is not None:
        longtrain_pass.watch(layer, query, key, value)
    if layer == longtrain_pass.stop_at_layer:
        raise LeaveEarly
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out_BHTD, _lse = cache.attend(layer, query, mask=longtrain_pass.mask, scale=scale)
    return out_BHTD.transpose(1, 2), None


AttentionInterface.register(NAME, attend)

"""Connects transformers' models to our caches, as an attention function without a mask function.

Shapes: B batch, T new tokens, H query heads, G KV heads, D head dim, E hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from longtrain.cache.base import KVCache, Mask, PrefixOnly
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.kernels.attention.sinks import with_sinks

if TYPE_CHECKING:
    from longtrain.targets.info import TargetInfo

NAME = "longtrain"
"""The `attn_implementation` that a target's model is built with."""

AttentionHook: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], None]
"""An attention hook: called once per layer with (layer, q_BHTD, k_BGTD, v_BGTD) of the new tokens.

They are after RoPE and q/k norm; the call is right after K and V were written and before attention. It may
keep views but must not write into them. If a hook, or a cache, also has a method `see_inputs(layer, x_BTE)`,
that is called with each layer's attention input (the output of the norm before it), before queries, keys and
values are computed.
"""

Inputs: TypeAlias = Callable[[int, Tensor], None]
"""Called once per layer with (layer, x_BTE)."""


@dataclass(frozen=True)
class Pass:
    """Arguments of the hook for one forward, passed through the model as the extra keyword `longtrain_pass`.

    Args:
        cache: owner of K and V.
        mask: visibility among the new tokens.
        stop_at_layer: leave once this layer's K and V are written.
        hook: receives every layer's queries, keys and values (for importance scores).
    """

    cache: KVCache
    mask: Mask
    stop_at_layer: int | None = None
    hook: AttentionHook | None = None

    @property
    def inputs(self) -> list[Inputs]:
        """The `see_inputs` methods of the attention hook and of the cache, as far as they have one."""
        found = [getattr(one, "see_inputs", None) for one in (self.hook, self.cache)]
        return [look for look in found if look is not None]


UNUSED = frozenset(
    {
        "dropout",
        "is_causal",
        "position_ids",
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
    }
)
"""Keywords of transformers' calls that change nothing here: a target is frozen, and caches know positions."""


class LeaveEarly(Exception):  # noqa: N818 (a jump out of the model, not an error)
    """Raised by the hook at `Pass.stop_at_layer` and always caught by `Target`."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    longtrain_pass: Pass | None = None,
    written: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention with the cache of this forward.

    The name is not registered as a mask function, so transformers builds no mask (and needs no host sync).

    Args:
        module: the model's attention module; only its `layer_idx` is used.
        query: [B, H, T, D] after RoPE (and q_norm).
        key: [B, G, T, D] after RoPE (and k_norm).
        value: [B, G, T, D].
        attention_mask: always None.
        scaling: softmax scale; None means D ** -0.5.
        sliding_window: keys that a token sees, its own included; None: all.
        s_aux: sink of each query head [H], a score in the softmax's denominator without a value; None: none.
        longtrain_pass: this forward's cache and mask.
        written: True if K and V are in the cache already.
        others: transformers' further keywords. Those of `UNUSED` are ignored; any other that is not None,
            such as `softcap`, would change the result.

    Returns:
        The output [B, T, H, D], as transformers expects it, and no weights.

    Raises:
        ConfigError: the model was called directly and not through `Target`.
        TargetMismatchError: the model's attention has what no cache computes.
    """
    unknown = [key for key, value in others.items() if value is not None and key not in UNUSED]
    if unknown:
        raise TargetMismatchError(
            f"the attention of {type(module).__name__} is called with {', '.join(unknown)}, which longtrain "
            "does not compute; its output would be wrong"
        )
    if longtrain_pass is None:
        raise ConfigError(
            "a model built for longtrain was called directly; call Target.forward or Target.packed, "
            "or load it again with attn_implementation='sdpa'"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    cache = longtrain_pass.cache
    if not written and not isinstance(longtrain_pass.mask, PrefixOnly):
        cache.write(layer, key, value)
    if longtrain_pass.hook is not None:
        longtrain_pass.hook(layer, query, key, value)
    if layer == longtrain_pass.stop_at_layer:
        raise LeaveEarly
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if s_aux is not None:
        out_BHTD, lse_BHT = cache.attend_lse(
            layer, query, mask=longtrain_pass.mask, scale=scale, window=sliding_window or 0
        )
        out_BHTD = with_sinks(out_BHTD, lse_BHT, s_aux)
    elif sliding_window is None:
        out_BHTD, _lse = cache.attend(layer, query, mask=longtrain_pass.mask, scale=scale)
    else:
        out_BHTD, _lse = cache.attend_window(
            layer, query, mask=longtrain_pass.mask, scale=scale, window=sliding_window
        )
    return out_BHTD.transpose(1, 2), None


def without_idle_windows(model: PreTrainedModel, info: TargetInfo) -> None:
    """Clear sliding windows that span the whole context, so that `attend` is called without one."""
    if any(info.layer(index).window for index in range(info.n_layers)):
        return
    if getattr(model.config, "sliding_window", None) is not None:
        model.config.sliding_window = None
    for module in model.modules():
        # Exaone 4 does not rotate in a full layer whose model has windows
        if getattr(module, "sliding_window", None) is not None and getattr(module, "is_sliding", True):
            module.sliding_window = None  # type: ignore[assignment]


AttentionInterface.register(NAME, attend)

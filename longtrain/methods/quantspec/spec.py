"""The `MethodSpec` of QuantSpec: its parts for an engine, and the cost of a cycle."""

from __future__ import annotations

from typing import Any

from torch import nn

from longtrain.cache.hierarchical import HierarchicalCache
from longtrain.cache.layered import LayeredCache
from longtrain.cache.quantised import new_quantised
from longtrain.cache.room import hierarchical_bytes
from longtrain.costs.cycle import Forward
from longtrain.costs.method import CycleCost, MethodCost
from longtrain.costs.model import Sizes
from longtrain.costs.roofline import Width, stored
from longtrain.decoding.roles import Parts
from longtrain.kernels.hierarchical.layout import Split, check_shape
from longtrain.methods.checked import given_keys
from longtrain.methods.quantspec.config import Config
from longtrain.methods.quantspec.runtime import QuantSpecRuntime
from longtrain.methods.spec import MethodSpec
from longtrain.targets.int4 import Int4Target
from longtrain.targets.model import Target

_ROUND = 1024
"""Capacity of a cache is a multiple of this, so that prompts of similar length can reuse one."""


class Caches:
    """Creates an engine's caches, and reuses the last one if it is large enough (and has no windows).

    Captured CUDA graphs are valid only for the cache they were captured with, so only one cache is in use at
    a time.

    Args:
        target: the frozen model.
        config: settings.
    """

    def __init__(self, target: Target, config: Config) -> None:
        self.target, self.config = target, config
        self.last: HierarchicalCache | LayeredCache | None = None

    def __call__(self, batch: int, max_tokens: int, max_nodes: int) -> HierarchicalCache | LayeredCache:
        """Return an empty cache; same signature as `Target.new_cache`."""
        target, info, last = self.target, self.target.info, self.last
        like = (batch, max_tokens, target.device, target.dtype)
        if isinstance(last, HierarchicalCache) and last.serves(*like):
            last.clear()
            return last
        if last is not None:
            last.free()  # before the next is allocated
        self.last = None
        self.last = new_quantised(
            HierarchicalCache,
            n_heads=info.n_heads,
            windows=info.windows,
            options={"split": Split(self.config.split), "strict": self.config.strict_flush},
            n_kv_heads=info.n_kv_heads,
            head_dim=info.head_dim,
            batch=batch,
            max_tokens=-(-max_tokens // _ROUND) * _ROUND,
            max_nodes=max_nodes,
            device=target.device,
            dtype=target.dtype,
        )
        return self.last


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    """Return the cache and, if `config.draft`, the draft."""
    given_keys("QuantSpec", keys)
    info = target.info
    if not info.full_layers:
        info.require_full_layers("QuantSpec")
    check_shape(n_heads=info.n_heads, n_kv_heads=info.n_kv_heads, head_dim=info.head_dim)

    new_cache = Caches(target, config)
    if not config.draft:
        return Parts(cache=new_cache, name="quantspec")
    model = Int4Target(target, group=config.weight_group) if config.weight_bits == 4 else target
    draft = QuantSpecRuntime(model, kv_bits=config.kv_bits)
    return Parts(draft=draft, cache=new_cache, name="quantspec")


def cycle(config: Config, size: Sizes, widths: tuple[int, ...], itemsize: int) -> CycleCost:
    """Cost of a cycle: draft steps that read the cache's upper half, and one verification that reads both.

    Raises:
        ConfigError: the quantised cache does not support the target's heads.
    """
    check_shape(n_heads=size.n_heads, n_kv_heads=size.n_kv_heads, head_dim=size.head_dim)
    target = Width(8 * itemsize, 8)
    draft = Width(4 if config.weight_bits == 4 else 8 * itemsize, config.kv_bits)
    drafted = len(widths) if config.draft else 0
    own_weights = config.draft and config.weight_bits == 4

    def cache_bytes(batch: int, tokens: int) -> float:
        return hierarchical_bytes(
            n_layers=size.n_layers,
            n_kv_heads=size.n_kv_heads,
            head_dim=size.head_dim,
            batch=batch,
            max_tokens=tokens,
            itemsize=itemsize,
        )

    return CycleCost(
        title="QuantSpec",
        alone=Forward(target),
        draft=(Forward(draft, times=drafted),) if drafted else (),
        verify=Forward(target, rows=drafted + 1),
        weight_bytes=stored(size.weights + size.head, 4) if own_weights else 0.0,
        cache_bytes=cache_bytes,
    )


SPEC = MethodSpec(
    name="quantspec",
    config=Config,
    paper="QuantSpec: Self-Speculative Decoding with Hierarchical Quantized KV Cache, arXiv 2502.10424",
    attach=_attach,
    text_settings=lambda config: {"split": config.split} if config.strict_flush else None,
    cost=MethodCost(cycle=cycle),
)

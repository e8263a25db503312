"""What QuantSpec costs: cycles in which the target drafts for itself on a quantised cache."""

from __future__ import annotations

from longtrain.cache.room import hierarchical_bytes
from longtrain.costs.cycle import Forward
from longtrain.costs.method import CycleCost, MethodCost
from longtrain.costs.model import Sizes
from longtrain.costs.roofline import Width, stored
from longtrain.kernels.hierarchical.layout import check_shape
from longtrain.methods.quantspec.config import Config


def cycle(config: Config, size: Sizes, widths: tuple[int, ...], itemsize: int) -> CycleCost:
    """Draft steps that read the cache's upper half, and one verification that reads both.

    Raises:
        ConfigError: heads that the quantised cache does not serve.
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


COST = MethodCost(cycle=cycle)

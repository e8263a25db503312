"""The caches of `cache=`, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longtrain.cache.base import KVCache
from longtrain.cache.elastic import ElasticCache, Offloading
from longtrain.cache.hierarchical import HierarchicalCache, UpperHalfCache
from longtrain.cache.quantised import new_quantised
from longtrain.errors import ConfigError
from longtrain.kernels.hierarchical.layout import Split
from longtrain.settings import read

NewCache = Callable[[int, int, int], KVCache]
"""Makes an empty cache; same arguments as `Target.new_cache`: (batch, max_tokens, max_nodes)."""


@dataclass(frozen=True)
class Halves:
    """Options of the hierarchical cache.

    Args:
        split: the division of an 8-bit code into two nibbles.
    """

    split: Split = Split.FLOOR


CACHES: dict[str, tuple[type, str]] = {
    "int8": (Halves, "the hierarchical cache as the target reads it, at 8 bits"),
    "int4": (Halves, "the hierarchical cache read at 4 bits, as its draft reads it"),
    "elastic": (Offloading, "KV entries in host memory, and on the device those that a selector chose"),
}
"""Name -> the dataclass of its options, and a description."""


def options_of(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a named cache as plain JSON values, defaults included.

    Raises:
        ConfigError: no such cache or option, or a value that is not allowed.
    """
    return {key: getattr(value, "value", value) for key, value in vars(_read(name, given)).items()}


def cache_maker(
    name: str,
    given: Mapping[str, Any],
    *,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    windows: Sequence[int] = (),
    **where: Any,
) -> NewCache:
    """Return a function that makes empty caches of the named kind.

    Args:
        name: a key of `CACHES`.
        given: its options.
        n_layers: number of layers of the target.
        n_heads: number of query heads of the target.
        n_kv_heads: number of KV heads of the target.
        head_dim: size of a head of the target.
        windows: window of each layer, 0 for one without; empty: no layer has one. Elastic caches take none.
        where: `device` and `dtype` of the target.

    Raises:
        ConfigError: no such cache or option, or a value that is not allowed.
    """
    options = _read(name, given)
    shape: dict[str, Any] = {"n_kv_heads": n_kv_heads, "head_dim": head_dim, **where}
    if isinstance(options, Offloading):
        return lambda batch, max_tokens, max_nodes: ElasticCache(
            offloading=options,
            n_layers=n_layers,
            **shape,
            batch=batch,
            max_tokens=max_tokens,
            max_nodes=max_nodes,
        )
    return lambda batch, max_tokens, max_nodes: new_quantised(
        HierarchicalCache if name == "int8" else UpperHalfCache,
        n_heads=n_heads,
        windows=windows or (0,) * n_layers,
        options={"split": options.split},
        **shape,
        batch=batch,
        max_tokens=max_tokens,
        max_nodes=max_nodes,
    )


def _read(name: str, given: Mapping[str, Any]) -> Any:
    if name not in CACHES:
        raise ConfigError(f"unknown cache '{name}'; known: {', '.join(CACHES)}")
    return read(CACHES[name][0], given, f"cache {name}")

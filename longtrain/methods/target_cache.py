"""Builds the target's cache by name: any cache, or one beside an untrained draft. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from longtrain.methods.quantspec.config import Config
from longtrain.settings import OneOf

if TYPE_CHECKING:
    from longtrain.cache.named import NewCache
    from longtrain.decoding.roles import Parts
    from longtrain.methods.named import Named
    from longtrain.targets.model import Target

TargetCache = Annotated[str, OneOf("plain", "hierarchical")]
"""Form of the target's cache: its own precision, or QuantSpec's hierarchical cache with its defaults."""


def with_cache(parts: Parts, name: str, target: Target) -> Parts:
    """Add the cache of this name to a draft's parts; `plain` adds none."""
    if name == "plain":
        return parts
    from longtrain.methods.quantspec.spec import SPEC

    assert SPEC.attach is not None
    config = Config(draft=False)
    return parts.merge(SPEC.attach(SPEC.build(config, target.info), target, config, {}))


def text_settings(config: Any) -> dict[str, Any] | None:
    """Return the settings that decide generated text (`MethodSpec.text_settings`): only the cache's."""
    from longtrain.methods.quantspec.spec import SPEC

    assert SPEC.text_settings is not None
    own = SPEC.text_settings(Config(draft=False)) if config.cache == "hierarchical" else None
    return own and {"name": SPEC.name, **own}


def named_cache(cache: Named, target: Target) -> NewCache:
    """Return a function that makes empty caches of this name, in the target's shape.

    Raises:
        ConfigError: no such cache or option, or a value that is not allowed.
        TargetMismatchError: an elastic cache of a target with windows, or a target whose layers all have one.
    """
    from longtrain.cache.named import cache_maker

    info = target.info
    if cache.name == "elastic" or not info.full_layers:
        info.require_full_layers(f"cache={cache.name}")
    return cache_maker(
        cache.name,
        cache.options,
        n_layers=info.n_layers,
        n_heads=info.n_heads,
        n_kv_heads=info.n_kv_heads,
        head_dim=info.head_dim,
        windows=info.windows,
        device=target.device,
        dtype=target.dtype,
    )

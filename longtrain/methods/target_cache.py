"""The cache of the target beside a draft that needs no training: the plain one or QuantSpec's. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from longtrain.methods.quantspec.config import Config
from longtrain.settings import OneOf

if TYPE_CHECKING:
    from longtrain.decoding.roles import Parts
    from longtrain.targets.model import Target

TargetCache = Annotated[str, OneOf("plain", "hierarchical")]
"""What the target caches in: its own precision, or QuantSpec's hierarchical cache with its defaults."""


def with_cache(parts: Parts, name: str, target: Target) -> Parts:
    """A draft's parts, joined by the cache of this name; `plain` adds none."""
    if name == "plain":
        return parts
    from longtrain.methods.quantspec.spec import SPEC

    assert SPEC.attach is not None
    config = Config(draft=False)
    return parts.merge(SPEC.attach(SPEC.build(config, target.info), target, config, {}))


def cache_law(config: Any) -> dict[str, Any] | None:
    """The settings that texts follow from (`MethodSpec.cache_law`), which are those of the cache alone."""
    from longtrain.methods.quantspec.spec import SPEC

    assert SPEC.cache_law is not None
    own = SPEC.cache_law(Config(draft=False)) if config.cache == "hierarchical" else None
    return own and {"name": SPEC.name, **own}

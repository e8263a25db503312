"""QuantSpec's cache for the drafts of other methods that need no training. Imports no torch by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError
from longtrain.methods.quantspec.config import Config

if TYPE_CHECKING:
    from longtrain.decoding.roles import Parts
    from longtrain.targets.model import Target

CACHES = ("plain", "hierarchical")
"""Caches that such a draft may be given: the target's own, or QuantSpec's with its defaults."""


def check_cache(name: str) -> None:
    """Refuse a `method.cache` that there is not.

    Raises:
        ConfigError: it is none of `CACHES`.
    """
    if name not in CACHES:
        raise ConfigError(f"method.cache={name}; allowed: {', '.join(CACHES)}")


def with_cache(parts: Parts, name: str, target: Target) -> Parts:
    """A draft's parts with the cache of this name, which is `plain` if it is none of its own."""
    if name == "plain":
        return parts
    from longtrain.methods.quantspec.spec import SPEC

    assert SPEC.attach is not None
    config = Config(draft=False)
    return parts.merge(SPEC.attach(SPEC.build(config, target.info), target, config, {}))


def law_of(config: Any) -> dict[str, Any] | None:
    """What texts on a draft's cache follow from: those of QuantSpec's alone are the same (`cache_law`)."""
    from longtrain.methods.quantspec.spec import SPEC

    assert SPEC.cache_law is not None
    own = SPEC.cache_law(Config(draft=False)) if config.cache == "hierarchical" else None
    return own and {"name": SPEC.name, **own}

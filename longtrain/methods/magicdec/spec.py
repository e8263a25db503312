"""What the rest of the toolkit knows of MagicDec."""

from __future__ import annotations

from typing import Any

from torch import nn

from longtrain.decoding.roles import Parts
from longtrain.errors import ConfigError
from longtrain.methods import target_cache
from longtrain.methods.magicdec.config import Config
from longtrain.methods.magicdec.runtime import MagicDecRuntime
from longtrain.methods.spec import MethodSpec
from longtrain.targets.model import Target


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    """The draft, and a cache if one is asked for."""
    if keys:
        raise ConfigError(f"MagicDec takes no inference keys; got: {', '.join(keys)}")
    parts = Parts(draft=MagicDecRuntime(target, config), name=f"magicdec {config.policy}")
    return target_cache.with_cache(parts, config.cache, target)


SPEC = MethodSpec(
    name="magicdec",
    config=Config,
    paper="MagicDec: Breaking the Latency-Throughput Tradeoff for Long Context Generation with Speculative "
    "Decoding, arXiv 2408.11049",
    attach=_attach,
    cache_law=target_cache.cache_law,
)

"""The `MethodSpec` of MagicDec: its parts for an engine."""

from __future__ import annotations

from typing import Any

from torch import nn

from longtrain.decoding.roles import Parts
from longtrain.methods import target_cache
from longtrain.methods.checked import given_keys
from longtrain.methods.magicdec.config import Config
from longtrain.methods.magicdec.runtime import MagicDecRuntime
from longtrain.methods.spec import MethodSpec
from longtrain.targets.model import Target


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    """Return the draft, and a cache if `config` asks for one."""
    given_keys("MagicDec", keys)
    parts = Parts(draft=MagicDecRuntime(target, config), name=f"magicdec {config.policy}")
    return target_cache.with_cache(parts, config.cache, target)


SPEC = MethodSpec(
    name="magicdec",
    config=Config,
    paper="MagicDec: Breaking the Latency-Throughput Tradeoff for Long Context Generation with Speculative "
    "Decoding, arXiv 2408.11049",
    attach=_attach,
    text_settings=target_cache.text_settings,
)

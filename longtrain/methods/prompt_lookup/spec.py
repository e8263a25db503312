"""What the rest of the toolkit knows of prompt look-up."""

from __future__ import annotations

from typing import Any

from torch import nn

from longtrain.decoding.roles import Parts
from longtrain.errors import ConfigError
from longtrain.methods import target_cache
from longtrain.methods.prompt_lookup.config import Config
from longtrain.methods.prompt_lookup.runtime import PromptLookupRuntime
from longtrain.methods.spec import MethodSpec
from longtrain.targets.model import Target


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    """The draft, and a cache if one is asked for."""
    if keys:
        raise ConfigError(f"prompt look-up takes no inference keys; got: {', '.join(keys)}")
    parts = Parts(draft=PromptLookupRuntime(target, config.ngram), name="prompt_lookup")
    return target_cache.with_cache(parts, config.cache, target)


SPEC = MethodSpec(
    name="prompt_lookup",
    config=Config,
    paper="Inference with Reference: Lossless Acceleration of Large Language Models, arXiv 2304.04487",
    attach=_attach,
    cache_law=target_cache.cache_law,
)

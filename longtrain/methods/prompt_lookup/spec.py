"""The `MethodSpec` of prompt look-up: its parts for an engine."""

from __future__ import annotations

from typing import Any

from torch import nn

from longtrain.decoding.roles import Parts
from longtrain.methods import target_cache
from longtrain.methods.checked import given_keys
from longtrain.methods.prompt_lookup.config import Config
from longtrain.methods.prompt_lookup.runtime import PromptLookupRuntime
from longtrain.methods.spec import MethodSpec
from longtrain.targets.model import Target


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    """Return the draft, and a cache if `config` asks for one."""
    given_keys("prompt look-up", keys)
    parts = Parts(draft=PromptLookupRuntime(config.ngram), name="prompt_lookup")
    return target_cache.with_cache(parts, config.cache, target)


SPEC = MethodSpec(
    name="prompt_lookup",
    config=Config,
    paper="SAM Decoding: Speculative Decoding via Suffix Automaton, arXiv 2411.10666",
    attach=_attach,
    text_settings=target_cache.text_settings,
)

"""The `MethodSpec` of selection without training: its parts for an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from longtrain.cache.entry_sets import ReadBudget
from longtrain.decoding.retrieval.selector import Selector
from longtrain.decoding.roles import Parts
from longtrain.methods.read_budget import READ_KEYS, read_budget
from longtrain.methods.sparse.clusters import ClusterRule
from longtrain.methods.sparse.config import Config
from longtrain.methods.sparse.landmarks import LandmarkRule
from longtrain.methods.sparse.rules import (
    OracleRule,
    PreviousRule,
    QuestRule,
    RandomRule,
    ReusedRule,
    WindowRule,
)
from longtrain.methods.sparse.shared import SharedOracle
from longtrain.methods.spec import MethodSpec
from longtrain.settings import wrong
from longtrain.targets.model import Target

RULES: dict[str, Callable[[ReadBudget, Config, Target], Selector]] = {
    "window": WindowRule,
    "random": RandomRule,
    "quest": QuestRule,
    "clusterkv": ClusterRule,
    "shadowkv": LandmarkRule,
    "previous": PreviousRule,
    "reused": ReusedRule,
    "shared_oracle": SharedOracle,
    "oracle": OracleRule,
}
"""`method.rule` -> selector that scores the KV entries."""


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    """Return the selector."""
    layers = target.info.n_layers
    if config.rule in ("reused", "shared_oracle"):  # they follow the attention of all layers
        target.info.require_full_layers(f"the rule {config.rule}")
    if config.rule == "reused" and config.layer >= layers:
        raise wrong("method.layer", config.layer, f"0 to {layers - 1}, the target's layers")
    selector = RULES[config.rule](read_budget("sparse", keys), config, target)
    return Parts(selector=selector, name=selector.name)


SPEC = MethodSpec(
    name="sparse",
    config=Config,
    paper="Quest (arXiv 2406.10774), ClusterKV (arXiv 2412.03213), ShadowKV (arXiv 2410.21465), TidalDecode "
    "(arXiv 2410.05076), StreamingLLM (arXiv 2309.17453); selections beside which a trained one is measured",
    attach=_attach,
    inference_keys=READ_KEYS,
)

"""What the rest of the toolkit knows of the indexer."""

from __future__ import annotations

from typing import Any

from torch import nn

from longtrain.costs.method import MethodCost
from longtrain.decoding.roles import Parts
from longtrain.errors import TargetMismatchError
from longtrain.methods.indexer.config import Config
from longtrain.methods.indexer.cost import training
from longtrain.methods.indexer.modules import Indexer
from longtrain.methods.indexer.objective import IndexerObjective
from longtrain.methods.indexer.runtime import IndexerSelector
from longtrain.methods.read_budget import READ_KEYS, read_budget
from longtrain.methods.spec import MethodSpec, fitted
from longtrain.targets.info import TargetInfo
from longtrain.targets.model import Target


def _build(config: Config, info: TargetInfo | None) -> nn.Module:
    """An indexer with fresh weights."""
    if info is None:
        raise TargetMismatchError("an indexer is built for a target; pass target.path")
    return Indexer(config, info)


def _objective(module: nn.Module, target: Target | None, config: Config) -> IndexerObjective:
    """The objective."""
    if target is None or not isinstance(module, Indexer):
        raise TargetMismatchError("method=indexer trains an indexer against a target; pass target.path")
    return IndexerObjective(module, target, config)


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    """The selector for an engine, in the target's dtype and on its device (a copy where they differ).

    Raises:
        TargetMismatchError: an indexer of another target.
        ConfigError: an unknown key, or a budget out of range.
    """
    if not isinstance(module, Indexer):
        raise TargetMismatchError(f"method=indexer runs an indexer, not {type(module).__name__}")
    info, weight = target.info, module.q_proj
    own = (*weight.shape[:3], module.heads[1])
    if own != (needed := (info.n_layers, info.n_heads, info.head_dim, info.n_kv_heads)):
        raise TargetMismatchError(
            f"an indexer of (layers, query heads, head dim, KV heads) = {own}; target {info.name} has "
            f"{needed}"
        )
    budget = read_budget("method=indexer", keys)
    module = fitted(module, target)
    return Parts(selector=IndexerSelector(module, budget), name="indexer")


SPEC = MethodSpec(
    name="indexer",
    config=Config,
    paper="RTPurbo: Full Attention Strikes Back: Transferring Full Attention into Sparse within Hundred "
    "Training Steps, arXiv 2605.16928",
    build=_build,
    objective=_objective,
    attach=_attach,
    golden_tokens=lambda config: 128,
    inference_keys=READ_KEYS,
    golden_keys={"budget_tokens": 48, "window": 8},
    cost=MethodCost(training=training, suite="training"),
)

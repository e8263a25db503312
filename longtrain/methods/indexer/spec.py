"""The `MethodSpec` of the indexer: how to build, train and run it."""

from __future__ import annotations

from typing import Any

from torch import nn

from longtrain.costs.method import MethodCost
from longtrain.decoding.roles import Parts
from longtrain.methods.checked import built_for_target, check_sizes, running, trained
from longtrain.methods.indexer.config import Config
from longtrain.methods.indexer.cost import training
from longtrain.methods.indexer.modules import Indexer
from longtrain.methods.indexer.objective import IndexerObjective
from longtrain.methods.indexer.runtime import IndexerSelector
from longtrain.methods.read_budget import READ_KEYS, read_budget
from longtrain.methods.spec import MethodSpec
from longtrain.targets.model import Target


def _objective(module: nn.Module, target: Target | None, config: Config) -> IndexerObjective:
    """Build the objective."""
    return IndexerObjective(*trained(Indexer, module, target), config)


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    """Return the selector for an engine."""
    indexer, info = running(Indexer, module, target), target.info
    check_sizes(
        "an indexer of (layers, query heads, head dim, KV heads)",
        (*indexer.q_proj.shape[:3], indexer.heads[1]),
        (info.n_layers, info.n_heads, info.head_dim, info.n_kv_heads),
        info,
    )
    return Parts(selector=IndexerSelector(indexer, read_budget("method=indexer", keys)), name="indexer")


SPEC = MethodSpec(
    name="indexer",
    config=Config,
    paper="RTPurbo: Full Attention Strikes Back: Transferring Full Attention into Sparse within Hundred "
    "Training Steps, arXiv 2605.16928",
    build=built_for_target(Indexer),
    objective=_objective,
    attach=_attach,
    golden_tokens=lambda config: 128,
    inference_keys=READ_KEYS,
    golden_keys={"budget_tokens": 48, "window": 8},
    cost=MethodCost(training=training, suite="training"),
)

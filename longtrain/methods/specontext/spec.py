"""The `MethodSpec` of SpeContext: how to build, train and run it."""

from __future__ import annotations

from typing import Any

from torch import nn

from longtrain.costs.method import MethodCost
from longtrain.decoding.roles import Parts
from longtrain.methods.checked import built_for_target, check_sizes, running, trained
from longtrain.methods.read_budget import READ_KEYS, read_budget
from longtrain.methods.spec import MethodSpec
from longtrain.methods.specontext.config import Config
from longtrain.methods.specontext.cost import cycle, training
from longtrain.methods.specontext.modules import RetrievalHead
from longtrain.methods.specontext.objective import RetrievalObjective
from longtrain.methods.specontext.prune import pruned
from longtrain.methods.specontext.runtime import RetrievalSelector
from longtrain.methods.specontext.sglang import FORMATS
from longtrain.targets.model import Target


def _objective(module: nn.Module, target: Target | None, config: Config) -> RetrievalObjective:
    """The objective."""
    return RetrievalObjective(*trained(RetrievalHead, module, target), config)


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    """The selector for an engine."""
    head, info = running(RetrievalHead, module, target), target.info
    check_sizes(
        "a retrieval head of (hidden size, layers, KV heads, head dim)",
        (head.input_layernorm.weight.numel(), *head.table_LG.shape, head.dim),
        (info.hidden_size, info.n_layers, info.n_kv_heads, config.head_dim or info.head_dim),
        info,
    )
    budget = read_budget("SpeContext", keys)
    return Parts(selector=RetrievalSelector(head, target, config, budget), name="specontext")


SPEC = MethodSpec(
    name="specontext",
    config=Config,
    paper="SpeContext: Enabling Efficient Long-context Reasoning with Speculative Context Sparsity in LLMs, "
    "arXiv 2512.00722",
    build=built_for_target(RetrievalHead),
    objective=_objective,
    attach=_attach,
    golden_tokens=lambda config: 128,
    inference_keys=READ_KEYS,
    golden_keys={"budget_tokens": 48, "window": 8},
    begins={"eagle3": pruned},
    formats=FORMATS,
    cost=MethodCost(training=training, cycle=cycle, suite="training"),
)

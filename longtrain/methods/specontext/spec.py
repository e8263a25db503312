"""What the rest of the toolkit knows of SpeContext."""

from __future__ import annotations

from typing import Any

from torch import nn

from longtrain.costs.method import MethodCost
from longtrain.decoding.roles import Parts
from longtrain.errors import TargetMismatchError
from longtrain.methods.read_budget import READ_KEYS, read_budget
from longtrain.methods.spec import MethodSpec, fitted
from longtrain.methods.specontext.config import Config
from longtrain.methods.specontext.cost import cycle, training
from longtrain.methods.specontext.modules import RetrievalHead
from longtrain.methods.specontext.objective import RetrievalObjective
from longtrain.methods.specontext.prune import pruned
from longtrain.methods.specontext.runtime import RetrievalSelector
from longtrain.methods.specontext.sglang import FORMATS
from longtrain.targets.info import TargetInfo
from longtrain.targets.model import Target


def _build(config: Config, info: TargetInfo | None) -> nn.Module:
    """A head with fresh weights."""
    if info is None:
        raise TargetMismatchError("a retrieval head is built for a target; pass target.path")
    return RetrievalHead(config, info)


def _objective(module: nn.Module, target: Target | None, config: Config) -> RetrievalObjective:
    """The objective."""
    if target is None or not isinstance(module, RetrievalHead):
        raise TargetMismatchError("SpeContext trains a retrieval head against a target; pass target.path")
    return RetrievalObjective(module, target, config)


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    """The selector for an engine, in the target's dtype and on its device (a copy where they differ).

    Raises:
        TargetMismatchError: a head of another target.
        ConfigError: an unknown key, or a budget out of range.
    """
    if not isinstance(module, RetrievalHead):
        raise TargetMismatchError(f"SpeContext runs a retrieval head, not {type(module).__name__}")
    info, table = target.info, tuple(module.table_LG.shape)
    own = (module.input_layernorm.weight.numel(), *table, module.dim)
    needed = (info.hidden_size, info.n_layers, info.n_kv_heads, config.head_dim or info.head_dim)
    if own != needed:
        raise TargetMismatchError(
            f"a retrieval head of hidden size {own[0]} for {own[1]} layers of {own[2]} KV heads, heads of "
            f"{own[3]}; target {info.name} asks for {needed[0]}, {needed[1]}, {needed[2]} and {needed[3]}"
        )
    budget = read_budget("SpeContext", keys)
    module = fitted(module, target)
    return Parts(selector=RetrievalSelector(module, target, config, budget), name="specontext")


SPEC = MethodSpec(
    name="specontext",
    config=Config,
    paper="SpeContext: Enabling Efficient Long-context Reasoning with Speculative Context Sparsity in LLMs, "
    "arXiv 2512.00722",
    build=_build,
    objective=_objective,
    attach=_attach,
    golden_tokens=lambda config: 128,
    inference_keys=READ_KEYS,
    golden_keys={"budget_tokens": 48, "window": 8},
    begins={"eagle3": pruned},
    formats=FORMATS,
    cost=MethodCost(training=training, cycle=cycle, suite="training"),
)

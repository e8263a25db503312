"""What the rest of the toolkit knows of EAGLE-3."""

from __future__ import annotations

from typing import Any

from torch import nn

from longtrain.costs.method import MethodCost
from longtrain.data.config import DataConfig
from longtrain.decoding.roles import Parts
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.log import get_logger
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.cost import training
from longtrain.methods.eagle3.cycle import cycle
from longtrain.methods.eagle3.formats import FORMATS
from longtrain.methods.eagle3.formats.write import check_heads
from longtrain.methods.eagle3.modules import Eagle3Draft
from longtrain.methods.eagle3.objective import Eagle3Objective
from longtrain.methods.eagle3.runtime import Eagle3Runtime
from longtrain.methods.eagle3.vocabulary import check_vocabulary, from_data, lacking
from longtrain.methods.eagle3.warm_start import warm_start
from longtrain.methods.spec import MethodSpec, fitted
from longtrain.targets.info import TargetInfo
from longtrain.targets.model import Target

log = get_logger(__name__)


def _build(config: Config, info: TargetInfo | None) -> nn.Module:
    """A draft with fresh weights."""
    if info is None:
        raise TargetMismatchError("an EAGLE-3 draft is built for a target; pass target.path")
    return Eagle3Draft(config, info)


def _objective(module: nn.Module, target: Target | None, config: Config) -> Eagle3Objective:
    """The objective; a draft whose weights were not loaded from anywhere begins with the target's."""
    if target is None or not isinstance(module, Eagle3Draft):
        raise TargetMismatchError("EAGLE-3 trains an EAGLE-3 draft against a target; pass target.path")
    if not module.fresh:
        check_vocabulary(module.draft_ids_K, target.info)
        return Eagle3Objective(module, target, config)
    if config.warm_start:
        warm_start(module, target)
    return Eagle3Objective(module, target, config)


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    """The draft for an engine, in the target's dtype and on its device (a copy where they differ)."""
    if not isinstance(module, Eagle3Draft):
        raise TargetMismatchError(f"EAGLE-3 runs an EAGLE-3 draft, not {type(module).__name__}")
    if keys:
        raise ConfigError(f"EAGLE-3 takes no inference keys; got: {', '.join(sorted(keys))}")
    info, hidden = target.info, module.fc.in_features // len(module.layers)
    if (hidden, module.fc.out_features) != (info.hidden_size, info.hidden_size):
        raise TargetMismatchError(
            f"an EAGLE-3 draft of hidden size {module.fc.out_features} that reads states of {hidden}; "
            f"target {info.name} has {info.hidden_size}"
        )
    if (dim := module.self_attn.head_dim) != (needed := config.head_dim or info.head_dim):
        raise TargetMismatchError(
            f"an EAGLE-3 draft with heads of {dim}; target {info.name} and method.head_dim={config.head_dim} "
            f"ask for {needed}"
        )
    if int(module.draft_ids_K.max()) >= info.vocab_size:
        raise TargetMismatchError(
            f"an EAGLE-3 draft whose vocabulary reaches token {int(module.draft_ids_K.max())}; target "
            f"{info.name} has {info.vocab_size} tokens"
        )
    if missing := lacking(module.draft_ids_K, info):
        log.warning("%s; it is never drafted", missing)
    module = fitted(module, target)
    return Parts(draft=Eagle3Runtime(module, target, config), name="eagle3")


def _check_data(config: Config, data: DataConfig) -> None:
    """Refuse documents that are too short for any row to predict a label at every depth.

    Raises:
        ConfigError: a stage cuts documents into pieces of fewer than `depths + 2` tokens.
    """
    shortest = min((stage.doc_tokens for stage in data.stages), default=0)
    if 0 < shortest < config.depths + 2:
        raise ConfigError(
            f"data.stages doc_tokens={shortest} with method.depths={config.depths}: the last depth predicts "
            f"{config.depths + 1} tokens ahead; pass doc_tokens={config.depths + 2} or more"
        )


SPEC = MethodSpec(
    name="eagle3",
    config=Config,
    paper="EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test, "
    "arXiv 2503.01840",
    build=_build,
    objective=_objective,
    formats=FORMATS,
    attach=_attach,
    check_data=_check_data,
    check_target=check_heads,
    cost=MethodCost(training=training, cycle=cycle, suite="training"),
    from_data=from_data,
)

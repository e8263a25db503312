"""The `MethodSpec` of EAGLE-3: how to build, train and run it."""

from __future__ import annotations

from typing import Any

from torch import nn

from longtrain.costs.method import MethodCost
from longtrain.data.config import DataConfig
from longtrain.decoding.roles import Parts
from longtrain.errors import ConfigError
from longtrain.methods.checked import built_for_target, check_sizes, given_keys, running, trained
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.cost import training
from longtrain.methods.eagle3.cycle import cycle
from longtrain.methods.eagle3.formats import FORMATS
from longtrain.methods.eagle3.formats.write import check_heads
from longtrain.methods.eagle3.modules import Eagle3Draft
from longtrain.methods.eagle3.objective import Eagle3Objective
from longtrain.methods.eagle3.runtime import Eagle3Runtime
from longtrain.methods.eagle3.warm_start import warm_start
from longtrain.methods.spec import MethodSpec
from longtrain.methods.vocabulary import check_attached, check_vocabulary, from_data
from longtrain.targets.model import Target


def _objective(module: nn.Module, target: Target | None, config: Config) -> Eagle3Objective:
    """Build the objective; a draft without loaded weights is initialised from the target."""
    draft, target = trained(Eagle3Draft, module, target)
    if not draft.fresh:
        check_vocabulary(draft.draft_ids_K, target.info)
    elif config.warm_start:
        warm_start(draft, target, config)
    return Eagle3Objective(draft, target, config)


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    """Return the draft for an engine."""
    draft, info = running(Eagle3Draft, module, target), target.info
    given_keys("EAGLE-3", keys)
    check_sizes(
        "an EAGLE-3 draft of (hidden size, size of the target's states, head dim)",
        (draft.fc.out_features, draft.fc.in_features // len(draft.layers), draft.self_attn.head_dim),
        (info.hidden_size, info.hidden_size, config.head_dim or info.head_dim),
        info,
    )
    check_attached(draft.draft_ids_K, info, "an EAGLE-3 draft")
    return Parts(draft=Eagle3Runtime(draft, target, config), name="eagle3")


def _check_data(config: Config, data: DataConfig) -> None:
    """Refuse documents that are too short for any token to predict a label at every depth."""
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
    build=built_for_target(Eagle3Draft),
    objective=_objective,
    formats=FORMATS,
    attach=_attach,
    check_data=_check_data,
    check_target=check_heads,
    cost=MethodCost(training=training, cycle=cycle, suite="training"),
    from_data=from_data,
)

"""What the rest of the toolkit knows of EAGLE-3."""

from __future__ import annotations

from torch import nn

from longtrain.errors import TargetMismatchError
from longtrain.methods.eagle3.config import Config
from longtrain.methods.eagle3.formats import FORMATS
from longtrain.methods.eagle3.modules import Eagle3Draft
from longtrain.methods.eagle3.objective import Eagle3Objective
from longtrain.methods.spec import MethodSpec
from longtrain.targets.info import TargetInfo
from longtrain.targets.model import Target


def _build(config: Config, info: TargetInfo | None) -> nn.Module:
    """A draft with fresh weights."""
    if info is None:
        raise TargetMismatchError("an EAGLE-3 draft is built for a target; pass target.path")
    return Eagle3Draft(config, info)


def _objective(module: nn.Module, target: Target | None, config: Config) -> Eagle3Objective:
    """The objective."""
    if target is None or not isinstance(module, Eagle3Draft):
        raise TargetMismatchError("EAGLE-3 trains an EAGLE-3 draft against a target; pass target.path")
    return Eagle3Objective(module, target, config)


SPEC = MethodSpec(
    name="eagle3",
    config=Config,
    paper="EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test, "
    "arXiv 2503.01840",
    build=_build,
    objective=_objective,
    formats=FORMATS,
)

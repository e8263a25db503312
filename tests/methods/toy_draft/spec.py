"""What the rest of the toolkit knows of the toy draft."""

from __future__ import annotations

from typing import Any

from longtrain.methods.toy_draft.config import Config
from longtrain.methods.toy_draft.cost import COST
from longtrain.methods.toy_draft.modules import ToyDraft
from longtrain.methods.toy_draft.objective import ToyObjective
from longtrain.methods.toy_draft.runtime import ToyRuntime
from torch import nn

from longtrain.decoding.roles import Parts
from longtrain.errors import TargetMismatchError
from longtrain.methods.spec import MethodSpec
from longtrain.targets.info import TargetInfo
from longtrain.targets.model import Target


def _build(config: Config, info: TargetInfo | None) -> nn.Module:
    if info is None:
        raise TargetMismatchError("a toy draft is built for a target; pass target.path")
    return ToyDraft(config, info)


def _objective(module: nn.Module, target: Target | None, config: Config) -> ToyObjective:
    assert isinstance(module, ToyDraft) and target is not None
    return ToyObjective(module, target, config)


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    assert isinstance(module, ToyDraft) and not keys
    return Parts(draft=ToyRuntime(module.to(target.device, target.dtype), target), name="toy_draft")


SPEC = MethodSpec(
    name="toy_draft",
    config=Config,
    paper="none: a toy for tests, in the manner of EAGLE-3, arXiv 2503.01840",
    build=_build,
    objective=_objective,
    attach=_attach,
    cost=COST,
)

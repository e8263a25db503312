"""The `MethodSpec` of joint training, which delegates to the members."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from longtrain import methods
from longtrain.costs.method import MethodCost
from longtrain.data.config import DataConfig
from longtrain.data.packing.prepared import Prepared
from longtrain.errors import ConfigError
from longtrain.methods.checked import trained
from longtrain.methods.joint.config import Config, member_keys
from longtrain.methods.joint.cost import training
from longtrain.methods.joint.objective import JointObjective
from longtrain.methods.spec import MethodSpec
from longtrain.targets.info import TargetInfo
from longtrain.targets.model import Target


def members_of(config: Config) -> dict[str, tuple[MethodSpec, Any]]:
    """Return the members' specs and settings, by name.

    Raises:
        ConfigError: a member makes its own sequences, or does not train against a target.
    """
    found = {name: (methods.get(name), settings) for name, settings in config.chosen().items()}
    for name, (spec, _) in found.items():
        if spec.objective is None or spec.data is not None or spec.export is not None:
            raise ConfigError(
                f"method.members.{name} cannot train on the same sequences as others: it trains no module "
                "against a target on prepared documents; leave it out"
            )
    return found


def _build(config: Config, info: TargetInfo | None) -> nn.Module:
    """Build the members' modules by name, each with the initial weights that it would have alone."""
    modules, state = {}, torch.get_rng_state()
    for name, (spec, settings) in members_of(config).items():
        torch.set_rng_state(state)
        with member_keys(name):
            modules[name] = spec.build(settings, info)
    return nn.ModuleDict(modules)


def _objective(module: nn.Module, target: Target | None, config: Config) -> JointObjective:
    modules, target = trained(nn.ModuleDict, module, target)
    return JointObjective(modules, target, members_of(config), vars(config.lr_scales))


def _check_data(config: Config, data: DataConfig) -> None:
    """Refuse data that a member refuses."""
    for name, (spec, settings) in members_of(config).items():
        if spec.check_data is not None:
            with member_keys(name):
                spec.check_data(settings, data)


def _check_target(config: Config, info: TargetInfo) -> None:
    """Refuse settings that a member refuses for this target."""
    for name, (spec, settings) in members_of(config).items():
        if spec.check_target is not None:
            with member_keys(name):
                spec.check_target(settings, info)


def _from_data(module: nn.Module, config: Config, info: TargetInfo, data: Prepared) -> dict[str, Any]:
    """Return the facts that each member takes from the data, under its name."""
    found = {}
    for name, (spec, settings) in members_of(config).items():
        if spec.from_data is not None:
            with member_keys(name):
                found[name] = spec.from_data(module.get_submodule(name), settings, info, data)
    return found


SPEC = MethodSpec(
    name="joint",
    config=Config,
    paper="",
    build=_build,
    objective=_objective,
    check_data=_check_data,
    check_target=_check_target,
    from_data=_from_data,
    members=members_of,
    cost=MethodCost(training=training, response_tokens=512, suite="training"),
)

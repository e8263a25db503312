"""Estimates the cost of a joint training step from those of its members.

No estimate has been compared with a measurement yet.
"""

from __future__ import annotations

from dataclasses import asdict

from longtrain import methods
from longtrain.costs.model import Sizes
from longtrain.costs.training import PackedSequence, StepCost
from longtrain.layers import shapes_alone
from longtrain.methods.joint.config import Config
from longtrain.targets.info import TargetInfo


def training(config: Config, size: Sizes, row: PackedSequence, trained: int, itemsize: int) -> StepCost:
    """Add up the members' operations and the memory they hold until backward; take the maximum of the rest.

    A chunked member leaves only its gradient behind, so of such members the largest counts. The result is an
    upper bound: inputs that two members share count twice, and a member that works during the target's
    forward counts in full beside it.
    """
    steps = [
        methods.get(name).cost.training(settings, size, row, _weights(name, settings, size), itemsize)
        for name, settings in config.chosen().items()
    ]

    def most(key: str) -> int:
        in_turns = [getattr(step, key) for step in steps if step.chunked]
        return sum(getattr(step, key) for step in steps if not step.chunked) + max(in_turns, default=0)

    stored = not any(step.beside_pass for step in steps)  # attention cannot be observed on stored features
    return StepCost(
        inputs=sum(step.inputs for step in steps),
        module=most("module"),
        flops=sum(step.flops for step in steps),
        chunk=max((step.chunk for step in steps if step.chunked), default=row.tokens),
        backward=most("backward"),
        attention_flops=sum(step.attention_flops for step in steps),
        moved=sum(step.moved for step in steps),
        chunked=any(step.chunked for step in steps),
        beside_pass=any(step.beside_pass for step in steps),
        again=max(step.again for step in steps),
        kernels=sum(step.kernels for step in steps),
        kv=max(step.kv for step in steps) if stored else 0,
        hidden=max(step.hidden for step in steps) if stored else 0,
    )


def _weights(name: str, settings: object, size: Sizes) -> int:
    """Return the number of weights that a member trains, without head norms and biases."""
    info = TargetInfo(
        name="",
        family="",
        max_positions=1,
        rms_norm_eps=1e-6,
        rope={},
        qk_norm=False,
        attention_bias=False,
        **asdict(size),
    )
    with shapes_alone():
        module = methods.get(name).build(settings, info)
    return sum(value.numel() for value in module.parameters() if value.requires_grad)

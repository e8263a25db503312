"""What a joint training step takes beside the target's pass: the members' steps one after the other.

No count has been compared with a measurement yet.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from longtrain import methods
from longtrain.costs.model import Sizes
from longtrain.costs.training import PackedRow, StepCost
from longtrain.methods.joint.config import Config
from longtrain.targets.info import TargetInfo


def training(config: Config, size: Sizes, row: PackedRow, trained: int, itemsize: int) -> StepCost:
    """The sum of the members' work; memory that is held until backward adds up, and the rest comes in turns.

    A member in chunks leaves nothing but its gradient behind, so of such members the largest counts. It is an
    upper bound: inputs that two members share count twice, and beside a member that works while the target's
    pass runs all of it does.
    """
    steps = [
        methods.get(name).cost.training(settings, size, row, _weights(name, settings, size), itemsize)
        for name, settings in config.chosen().items()
    ]

    def most(key: str) -> int:
        in_turns = [getattr(step, key) for step in steps if step.chunked]
        return sum(getattr(step, key) for step in steps if not step.chunked) + max(in_turns, default=0)

    stored = not any(step.beside_pass for step in steps)  # what watches the pass cannot read it from a disk
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
    """Weights that a member trains; norms of heads and biases are left out."""
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
    with torch.device("meta"):
        module = methods.get(name).build(settings, info)
    return sum(value.numel() for value in module.parameters() if value.requires_grad)

"""The optimiser and its schedule: AdamW, or Muon with it; warmup, then cosine, linear or constant."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from longtrain.errors import ConfigError
from longtrain.settings import CountOrZero, OneOf, Positive, Share, Words, check, wrong

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LambdaLR

NEAR = 6
"""Largest number of parameter names in a message."""


@dataclass(frozen=True)
class Optim:
    """Settings of the optimiser and of the learning rate over the run (`conf/optim`).

    Args:
        name: `adamw`, or `muon`: Muon on matrices other than embeddings and LM heads, AdamW on the rest.
        lr: peak learning rate, of both.
        momentum: momentum of Muon; AdamW has none.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decay of tensors with two or more dimensions; norms, biases and other vectors have
            none.
        schedule: `cosine`, `linear` or `constant`, after the warmup.
        warmup_ratio: share of the optimiser steps over which the rate rises linearly.
        warmup_steps: the same in steps; has precedence over `warmup_ratio` when set.
        min_lr_ratio: the share of `lr` that cosine and linear end at.
        lr_multipliers: pattern of parameter names (`*` matches anything) -> factor on `lr`; the first match
            counts.

    Raises:
        ConfigError: a value is out of its range.
    """

    name: Annotated[str, OneOf("adamw", "muon")] = "adamw"
    lr: Positive = 5e-4
    momentum: Share = 0.95
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: float = 1e-6
    weight_decay: float = 0.1
    schedule: Annotated[str, OneOf("cosine", "linear", "constant")] = "cosine"
    warmup_ratio: Share = 0.1
    warmup_steps: CountOrZero | None = None
    min_lr_ratio: Share = 0.0
    lr_multipliers: Annotated[Mapping[str, float], Words("{PATTERN: FACTOR, ...}, each factor a number")] = (
        field(default_factory=dict)
    )

    def __post_init__(self) -> None:
        check(self, "optim")
        if self.name == "adamw" and self.momentum != Optim.momentum:
            allowed = f"{Optim.momentum} where optim.name=adamw, which has betas in its place"
            raise wrong("optim.momentum", self.momentum, allowed)
        if 1 in self.betas:
            raise wrong("optim.betas", list(self.betas), "two numbers from 0 up to, not including, 1")

    def factor(self, step: int, *, max_steps: int) -> float:
        """Return the share of the peak rate at an optimiser step (0-based); never 0 at the first one."""
        warmup = self.warmup_steps if self.warmup_steps is not None else round(self.warmup_ratio * max_steps)
        if step < warmup:
            return (step + 1) / warmup
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, max_steps - warmup))
        shape = 0.5 * (1 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1 - done
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * shape

    def build(
        self, parameters: Iterable[tuple[str, nn.Parameter]], *, max_steps: int, fused: bool = False
    ) -> tuple[torch.optim.Optimizer, LambdaLR]:
        """Build the optimiser over the trainable parameters, and its schedule.

        Args:
            parameters: (name, parameter) pairs; those without `requires_grad` are left out.
            max_steps: optimiser steps of the whole run.
            fused: use torch's fused CUDA kernel of AdamW.

        Raises:
            ConfigError: see `trainable`.
        """
        import torch
        from torch.optim.lr_scheduler import LambdaLR

        from longtrain.training.muon import MuonWithAdamW

        named = self.trainable(parameters)
        if self.name == "adamw":
            adamw = torch.optim.AdamW
            optimizer: torch.optim.Optimizer = adamw(self._groups(named), lr=self.lr, **self._adamw(fused))
        else:
            matrices = self._groups([pair for pair in named if self._by_muon(*pair)])
            others = self._groups([pair for pair in named if not self._by_muon(*pair)])
            optimizer = MuonWithAdamW(
                matrices, others, lr=self.lr, momentum=self.momentum, adamw=self._adamw(fused)
            )
        rate: Callable[[int], float] = partial(self.factor, max_steps=max_steps)
        return optimizer, LambdaLR(optimizer, rate)

    def trainable(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
        """Return the pairs with `requires_grad`; the parameters may be on the meta device.

        Raises:
            ConfigError: nothing is trainable, nothing is a matrix for Muon, or a multiplier's pattern matches
                no name.
        """
        named = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        if not named:
            raise ConfigError("the module has no trainable parameters; there is nothing to optimize")
        self._check_patterns([name for name, _ in named])
        if self.name == "muon" and not any(self._by_muon(*pair) for pair in named):
            raise ConfigError(
                "optim.name=muon trains matrices, and the module has none; pass optim.name=adamw"
            )
        return named

    def moments(self, trainable: Iterable[tuple[str, nn.Parameter]]) -> int:
        """Return how many numbers the optimiser stores: Muon's momentum, and AdamW's two moments.

        Args:
            trainable: (name, parameter) pairs, from `trainable`.
        """
        return sum((1 if self._by_muon(*pair) else 2) * pair[1].numel() for pair in trainable)

    def _by_muon(self, name: str, parameter: nn.Parameter) -> bool:
        """Return True if Muon trains this parameter, and not AdamW."""
        from longtrain.training.muon import is_hidden_matrix

        return self.name == "muon" and is_hidden_matrix(name, parameter)

    def _adamw(self, fused: bool) -> dict[str, Any]:
        return {"betas": (self.betas[0], self.betas[1]), "eps": self.eps, "fused": fused}

    def _groups(self, named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        """Group parameters by learning rate and weight decay."""
        groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
        for name, parameter in named:
            key = (self._multiplier(name), parameter.ndim >= 2)
            groups.setdefault(key, []).append(parameter)
        return [
            {"params": members, "lr": self.lr * times, "weight_decay": self.weight_decay if decays else 0.0}
            for (times, decays), members in groups.items()
        ]

    def _multiplier(self, name: str) -> float:
        matches = (times for pattern, times in self.lr_multipliers.items() if fnmatch.fnmatch(name, pattern))
        return next(matches, 1.0)

    def _check_patterns(self, names: list[str]) -> None:
        for pattern in self.lr_multipliers:
            if not fnmatch.filter(names, pattern):
                known = f"nearest of {len(names)}" if len(names) > NEAR else "there are"
                raise ConfigError(
                    f"optim.lr_multipliers pattern '{pattern}' matches no trainable parameter; {known}: "
                    f"{', '.join(_nearest(pattern, names))}; write ~optim.lr_multipliers to leave out all "
                    "patterns, a recipe's too"
                )


def _nearest(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that have the longest part of a pattern's text in common with it, nearest first."""

    def common(name: str) -> int:
        return SequenceMatcher(None, pattern, name, autojunk=False).find_longest_match().size

    return sorted(names, key=common, reverse=True)[:NEAR]

"""Muon for matrices and AdamW for everything else, as one optimiser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer

APART = ("lm_head", "embed", "markov_head", "codebook")
"""Names of matrices with one row per token; AdamW trains them, as Muon's authors advise."""


def is_hidden_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Return True if Muon trains this parameter: a matrix that is no embedding and no LM head."""
    return parameter.ndim == 2 and not any(word in name for word in APART)


class MuonWithAdamW(Optimizer):
    """Both optimisers over one list of groups and one state, so that schedules and checkpoints see one.

    Muon's step is scaled to the root mean square of AdamW's, so `lr` and `weight_decay` mean the same in both
    (Liu et al., Muon is Scalable for LLM Training, arXiv 2502.16982).

    Args:
        matrices: groups for Muon, as torch takes them; at least one.
        others: groups for AdamW; there may be none.
        lr: learning rate of both.
        momentum: momentum of Muon.
        adamw: further arguments of AdamW.
    """

    def __init__(
        self,
        matrices: list[dict[str, Any]],
        others: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        adamw: Mapping[str, Any],
    ) -> None:
        parts: list[Optimizer] = [Muon(matrices, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")]
        parts += [AdamW(others, lr=lr, **adamw)] if others else []
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.sizes = [len(part.param_groups) for part in parts]
        self.parts = parts
        self._share()

    def _share(self) -> None:
        """Make both parts use this optimiser's groups and state."""
        at = 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            part.param_groups, part.state = self.param_groups[at : at + size], self.state
            at += size

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does, then share the new groups and state with both parts."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step of both optimisers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

"""Golden outputs of a selector: the scores that it gives the rows of a fixed prompt.

Shapes: T prompt tokens and a root, S = T - 1 rows, X sets, E hidden dim, B batch (1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from longtrain.artifact.golden import PERIOD, Attach, Golden, WideTarget, dtype_name, fixed_prompt
from longtrain.cache.selected import SelectedCache
from longtrain.decoding.retrieval.selector import Selector
from longtrain.errors import ArtifactError
from longtrain.targets.step import Rows, TargetStep, Want

if TYPE_CHECKING:
    from longtrain.targets.model import Target

FLOOR = -25.0
"""Scores below this are compared as this: they are natural logs of weights."""


@dataclass(frozen=True)
class RowGolden(Golden):
    """A prompt, the target's hidden states of it, and the scores that its last token gives the rows before.

    Args:
        ids_T: the prompt, int64; the last token is the root of a step.
        scores_XS: from the selector in fp32.
    """

    ids_T: Tensor
    scores_XS: Tensor
    who: ClassVar[str] = "selector"
    outputs: ClassVar[str] = "scores"
    own: ClassVar[tuple[str, ...]] = ("ids_T", "scores_XS")
    pattern: ClassVar[str] = r"hidden_-?\d+"

    @classmethod
    def record(cls, attach: Attach, target: Target, *, tokens: int) -> Self:
        """See `Golden`."""
        gen = torch.Generator().manual_seed(0)
        tokens = min(max(PERIOD, tokens), target.info.max_positions // 2)
        ids_T = fixed_prompt(target.info.vocab_size, tokens + 1, gen)
        _, inputs = _native(_selector(attach, target), target, ids_T)
        scores_XS = _scores(_selector(attach, WideTarget(target)), target, ids_T, inputs)
        return cls(inputs, dtype_name(target.dtype), ids_T, scores_XS)

    @classmethod
    def _made_of(cls, own: dict[str, Tensor], inputs: dict[str, Tensor], dtype: str) -> Self:
        ids_T, scores_XS = own.values()
        lengths = {len(tensor) for tensor in inputs.values()} | {scores_XS.shape[-1]}
        if ids_T.dim() != 1 or lengths != {len(ids_T) - 1} or scores_XS.dim() != 2:
            raise cls._unfitting(prompt=tuple(ids_T.shape), scores=tuple(scores_XS.shape))
        return cls(inputs, dtype, ids_T, scores_XS)

    def _own(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.own}

    def _expected(self) -> tuple[Tensor, Tensor]:
        return self.scores_XS, self.scores_XS

    def _on_stored(self, attach: Attach, target: Target) -> Tensor:
        return _scores(_selector(attach, WideTarget(target)), target, self.ids_T, self.inputs)

    def _on_target(self, attach: Attach, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        return _native(_selector(attach, target), target, self.ids_T)

    @staticmethod
    def _distance(got: Tensor, want: Tensor) -> Tensor:
        """Relative distance of centred scores, for each set."""
        got_XS, want_XS = (one.double() - one.double().mean(-1, keepdim=True) for one in (got, want))
        return (got_XS - want_XS).norm(dim=-1) / want_XS.norm(dim=-1).clamp_min(1e-6)


def _selector(attach: Attach, target: Any) -> Selector:
    selector = attach(target).selector
    if selector is None or selector.table_LG is None:
        raise ArtifactError("golden scores of rows need a method that brings a selector; this one does not")
    return selector


@torch.no_grad()
def _native(selector: Selector, target: Target, ids_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Scores with the target at hand, and the hidden states that it gave, on the CPU."""
    ids_BS = ids_T[None, :-1].to(target.device)
    want = Want("none", hidden=selector.want.hidden)
    pos_BS = torch.arange(ids_BS.shape[1], device=target.device)[None]
    cache = target.new_cache(1, ids_BS.shape[1], 0)
    hidden = target.forward(Rows(pos_BS, ids_BS), cache, want=want).hidden
    inputs = {f"hidden_{layer}": state[0].cpu().contiguous() for layer, state in hidden.items()}
    return _scores(selector, target, ids_T, inputs), inputs


@torch.no_grad()
def _scores(selector: Selector, target: Target, ids_T: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Scores of the prompt's rows in fp32, on the CPU, on these hidden states."""
    device, S = target.device, len(ids_T) - 1
    store = target.new_cache(1, S, 1)
    store.rewind([S])
    names = {layer: f"hidden_{layer}" for layer in selector.want.hidden}
    if missing := [name for name in names.values() if name not in inputs]:
        raise ArtifactError(f"the selector reads {missing[0]}, which it was not exported with; export again")
    dtype = getattr(selector, "dtype", target.dtype)
    hidden = {layer: inputs[name][None].to(device, dtype) for layer, name in names.items()}
    ids_BT = ids_T[None].to(device)
    selector.start(
        ids_BT[:, :-1], torch.tensor([S], device=device), TargetStep(None, hidden), SelectedCache(store)
    )
    return selector.ahead(ids_BT[:, -1])[0, :, :S].float().clamp_min(FLOOR).cpu()

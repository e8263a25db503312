"""Golden outputs of an evictor: the importance that it gives to the tokens of a fixed prompt.

Stored are the first layers alone: the evictor in fp32 is asked as if the target had no more of them.

Shapes: T prompt tokens, S tokens of `REPEATED` times the prompt, L layers, F first layers, B batch (1),
H query heads, G KV heads, K head dim.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import Tensor

from longtrain.artifact.golden import (
    PERIOD,
    STRICT,
    Attach,
    Golden,
    as_number,
    dtype_name,
    fixed_prompt,
)
from longtrain.artifact.verification import Check
from longtrain.artifact.wide import WideTarget
from longtrain.cache.dense import DenseCache
from longtrain.decoding.evict import Budget, PromptRun
from longtrain.decoding.roles import Parts
from longtrain.errors import ArtifactError
from longtrain.methods.policies.base import Scorer
from longtrain.targets.step import Rows, Want

if TYPE_CHECKING:
    from longtrain.targets.attention import Inputs, Watch
    from longtrain.targets.model import Target

FIRST = 2
"""Layers whose keys and values are stored; the second one's scores depend on everything in the first."""

REPEATED, SHARE = 8, 0.625
"""What stays is chosen by the prompt's scores so many times in a row, and is this share of them: long enough
for a window of the prompt's length to show beside a budget that is four times as large."""


@dataclass(frozen=True)
class ScoreGolden(Golden):
    """A prompt, what the target's first layers gave for it, and the evictor's scores.

    The inputs are keys and values of the first layers, queries where the evictor watches the prefill, and
    what their attention reads where it wants to see that.

    Args:
        ids_T: the prompt, int64.
        near_FGT: scores from the evictor in fp32 on the inputs, had the target no more layers.
        scores_LGT: scores with the whole target, all in fp32.
        kept_LGS: whether each entry of the KV cache stays, chosen by `scores_LGT`, bool.
    """

    ids_T: Tensor
    near_FGT: Tensor
    scores_LGT: Tensor
    kept_LGS: Tensor
    who: ClassVar[str] = "evictor"
    outputs: ClassVar[str] = "scores"
    own: ClassVar[tuple[str, ...]] = ("ids_T", "near_FGT", "scores_LGT", "kept_LGS")
    choice: ClassVar[str] = "kept_LGS"
    pattern: ClassVar[str] = r"(q|k|v|input)_\d+"

    @classmethod
    def _prompt(cls, target: Target, tokens: int) -> Self:
        gen = torch.Generator().manual_seed(0)
        tokens = min(max(PERIOD, tokens), target.info.max_positions // 2)
        ids_T = fixed_prompt(target.info.vocab_size, tokens, gen)
        return cls({}, dtype_name(target.dtype), {}, ids_T, *[torch.zeros(0)] * 3)

    def _filled(self, on_stored: Tensor, on_target: Tensor) -> Self:
        return dataclasses.replace(self, near_FGT=on_stored, scores_LGT=on_target)

    def _in_fp32(self, attach: Attach, target: Target) -> list[Check]:
        """All layers with a target of the same weights, since stored inputs are those of the first ones."""
        if dtype_name(target.dtype) != self.dtype:
            return []
        what = f"the {self.who} and the target in fp32"
        distances = self._distances(what, self._on_target(attach, WideTarget(target))[0], self.scores_LGT)
        return [Check(what, as_number(distances.max()), STRICT)]

    @classmethod
    def _made_of(
        cls, own: dict[str, Tensor], inputs: dict[str, Tensor], dtype: str, noise: dict[str, float]
    ) -> Self:
        ids_T, near_FGT, scores_LGT, kept_LGS = own.values()
        lengths = {len(tensor) for tensor in inputs.values()} | {near_FGT.shape[-1], scores_LGT.shape[-1]}
        if ids_T.dim() != 1 or lengths != {len(ids_T)} or near_FGT.dim() != 3 or scores_LGT.dim() != 3:
            shapes = (tuple(near_FGT.shape), tuple(scores_LGT.shape))
            raise cls._unfitting(prompt=tuple(ids_T.shape), scores=shapes)
        return cls(inputs, dtype, noise, ids_T, near_FGT, scores_LGT, kept_LGS)

    def _own(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.own}

    def _expected(self) -> tuple[Tensor, Tensor]:
        return self.near_FGT, self.scores_LGT

    def _on_stored(self, attach: Attach, target: Target) -> Tensor:
        view = _NearTarget(target)
        return _near(_scorer(attach, view), view, self.ids_T, self.inputs)

    def _on_target(self, attach: Attach, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
        return _native(_scorer(attach, target), target, self.ids_T)

    def _chosen(self, parts: Parts, target: Target) -> Tensor:
        evictor = parts.evictor
        assert isinstance(evictor, Scorer)
        scores_LBGS = self.scores_LGT.double().repeat(1, 1, REPEATED)[:, None]
        run = SimpleNamespace(lengths=(scores_LBGS.shape[-1],))  # all that a choice by known scores reads
        keep = evictor.with_budget(Budget(ratio=SHARE)).select(cast(PromptRun, run), scores_LBGS)
        assert keep is not None
        return keep.mask(scores_LBGS.shape[-1])

    @staticmethod
    def _distance(got: Tensor, want: Tensor) -> Tensor:
        """Relative distance of the scores, for each layer and head."""
        gap_LG = (got.double() - want.double()).norm(dim=-1)
        return gap_LG / want.double().norm(dim=-1).clamp_min(1e-12)

    def _check_shapes(self, target: Target) -> None:
        for layer in range(min(FIRST, target.info.n_layers)):
            for name in (f"k_{layer}", f"v_{layer}"):
                if name not in self.inputs:
                    raise ArtifactError(f"golden input {name} is missing; export again")
        super()._check_shapes(target)


class _NearTarget(WideTarget):
    """The first layers of a target, in fp32 (or better)."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.info = dataclasses.replace(target.info, n_layers=min(FIRST, target.info.n_layers))


class _Tap:
    """Keeps the first layers' queries, keys and values, and lets the evictor's own watch see everything."""

    def __init__(self, inner: Watch | None) -> None:
        self.inner = inner
        self.inputs: dict[str, Tensor] = {}
        self.see_inputs = None if _looks(inner) is None else self._see

    def _see(self, layer: int, x_BTE: Tensor) -> None:
        if layer < FIRST:
            self.inputs[f"input_{layer}"] = x_BTE[0].cpu().contiguous()
        look = _looks(self.inner)
        assert look is not None
        look(layer, x_BTE)

    def __call__(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        parts = {"k": k_BGTD, "v": v_BGTD} | ({} if self.inner is None else {"q": q_BHTD})
        if layer < FIRST:
            for name, part in parts.items():
                self.inputs[f"{name}_{layer}"] = part[0].transpose(0, 1).cpu().contiguous()
        if self.inner is not None:
            self.inner(layer, q_BHTD, k_BGTD, v_BGTD)


def _looks(watch: Watch | None) -> Inputs | None:
    """What shows a watch the inputs of attention, if it wants to see them."""
    return getattr(watch, "see_inputs", None)


def _scorer(attach: Attach, target: Any) -> Any:
    evictor = attach(target).evictor
    if not isinstance(evictor, Scorer):
        raise ArtifactError("golden scores need a method that brings an evictor; this one does not")
    return evictor


@torch.no_grad()
def _native(evictor: Any, target: Target, ids_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Scores with the target at hand, and what its first layers gave, on the CPU."""
    ids_BT, length = ids_T.to(target.device)[None], len(ids_T)
    cache = target.new_cache(1, length, 0)
    tap = _Tap(evictor.watch([length]))
    pos_BT = torch.arange(length, device=target.device)[None]
    target.forward(Rows(pos_BT, ids_BT), cache, want=Want("none"), watch=tap)
    cache.commit(None, torch.tensor([length], device=target.device))
    return evictor.scores(_run(target, cache, ids_BT, tap.inner))[:, 0].float().cpu(), tap.inputs


@torch.no_grad()
def _near(evictor: Any, view: _NearTarget, ids_T: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Scores of the first layers in fp32 on stored inputs."""
    info, length, device = view.info, len(ids_T), view.device
    cache = DenseCache(
        n_layers=info.n_layers,
        n_kv_heads=info.n_kv_heads,
        head_dim=info.head_dim,
        batch=1,
        max_tokens=length,
        max_nodes=0,
        device=device,
        dtype=view.dtype,
    )
    watch = evictor.watch([length])
    if watch is not None and "q_0" not in inputs:
        raise ArtifactError("the evictor reads the target's queries, which it was not exported with")
    look = _looks(watch)
    if look is not None and "input_0" not in inputs:
        raise ArtifactError("the evictor reads the inputs of attention, which it was not exported with")
    for layer in range(info.n_layers):
        if look is not None:
            look(layer, inputs[f"input_{layer}"].to(device, view.dtype)[None])
        rows = {
            name: inputs[f"{name}_{layer}"].to(device, view.dtype).transpose(0, 1)[None]
            for name in ("qkv" if watch is not None else "kv")
        }
        cache.write(layer, rows["k"], rows["v"])
        if watch is not None:
            watch(layer, rows["q"], rows["k"], rows["v"])
    cache.commit(None, torch.tensor([length], device=device))
    return evictor.scores(_run(view, cache, ids_T.to(device)[None], watch))[:, 0].float().cpu()


def _run(target: Any, cache: DenseCache, ids_BT: Tensor, watched: Watch | None) -> PromptRun:
    length = ids_BT.shape[1]
    return PromptRun(
        target=target,
        cache=cache,
        lengths=(length,),
        tokens_BS=ids_BT,
        n_B=torch.tensor([length], device=ids_BT.device),
        root_B=ids_BT[:, -1],
        watched=watched,
    )

"""Golden outputs of an evictor: the importance it gives a fixed prompt, asked again at every load.

Three things are asked, as of drafts, so that a small fault does not hide behind a half-precision target:

1. the evictor in fp32 on the first layers' keys and values *as stored*: a position off by one, another rotary
   base, LoRA that is lost or scaled otherwise shows;
2. the target at hand, in its own dtype: does it give the stored keys and values;
3. both together in that dtype, all layers, through the very code that decodes, roughly.

Shapes: T prompt tokens, L layers, F first layers, B batch (1), H query heads, G KV heads, K head dim.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtrain.artifact.golden import LOOSE, PERIOD, ROUNDED, STRICT, dtype_name, judge, judge_inputs
from longtrain.artifact.replay import WideTarget, exact_products
from longtrain.cache.dense import DenseCache
from longtrain.decoding.evict import PromptRun
from longtrain.decoding.roles import Parts
from longtrain.errors import ArtifactError
from longtrain.methods.policies.base import Scorer
from longtrain.targets.step import Rows, Want

if TYPE_CHECKING:
    from longtrain.targets.attention import Watch
    from longtrain.targets.model import Target

FIRST = 2
"""Layers whose keys and values are stored; the second one's scores depend on everything in the first."""

Attach = Callable[[Any], Parts]
"""Makes fresh parts, given the target or an fp32 view of it; the module must have that one's dtype."""


@dataclass(frozen=True)
class ScoreGolden:
    """A prompt, what the target's first layers gave for it, and the evictor's scores.

    Args:
        ids_T: the prompt, int64.
        inputs: the target's `k_LAYER`, `v_LAYER` [T, G, K] of the first layers, and `q_LAYER` [T, H, K] where
            the evictor watches the prefill.
        near_FGT: scores from the evictor in fp32 on those, had the target no more layers.
        scores_LGT: scores with the target as it is, fp32.
        dtype: the target's dtype when they were recorded, e.g. `bfloat16`.
    """

    ids_T: Tensor
    inputs: dict[str, Tensor]
    near_FGT: Tensor
    scores_LGT: Tensor
    dtype: str

    @classmethod
    def record(cls, attach: Attach, target: Target, *, tokens: int) -> ScoreGolden:
        """Ask an evictor for its scores.

        Args:
            attach: makes the evictor's parts.
            target: the frozen target.
            tokens: prompt length.
        """
        gen = torch.Generator().manual_seed(0)
        tokens = min(max(PERIOD, tokens), target.info.max_positions // 2)
        block_T = torch.randint(target.info.vocab_size, (PERIOD,), generator=gen)
        ids_T = block_T.repeat(tokens // PERIOD + 1)[:tokens]
        scores_LGT, inputs = _native(_scorer(attach, target), target, ids_T)
        view = _NearTarget(target)
        near_FGT = _near(_scorer(attach, view), view, ids_T, inputs)
        return cls(ids_T, inputs, near_FGT, scores_LGT, dtype_name(target.dtype))

    def verify(self, attach: Attach, target: Target) -> float:
        """Ask again and compare.

        Args:
            attach: makes the evictor's parts.
            target: the frozen target at hand.

        Returns:
            The relative distance of the scores in fp32.

        Raises:
            ArtifactError: something is further off than rounding explains.
        """
        self._check_shapes(target)
        view = _NearTarget(target)
        with exact_products():
            near_FGT = _near(_scorer(attach, view), view, self.ids_T, self.inputs)
        dtypes = {self.dtype, dtype_name(target.dtype)}
        strict = STRICT if len(dtypes) == 1 else ROUNDED
        error = _compare("the evictor in fp32 on stored inputs", near_FGT, self.near_FGT, strict)
        allowed = max(LOOSE.get(dtype, LOOSE["bfloat16"]) for dtype in dtypes)
        scores_LGT, inputs = _native(_scorer(attach, target), target, self.ids_T)
        judge_inputs("evictor", self.inputs, inputs, allowed)
        _compare(f"evictor and target in {dtype_name(target.dtype)}", scores_LGT, self.scores_LGT, allowed)
        return error

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, on the CPU."""
        named = {
            **self.inputs,
            "ids_T": self.ids_T,
            "near_FGT": self.near_FGT,
            "scores_LGT": self.scores_LGT,
        }
        return {name: tensor.cpu().contiguous() for name, tensor in named.items()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], dtype: str) -> ScoreGolden:
        """Rebuild from `tensors()`.

        Raises:
            ArtifactError: a tensor is missing, unknown or of another shape.
        """
        rest = dict(tensors)
        missing = [name for name in ("ids_T", "near_FGT", "scores_LGT") if name not in rest]
        if missing:
            raise ArtifactError(f"golden.safetensors lacks {', '.join(missing)}; export the artifact again")
        ids_T, near_FGT, scores_LGT = (rest.pop(name) for name in ("ids_T", "near_FGT", "scores_LGT"))
        lengths = {len(tensor) for tensor in rest.values()} | {near_FGT.shape[-1], scores_LGT.shape[-1]}
        if ids_T.dim() != 1 or lengths != {len(ids_T)} or near_FGT.dim() != 3 or scores_LGT.dim() != 3:
            raise ArtifactError(
                f"golden.safetensors has shapes that do not fit each other: prompt {tuple(ids_T.shape)}, "
                f"scores {tuple(near_FGT.shape)} and {tuple(scores_LGT.shape)}; export the artifact again"
            )
        unknown = [name for name in rest if not re.fullmatch(r"(q|k|v)_\d+", name)]
        if unknown:
            raise ArtifactError(
                f"golden.safetensors holds unknown tensors: {', '.join(unknown)}; export again"
            )
        return cls(ids_T, rest, near_FGT, scores_LGT, dtype)

    def _check_shapes(self, target: Target) -> None:
        info = target.info
        for layer in range(min(FIRST, info.n_layers)):
            for part, heads in (("q", info.n_heads), ("k", info.n_kv_heads), ("v", info.n_kv_heads)):
                tensor = self.inputs.get(f"{part}_{layer}")
                if tensor is None and part == "q":
                    continue
                if tensor is None or tensor.shape[1:] != (heads, info.head_dim):
                    found = "missing" if tensor is None else str(tuple(tensor.shape))
                    wanted = f"[T, {heads}, {info.head_dim}]"
                    raise ArtifactError(f"golden input {part}_{layer} is {found}, not {wanted}; export again")
        highest = int(self.ids_T.max())
        if highest >= info.vocab_size:
            raise ArtifactError(
                f"golden tokens reach {highest}, the vocabulary is {info.vocab_size}; export again"
            )


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

    def __call__(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        parts = {"k": k_BGTD, "v": v_BGTD} | ({} if self.inner is None else {"q": q_BHTD})
        if layer < FIRST:
            for name, part in parts.items():
                self.inputs[f"{name}_{layer}"] = part[0].transpose(0, 1).cpu().contiguous()
        if self.inner is not None:
            self.inner(layer, q_BHTD, k_BGTD, v_BGTD)


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
    for layer in range(info.n_layers):
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


def _compare(what: str, got_LGT: Tensor, want_LGT: Tensor, allowed: float) -> float:
    """Relative distance of the scores, the worst of all layers and heads."""
    if got_LGT.shape != want_LGT.shape:
        raise ArtifactError(
            f"golden scores are {tuple(want_LGT.shape)}, {what} gives {tuple(got_LGT.shape)}; export again"
        )
    gap_LG = (got_LGT.double() - want_LGT.double()).norm(dim=-1)
    error_LG = gap_LG / want_LGT.double().norm(dim=-1).clamp_min(1e-12)
    error = float(torch.nan_to_num(error_LG, nan=torch.inf).max())
    judge(what, error, allowed)
    return error

"""Golden outputs: what a draft says of a fixed prompt, stored at export and asked again at every load.

The same route serves every draft: prefill, one proposal, two drafted tokens accepted, another proposal. All
tokens are forced, so that no tie can lead two runs apart, and the draft's whole laws are compared. Three
things are asked, so that a small fault does not hide behind the rounding of a half-precision target:

1. the draft in fp32, on the target's keys, values and hidden states *as stored*: a position off by one,
   another rotary base, a lost window or a changed tensor shows;
2. the target at hand, in its own dtype: does it give the stored keys, values and hidden states;
3. both together in that dtype, through the very code that decodes: do they give the stored laws, roughly.

Shapes: T prompt tokens, C cycles, D drafted tokens a cycle, S = T + C * (accepted + 1) committed tokens,
G KV heads, K head dim, E hidden dim, V vocabulary, B batch (1).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtrain.artifact.replay import (
    ACCEPTED,
    ReadLayers,
    Script,
    StoredCache,
    WideTarget,
    chain_rows,
    exact_products,
    follow,
)
from longtrain.decoding.roles import Draft, Parts, TokenTree
from longtrain.errors import ArtifactError
from longtrain.targets.step import Rows, TargetStep

if TYPE_CHECKING:
    from longtrain.targets.model import Target

CYCLES = 2
DEPTH = 4
PERIOD = 61
"""The prompt repeats a block of this many random tokens: sharp attention, so that a shift by one shows."""

FLOOR = -25.0
"""Log-probabilities below this are compared as this (nats)."""

STRICT = 3e-4
"""Largest relative distance of centred log-probabilities in fp32 on stored inputs."""

ROUNDED = 1e-2
"""The same where the target had another dtype then: its embeddings may have been rounded since."""

LOOSE = {"float64": 1e-3, "float32": 1e-2, "float16": 3e-2, "bfloat16": 1e-1}
"""Largest relative distance with the target at hand, by the coarser of its dtypes then and now."""

Attach = Callable[[Any], Parts]
"""Makes fresh parts, given the target or an fp32 view of it; the module must have that one's dtype."""


@dataclass(frozen=True)
class Golden:
    """A script, what the target gave for it, and the draft's laws.

    Args:
        script: all tokens.
        inputs: the target's `k_LAYER`, `v_LAYER` [S, G, K] and `hidden_LAYER` [S, E] that the draft reads.
        logq_CDV: natural log of the law of each drafted token at temperature 1, from the draft in fp32.
        dtype: the target's dtype when they were recorded, e.g. `bfloat16`.
    """

    script: Script
    inputs: dict[str, Tensor]
    logq_CDV: Tensor
    dtype: str

    @classmethod
    def record(cls, attach: Attach, target: Target, *, tokens: int) -> Golden:
        """Ask a draft for its laws.

        Args:
            attach: makes the draft's parts.
            target: the frozen target.
            tokens: prompt length; more than the draft's own window, or a lost window would not show.
        """
        gen = torch.Generator().manual_seed(0)
        vocab = target.info.vocab_size
        room = target.info.max_positions - CYCLES * (ACCEPTED + 1) - DEPTH
        block_T = torch.randint(vocab, (PERIOD,), generator=gen)
        tokens = min(max(PERIOD, tokens), room)
        script = Script(
            block_T.repeat(tokens // PERIOD + 1)[:tokens],
            torch.randint(vocab, (CYCLES,), generator=gen),
            torch.randint(vocab, (CYCLES, DEPTH), generator=gen),
        )
        draft = _draft(attach, target)
        _, inputs = _decode(draft, target, script)
        logq_CDV = _replay(_draft(attach, WideTarget(target)), target, script, inputs)
        return cls(script, inputs, logq_CDV.float(), dtype_name(target.dtype))

    def verify(self, attach: Attach, target: Target) -> float:
        """Ask again and compare.

        Args:
            attach: makes the draft's parts.
            target: the frozen target at hand.

        Returns:
            The relative distance of the laws in fp32.

        Raises:
            ArtifactError: something is further off than rounding explains.
        """
        self._check_shapes(target)
        with exact_products():
            wide = _replay(_draft(attach, WideTarget(target)), target, self.script, self.inputs)
        dtypes = {self.dtype, dtype_name(target.dtype)}
        strict = STRICT if len(dtypes) == 1 else ROUNDED
        error = _compare("the draft in fp32 on stored inputs", wide, self.logq_CDV, strict)
        allowed = max(LOOSE.get(dtype, LOOSE["bfloat16"]) for dtype in dtypes)
        native, inputs = _decode(_draft(attach, target), target, self.script)
        judge_inputs("draft", self.inputs, inputs, allowed)
        _compare(f"draft and target in {dtype_name(target.dtype)}", native, self.logq_CDV, allowed)
        return error

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, on the CPU."""
        named = {**vars(self.script), **self.inputs, "logq_CDV": self.logq_CDV}
        return {name: tensor.cpu().contiguous() for name, tensor in named.items()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], dtype: str) -> Golden:
        """Rebuild from `tensors()`.

        Raises:
            ArtifactError: a tensor is missing, unknown or of another shape.
        """
        rest = dict(tensors)
        missing = [name for name in ("ids_T", "roots_C", "drafts_CD", "logq_CDV") if name not in rest]
        if missing:
            raise ArtifactError(f"golden.safetensors lacks {', '.join(missing)}; export the artifact again")
        script = Script(rest.pop("ids_T"), rest.pop("roots_C"), rest.pop("drafts_CD"))
        logq_CDV = rest.pop("logq_CDV")
        shape, laws = script.drafts_CD.shape, logq_CDV.shape
        lengths = {len(tensor) for tensor in rest.values()}
        good = script.ids_T.dim() == 1 and script.roots_C.shape == shape[:1] and laws[:-1] == shape
        if not good or not lengths <= {len(script.committed())}:
            raise ArtifactError(
                f"golden.safetensors has shapes that do not fit each other: drafts {tuple(shape)}, "
                f"laws {tuple(laws)}, inputs of {sorted(lengths)} tokens; export the artifact again"
            )
        unknown = [name for name in rest if not re.fullmatch(r"(k|v|hidden)_-?\d+", name)]
        if unknown:
            raise ArtifactError(
                f"golden.safetensors holds unknown tensors: {', '.join(unknown)}; export again"
            )
        return cls(script, rest, logq_CDV, dtype)

    def _check_shapes(self, target: Target) -> None:
        info = target.info
        heads = (info.n_kv_heads, info.head_dim)
        for name, tensor in self.inputs.items():
            wanted = (info.hidden_size,) if name.startswith("hidden") else heads
            if tensor.shape[1:] != wanted:
                raise ArtifactError(
                    f"golden input {name} is {tuple(tensor.shape)}, not [S, {wanted}]; export again"
                )
        highest = int(max(part.max() for part in vars(self.script).values()))
        if highest >= info.vocab_size:
            raise ArtifactError(
                f"golden tokens reach {highest}, the vocabulary is {info.vocab_size}; export again"
            )


def _draft(attach: Attach, target: Any) -> Draft:
    draft = attach(target).draft
    if draft is None:
        raise ArtifactError("golden outputs need a method that drafts; this one brings no draft")
    return draft


@torch.no_grad()
def _decode(draft: Draft, target: Target, script: Script) -> tuple[Tensor, dict[str, Tensor]]:
    """Laws with the target at hand, and what the draft reads of it, on the CPU."""
    ids_BT = script.ids_T.to(target.device)[None]
    n_tokens, depth = ids_BT.shape[1], script.drafts_CD.shape[1]
    total = len(script.committed())
    cache = target.new_cache(1, total, depth + 1)
    pos_BT = torch.arange(n_tokens, device=target.device)[None]
    first = target.forward(Rows(pos_BT, ids_BT), cache, want=replace(draft.want, logits="last"))
    cache.commit(None, torch.tensor([n_tokens], device=target.device))
    hidden = {layer: [part[0]] for layer, part in first.hidden.items()}
    read = ReadLayers(cache)

    def step(tree: TokenTree, position: int) -> TargetStep:
        made = target.forward(chain_rows(tree, position), cache, want=replace(draft.want, logits="none"))
        for layer, part in made.hidden.items():
            hidden[layer].append(part[0, : ACCEPTED + 1])
        return made

    laws = follow(draft, script, read, first=first, step=step)
    inputs = {f"hidden_{layer}": torch.cat(parts).cpu() for layer, parts in hidden.items()}
    for layer in sorted(read.layers):
        for name, rows in (("k", cache.k_LBGSD), ("v", cache.v_LBGSD)):
            inputs[f"{name}_{layer}"] = rows[layer, 0, :, :total].transpose(0, 1).cpu().contiguous()
    return _log(laws), inputs


def _replay(draft: Draft, target: Target, script: Script, inputs: dict[str, Tensor]) -> Tensor:
    """Laws in fp32 on stored inputs."""
    wide = torch.promote_types(target.dtype, torch.float32)
    moved = {name: tensor.to(target.device, wide) for name, tensor in inputs.items()}
    layers = {int(name[2:]): (moved[name], moved[f"v_{name[2:]}"]) for name in moved if name.startswith("k_")}
    hidden = {int(name[7:]): rows for name, rows in moved.items() if name.startswith("hidden_")}
    n_tokens, depth = len(script.ids_T), script.drafts_CD.shape[1]
    cache = StoredCache(layers, torch.tensor([n_tokens], device=target.device))

    def rows(start: int, stop: int, length: int) -> TargetStep:
        """Hidden states of committed tokens; those of rejected ones are zero, no draft may use them."""
        parts = {layer: part.new_zeros(1, length, part.shape[1]) for layer, part in hidden.items()}
        for layer, part in parts.items():
            part[0, : stop - start] = hidden[layer][start:stop]
        return TargetStep(None, parts)

    return _log(
        follow(
            draft,
            script,
            cache,
            first=rows(0, n_tokens, n_tokens),
            step=lambda tree, position: rows(position, position + ACCEPTED + 1, depth + 1),
        )
    )


def _log(laws_CDV: Tensor) -> Tensor:
    return laws_CDV.log().clamp_min(FLOOR)


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def _compare(what: str, got_CDV: Tensor, want_CDV: Tensor, allowed: float) -> float:
    """Relative distance of centred log-probabilities, the worst of all laws."""
    if got_CDV.shape != want_CDV.shape:
        raise ArtifactError(
            f"golden laws are {tuple(want_CDV.shape)}, {what} gives {tuple(got_CDV.shape)}; export again"
        )
    want_CDV = (want_CDV - want_CDV.mean(-1, keepdim=True)).double()
    got_CDV = (got_CDV - got_CDV.mean(-1, keepdim=True)).double()
    error_CD = (got_CDV - want_CDV).norm(dim=-1) / want_CDV.norm(dim=-1).clamp_min(1e-6)
    error = float(torch.nan_to_num(error_CD, nan=torch.inf).max())
    judge(what, error, allowed)
    return error


def judge_inputs(who: str, stored: dict[str, Tensor], found: dict[str, Tensor], allowed: float) -> None:
    """Refuse a target that gives a draft or evictor other keys, values or hidden states than were stored."""
    for name, tensor in stored.items():
        if name not in found:
            raise ArtifactError(f"the {who} no longer reads the target's {name}, which it was exported with")
        rows = tensor.flatten(1).float()
        distance = float((found[name].flatten(1).float() - rows).norm() / rows.norm().clamp_min(1e-6))
        judge(f"the target's {name}", distance, allowed)


def judge(what: str, error: float, allowed: float) -> None:
    """Refuse a relative error above what is allowed (and one that is not a number)."""
    if not error <= allowed:
        raise ArtifactError(
            f"golden outputs are not reproduced by {what}: relative error {error:.2g}, allowed {allowed:g}; "
            "it does not compute what was exported (position, window, rotary base, weights); export again"
        )

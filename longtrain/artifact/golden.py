"""Golden outputs: what a draft says of a fixed prompt, stored at export and asked again at every load.

The same route serves every draft: prefill, one proposal, two drafted tokens accepted, another proposal. All
tokens are forced, so that no tie can lead the two sides apart, and the draft's whole laws are compared. A
position that is off by one, another rotary base, a lost window or a changed tensor moves them by far more
than rounding does.

Shapes: T prompt tokens, C cycles, D drafted tokens a cycle, V vocabulary, B batch (1), N nodes, P path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.cache.base import Causal
from longtrain.decoding.roles import Draft, Law, Parts, TreeShape, Verdict
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ArtifactError
from longtrain.target.step import Rows

if TYPE_CHECKING:
    from longtrain.target.model import Target

CYCLES = 2
DEPTH = 4
ACCEPTED = 2
PERIOD = 61
"""The prompt repeats a block of this many random tokens: sharp attention, so that a shift by one shows."""

FLOOR = -25.0
"""Log-probabilities below this are compared as this (nats)."""

TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "float16": 2e-2, "bfloat16": 8e-2}
"""Largest relative distance of centred log-probabilities, by the coarser of the two dtypes. In float32
different kernels and devices stay below 1e-4; in bfloat16 the target's hidden states do by some percent."""

Attach = Callable[[], Parts]
"""Makes fresh parts for the module and target at hand."""


@dataclass(frozen=True)
class Golden:
    """Forced tokens and the laws that the draft gave for them.

    Args:
        ids_T: the prompt, int64.
        roots_C: last chosen token of each cycle, int64.
        drafts_CD: drafted tokens of each cycle, int64.
        logq_CDV: natural log of the law each drafted token was drawn from at temperature 1, fp32.
        dtype: the target's dtype when they were recorded, e.g. `bfloat16`.
    """

    ids_T: Tensor
    roots_C: Tensor
    drafts_CD: Tensor
    logq_CDV: Tensor
    dtype: str

    TENSORS = ("ids_T", "roots_C", "drafts_CD", "logq_CDV")

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
        tokens = max(PERIOD, min(tokens, target.info.max_positions - CYCLES * (DEPTH + 1)))
        block_T = torch.randint(vocab, (PERIOD,), generator=gen)
        ids_T = block_T.repeat(tokens // PERIOD + 1)[:tokens]
        roots_C = torch.randint(vocab, (CYCLES,), generator=gen)
        drafts_CD = torch.randint(vocab, (CYCLES, DEPTH), generator=gen)
        logq_CDV = _laws(attach().draft, target, ids_T, roots_C, drafts_CD)
        return cls(ids_T, roots_C, drafts_CD, logq_CDV, str(target.dtype).removeprefix("torch."))

    def verify(self, attach: Attach, target: Target) -> float:
        """Ask again and compare.

        Returns:
            The largest relative distance over all laws.

        Raises:
            ArtifactError: it is above the tolerance of the two dtypes.
        """
        got_CDV = _laws(attach().draft, target, self.ids_T, self.roots_C, self.drafts_CD)
        error_CD = _distance(got_CDV, self.logq_CDV)
        dtypes = (self.dtype, str(target.dtype).removeprefix("torch."))
        allowed = max(TOLERANCE.get(name, TOLERANCE["bfloat16"]) for name in dtypes)
        worst = float(error_CD.max())
        if not worst <= allowed:
            cycle, depth = divmod(int(error_CD.flatten().argmax()), error_CD.shape[1])
            raise ArtifactError(
                f"golden outputs are not reproduced: relative error {worst:.2g} at cycle {cycle}, "
                f"depth {depth}, allowed {allowed:g} ({dtypes[0]} recorded, {dtypes[1]} now); the module "
                "does not compute what was exported (position, window, rotary base, weights); export again"
            )
        return worst

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, on the CPU."""
        return {name: getattr(self, name).cpu().contiguous() for name in self.TENSORS}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], dtype: str) -> Golden:
        """Rebuild from `tensors()`.

        Raises:
            ArtifactError: a tensor is missing or of another shape.
        """
        missing = sorted(set(cls.TENSORS) - set(tensors))
        if missing:
            raise ArtifactError(f"golden.safetensors lacks {', '.join(missing)}; export the artifact again")
        golden = cls(**{name: tensors[name] for name in cls.TENSORS}, dtype=dtype)
        shape = golden.drafts_CD.shape
        if (
            golden.logq_CDV.shape[:-1] != shape
            or golden.roots_C.shape != shape[:1]
            or golden.ids_T.dim() != 1
        ):
            raise ArtifactError(
                f"golden.safetensors has shapes that do not fit each other: drafts {tuple(shape)}, "
                f"laws {tuple(golden.logq_CDV.shape)}; export the artifact again"
            )
        return golden


class _ForcedCoins:
    """Draws the tokens it was given, by absolute position."""

    def __init__(self, tokens_D: Tensor, first: int) -> None:
        self._tokens_D, self._first = tokens_D, first

    def below(self, prob_B: Tensor, pos_B: Tensor, role: str) -> Tensor:
        return prob_B >= 0.5

    def draw(self, weight_BV: Tensor, pos_B: Tensor, role: str) -> Tensor:
        index_B = (pos_B - self._first).clamp(0, len(self._tokens_D) - 1)
        return self._tokens_D.to(weight_BV.device)[index_B.to(weight_BV.device)]


@torch.no_grad()
def _laws(draft: Draft | None, target: Target, ids_T: Tensor, roots_C: Tensor, drafts_CD: Tensor) -> Tensor:
    """The draft's laws along the forced tokens, `logq_CDV` in fp32 on the CPU."""
    if draft is None:
        raise ArtifactError("golden outputs need a method that drafts; this one brings no draft")
    device, depth = target.device, drafts_CD.shape[1]
    ids_BT = ids_T.to(device)[None]
    n_B = torch.tensor([ids_BT.shape[1]], device=device)
    cache = target.new_cache(1, ids_BT.shape[1] + len(roots_C) * (depth + 1), depth + 1)
    want = replace(draft.want, logits="last")
    pos_BT = torch.arange(ids_BT.shape[1], device=device)[None]
    step = target.forward(Rows(pos_BT=pos_BT, ids_BT=ids_BT), cache, want=want)
    cache.commit(None, n_B)
    draft.start(ids_BT, n_B, step, cache)
    shape, sampling = TreeShape((1,) * depth, Law.IID), Sampling(temperature=1.0)
    laws = []
    nexts_C = torch.cat([roots_C[1:], roots_C[:1]])
    for root, follow, drafts_D in zip(roots_C, nexts_C, drafts_CD, strict=True):
        position = int(cache.len_B[0])
        tree = draft.propose(root.to(device)[None], shape, sampling, _ForcedCoins(drafts_D, position + 1))
        if tree.q_BNV is None or tree.tokens_BN[0, 1:].tolist() != drafts_D.tolist():
            raise ArtifactError(
                "the draft did not sample its chain through the coins it was given; no golden outputs"
            )
        laws.append(tree.q_BNV[0, :depth].float().cpu().log())
        pos_BT = position + tree.depth_N[None]
        rows = Rows(pos_BT=pos_BT, ids_BT=tree.tokens_BN, mask=Causal())
        step = target.forward(rows, cache, want=replace(draft.want, logits="none"))
        path_BP = torch.arange(depth + 1, device=device)[None]
        path_BP = torch.where(path_BP <= ACCEPTED, path_BP, 0)
        n_B = torch.tensor([ACCEPTED + 1], device=device)
        cache.commit(path_BP, n_B)
        draft.observe(tree, Verdict(path_BP, n_B, next_B=follow.to(device)[None]), step)
    return torch.stack(laws).clamp_min(FLOOR)


def _distance(got_CDV: Tensor, want_CDV: Tensor) -> Tensor:
    """Relative distance of centred log-probabilities, one a law; infinite where the shapes differ."""
    if got_CDV.shape != want_CDV.shape:
        return torch.full(want_CDV.shape[:-1] or (1, 1), torch.inf)
    want_CDV = want_CDV.clamp_min(FLOOR)
    want_CDV = want_CDV - want_CDV.mean(-1, keepdim=True)
    got_CDV = got_CDV - got_CDV.mean(-1, keepdim=True)
    error_CD = (got_CDV - want_CDV).norm(dim=-1) / want_CDV.norm(dim=-1).clamp_min(1e-6)
    return torch.nan_to_num(error_CD, nan=torch.inf)

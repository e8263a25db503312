"""A draft driven by hand: forced tokens, and a target's keys and values as they were stored.

Shapes: B batch (1), S committed tokens, T new rows, D drafted tokens a cycle, C cycles, H query heads,
G KV heads, K head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from longtrain.cache.base import Causal, KVCache, Mask, PrefixOnly
from longtrain.decoding.roles import Draft, Law, TokenTree, TreeShape, Verdict
from longtrain.decoding.sampling import Sampling
from longtrain.errors import ArtifactError
from longtrain.targets.step import Rows, TargetStep

if TYPE_CHECKING:
    from longtrain.targets.model import Target

ACCEPTED = 2
"""Drafted tokens that are accepted in every cycle."""

Step = Callable[[TokenTree, int], TargetStep]
"""(chain, position of its root) -> the target's step over it."""


@dataclass(frozen=True)
class Script:
    """Every token of a run, decided beforehand.

    Args:
        ids_T: the prompt, int64.
        roots_C: last chosen token of each cycle, int64.
        drafts_CD: drafted tokens of each cycle, int64; the first `ACCEPTED` of them are accepted.
    """

    ids_T: Tensor
    roots_C: Tensor
    drafts_CD: Tensor

    def committed(self) -> Tensor:
        """The prompt and everything accepted after it."""
        pieces = [self.ids_T]
        for root, drafts_D in zip(self.roots_C, self.drafts_CD, strict=True):
            pieces += [root[None], drafts_D[:ACCEPTED]]
        return torch.cat(pieces)


class StoredCache(KVCache):
    """The committed keys and values of some layers, grown by `commit` alone; attends in plain arithmetic."""

    def __init__(self, layers: dict[int, tuple[Tensor, Tensor]], len_B: Tensor) -> None:
        self.layers = layers
        self.len_B = len_B

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Nothing is written: what will be committed is stored already."""

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """Every row sees the committed prefix."""
        if not isinstance(mask, PrefixOnly) or layer not in self.layers:
            raise ArtifactError(
                f"the draft reads layer {layer} of the target, which the artifact does not hold"
            )
        length, groups = int(self.len_B[0]), q_BHTD.shape[1] // self.layers[layer][0].shape[1]
        k_HSD, v_HSD = (
            part[:length].to(q_BHTD.dtype).repeat_interleave(groups, dim=1).transpose(0, 1)
            for part in self.layers[layer]
        )
        scores_HTS = q_BHTD[0] @ k_HSD.transpose(1, 2) * scale
        return (scores_HTS.softmax(-1) @ v_HSD)[None], scores_HTS.logsumexp(-1)[None]

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """The next rows count as committed."""
        self.len_B = self.len_B + n_B

    def bytes(self) -> int:
        """Bytes of the stored layers."""
        return sum(part.nbytes for pair in self.layers.values() for part in pair)


class ReadLayers(KVCache):
    """A cache that notes which layers a draft reads."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.layers: set[int] = set()

    @property
    def len_B(self) -> Tensor:  # type: ignore[override]  # noqa: N802
        """Of the cache itself."""
        return self.cache.len_B

    def write(self, layer: int, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Handed on."""
        self.cache.write(layer, k_BGTD, v_BGTD)

    def attend(self, layer: int, q_BHTD: Tensor, *, mask: Mask, scale: float) -> tuple[Tensor, Tensor | None]:
        """Handed on, and noted."""
        self.layers.add(layer)
        return self.cache.attend(layer, q_BHTD, mask=mask, scale=scale)

    def commit(self, path_BP: Tensor | None, n_B: Tensor) -> None:
        """Handed on."""
        self.cache.commit(path_BP, n_B)

    def bytes(self) -> int:
        """Of the cache itself."""
        return self.cache.bytes()


class WideTarget:
    """A target whose embedding, rotary and head work in fp32 (or better), for a draft that does."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.dtype = torch.promote_types(target.dtype, torch.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    @property
    def head_weight(self) -> Tensor:
        """The LM head's weight."""
        return self._target.head_weight.to(self.dtype)

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings."""
        return self._target.embed(ids).to(self.dtype)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits."""
        return linear(hidden, self.head_weight)

    def rope(self, pos_BT: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Cos and sin."""
        return self._target.rope(pos_BT, dtype=dtype or self.dtype)


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
def follow(draft: Draft, script: Script, cache: KVCache, *, first: TargetStep, step: Step) -> Tensor:
    """Lead a draft along a script and ask for its law at every drafted token.

    Args:
        draft: fresh.
        script: all tokens.
        cache: holds the prompt, committed.
        first: the target's step over the prompt.
        step: the target's step over a chain.

    Returns:
        probabilities `q_CDV`, at temperature 1, on the CPU.

    Raises:
        ArtifactError: the draft does not take its tokens from the coins.
    """
    device, depth = cache.len_B.device, script.drafts_CD.shape[1]
    draft.start(script.ids_T.to(device)[None], cache.len_B.clone(), first, cache)
    shape, sampling = TreeShape((1,) * depth, Law.IID), Sampling(temperature=1.0)
    nexts_C = torch.cat([script.roots_C[1:], script.roots_C[:1]])
    laws = []
    for root, follower, drafts_D in zip(script.roots_C, nexts_C, script.drafts_CD, strict=True):
        position = int(cache.len_B[0])
        tree = draft.propose(root.to(device)[None], shape, sampling, _ForcedCoins(drafts_D, position + 1))
        if tree.q_BNV is None or tree.tokens_BN[0, 1:].tolist() != drafts_D.tolist():
            raise ArtifactError("the draft does not sample its chain with the coins it is given")
        laws.append(tree.q_BNV[0, :depth].cpu())
        target_step = step(tree, position)
        path_BP = torch.arange(depth + 1, device=device)[None]
        path_BP = torch.where(path_BP <= ACCEPTED, path_BP, 0)
        n_B = torch.tensor([ACCEPTED + 1], device=device)
        cache.commit(path_BP, n_B)
        draft.observe(tree, Verdict(path_BP, n_B, follower.to(device)[None]), target_step)
    return torch.stack(laws)


def chain_rows(tree: TokenTree, position: int) -> Rows:
    """The rows of a chain whose root is at `position`."""
    return Rows(pos_BT=position + tree.depth_N[None], ids_BT=tree.tokens_BN, mask=Causal())


@contextmanager
def exact_products() -> Iterator[None]:
    """No TF32 inside."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

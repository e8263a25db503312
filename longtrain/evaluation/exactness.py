"""Is speculative output that of plain decoding? Token for token, or differing only where rounding may decide.

Shapes: B batch (1), T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from longtrain.target.step import Rows, Want

if TYPE_CHECKING:
    from longtrain.cache.base import KVCache
    from longtrain.target.model import Target

ALLOWED_GAP = 2e-2
"""Logits. On a GPU two shapes of one product round differently; nearer than this either is an argmax."""


@dataclass(frozen=True)
class Difference:
    """Where an output first leaves plain decoding.

    Args:
        prompt: its number.
        position: the first differing token, counted from the first new one.
        gap: how far the worse of the two tokens lies below the best logit there, recomputed over
            the text so far with the head in fp32; infinite where one text is only a part of the other.
    """

    prompt: int
    position: int
    gap: float


@dataclass(frozen=True)
class Exactness:
    """How many outputs were compared, and the differences among them.

    Args:
        compared: outputs.
        differences: those that differ.
        strict: fp32 or fp64 on a CPU, where no difference is allowed.
        judged: greedy decoding, where a difference can be told from rounding.
    """

    compared: int
    differences: tuple[Difference, ...]
    strict: bool
    judged: bool = True

    @property
    def violations(self) -> int:
        """Differences that rounding does not excuse: all if `strict`, else by their gap; 0 if sampled."""
        return self.judged * sum(self.strict or not d.gap < ALLOWED_GAP for d in self.differences)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "compared": self.compared,
            "different": len(self.differences),
            "violations": self.violations,
            "strict": self.strict,
            "judged": self.judged,
            "largest_gap": max((d.gap for d in self.differences if d.gap != float("inf")), default=None),
            "first": [
                {"prompt": d.prompt, "position": d.position, "gap": None if d.gap == float("inf") else d.gap}
                for d in self.differences[:10]
            ],
        }


def compare(
    target: Target,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    *,
    other: Sequence[Sequence[int]],
    greedy: bool = True,
    new_cache: Callable[..., KVCache] | None = None,
) -> Exactness:
    """Compare outputs with plain decoding of the same prompts.

    Args:
        target: the frozen model; recomputes the logits at first differences.
        prompts: token ids.
        plain: plain decoding's tokens.
        other: the tokens to judge.
        greedy: whether gaps mean something; sampled text is only counted as same or different.
        new_cache: makes the cache that both were decoded on (`Parts.cache`) where that changes the logits:
            they are then recomputed on one, token by token. None: the plain cache.

    Source: design decision "exactness": identity in fp32 and fp64 on a CPU, elsewhere a top-2 gap below 2e-2.
    """
    strict = greedy and target.device.type == "cpu" and target.dtype in (torch.float32, torch.float64)
    differences = []
    for index, (prompt, a, b) in enumerate(zip(prompts, plain, other, strict=True)):
        if list(a) == list(b):
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        gap = float("inf")
        if greedy and at < min(len(a), len(b)):
            gap = _gap(target, prompt, a[:at], rivals=(a[at], b[at]), new_cache=new_cache)
        differences.append(Difference(index, at, gap))
    return Exactness(len(plain), tuple(differences), strict, greedy)


@torch.no_grad()
def _gap(
    target: Target,
    prompt: Sequence[int],
    text: Sequence[int],
    *,
    rivals: tuple[int, int],
    new_cache: Callable[..., KVCache] | None,
) -> float:
    """How far the worse rival lies below the best logit after prompt and text."""
    steps = [[*prompt, *text]] if new_cache is None else [list(prompt), *([token] for token in text)]
    cache = (new_cache or target.new_cache)(1, len(prompt) + len(text), 1)
    hidden_E, at = torch.empty(0), 0
    for ids in steps:
        ids_BT = torch.tensor([ids], device=target.device)
        pos_BT = torch.arange(at, at + len(ids), device=target.device)[None]
        step = target.forward(Rows(pos_BT, ids_BT), cache, want=Want(logits="none", hidden=(-1,)))
        cache.commit(None, torch.tensor([len(ids)], device=target.device))
        hidden_E, at = step.hidden[-1][0, -1], at + len(ids)
    wide = torch.promote_types(target.dtype, torch.float32)
    logits_V = linear(hidden_E.to(wide), target.head_weight.to(wide))
    return float(logits_V.max() - logits_V[list(rivals)].min())

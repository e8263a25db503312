"""Is speculative output that of plain decoding? Token for token, or differing only where rounding may decide.

Shapes: B batch (1), T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from longtrain.target.step import Rows, Want

if TYPE_CHECKING:
    from longtrain.target.model import Target

ALLOWED_GAP = 2e-2
"""Logits. On a GPU two shapes of one product round differently; nearer than this either is an argmax."""


@dataclass(frozen=True)
class Difference:
    """Where an output first leaves plain decoding.

    Args:
        prompt: its number.
        position: the first differing token, counted from the first new one.
        gap: how far the worse of the two tokens lies below the best logit there, recomputed by one forward
            over the text so far with the head in fp32; infinite where one text is only a part of the other.
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
) -> Exactness:
    """Compare outputs with plain decoding of the same prompts.

    Args:
        target: the frozen model; recomputes the logits at first differences.
        prompts: token ids.
        plain: plain decoding's tokens.
        other: the tokens to judge.
        greedy: whether gaps mean something; sampled text is only counted as same or different.

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
            gap = _gap(target, [*prompt, *a[:at]], (a[at], b[at]))
        differences.append(Difference(index, at, gap))
    return Exactness(len(plain), tuple(differences), strict, greedy)


@torch.no_grad()
def _gap(target: Target, text: list[int], rivals: tuple[int, int]) -> float:
    cache = target.new_cache(1, len(text), 1)
    ids_BT = torch.tensor([text], device=target.device)
    rows = Rows(torch.arange(len(text), device=target.device)[None], ids_BT)
    step = target.forward(rows, cache, want=Want(logits="none", hidden=(-1,)))
    wide = torch.promote_types(target.dtype, torch.float32)
    logits_V = linear(step.hidden[-1][0, -1].to(wide), target.head_weight.to(wide))
    return float(logits_V.max() - logits_V[list(rivals)].min())

"""Is speculative output that of plain decoding? Token for token, or differing only where rounding may decide.

Shapes: B batch (1), T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from longtrain.decoding.prefill import prefill
from longtrain.decoding.roles import Parts
from longtrain.errors import LongtrainError
from longtrain.log import get_logger
from longtrain.targets.step import Rows, Want

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)

ALLOWED_GAP = 2e-2
"""Logits. On a GPU two shapes of one product round differently; nearer than this either is an argmax."""
WRONG_GAP = 1.0
"""Logits. Farther than this no rounding, not even of 16-bit numbers, makes a token an argmax."""


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

    @property
    def wrong(self) -> int:
        """Differences that no rounding of any number format explains: an error, not a matter of precision."""
        return self.judged * sum(self.strict or not d.gap < WRONG_GAP for d in self.differences)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "compared": self.compared,
            "different": len(self.differences),
            "violations": self.violations,
            "wrong": self.wrong,
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
    parts: Parts | None = None,
) -> Exactness:
    """Compare outputs with plain decoding of the same prompts.

    Args:
        target: the frozen model; recomputes the logits at first differences.
        prompts: token ids.
        plain: plain decoding's tokens.
        other: the tokens to judge.
        greedy: whether gaps mean something; sampled text is only counted as same or different.
        parts: what changes the logits of both: the evictor and the cache they were decoded with.

    Source: design decision "exactness": identity in fp32 and fp64 on a CPU, elsewhere a top-2 gap below 2e-2.
    """
    strict = greedy and is_strict(target)
    differences = []
    for index, (prompt, a, b) in enumerate(zip(prompts, plain, other, strict=True)):
        if list(a) == list(b):
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        gap = float("inf")
        if greedy and at < min(len(a), len(b)):
            gap = gap_of(target, prompt, a[:at], rivals=(a[at], b[at]), parts=parts)
        differences.append(Difference(index, at, gap))
    return Exactness(len(plain), tuple(differences), strict, greedy)


def is_strict(target: Target) -> bool:
    """Whether the same text must come out to the last token: on a CPU with 32 or 64 bits."""
    return target.device.type == "cpu" and target.dtype in (torch.float32, torch.float64)


def enforce(found: Iterable[tuple[str, dict[str, Any] | None]]) -> None:
    """Refuse drafts whose texts are wrong; warn of differences that rounding may explain.

    Args:
        found: what was compared (`longspec in task qasper`) and `Exactness.to_json` of it; None: nothing.

    Raises:
        LongtrainError: a difference that no rounding explains, after all warnings are given.
    """
    wrong = []
    for what, exact in found:
        if not exact or not exact["different"]:
            continue
        message = (
            f"output of {what} differs from decoding without the draft in {exact['different']} of "
            f"{exact['compared']} examples, {exact['violations']} of them beyond rounding (first: "
            f"{exact['first'][0]})"
        )
        if exact["wrong"]:
            wrong.append(message)
        else:
            log.warning(message)
    if wrong:
        raise LongtrainError(f"{'; '.join(wrong)}; the draft's runtime or the engine is wrong")


@torch.no_grad()
def gap_of(
    target: Target,
    prompt: Sequence[int],
    text: Sequence[int],
    *,
    rivals: tuple[int, int],
    parts: Parts | None = None,
    barred: Sequence[int] = (),
    after: Sequence[int] = (),
) -> float:
    """How far the worse rival lies below the best logit after prompt and text.

    The prompt is read, and evicted, as in decoding. On a cache of its own the text follows token by token,
    since it may keep tokens otherwise than it is given them.

    Args:
        target: the frozen model.
        prompt: token ids.
        text: token ids that both outputs share.
        rivals: the two tokens that follow.
        parts: evictor and cache.
        barred: tokens that were impossible there (`min_new_tokens`).
        after: token ids between prompt and text that were read after eviction.
    """
    parts = parts or Parts()
    new_cache = parts.cache or target.new_cache
    read = prefill(
        target,
        new_cache,
        [prompt],
        max_new_tokens=len(text) + 1,
        nodes=1,
        hidden=(-1,),
        evictor=parts.evictor,
        after=[after] if after else None,
    )
    hidden_E, at = read.step.hidden[-1][0, len(prompt) + len(after) - 1], len(prompt) + len(after)
    for ids in [list(text)] if parts.cache is None and text else [[token] for token in text]:
        ids_BT = torch.tensor([ids], device=target.device)
        pos_BT = torch.arange(at, at + len(ids), device=target.device)[None]
        step = target.forward(Rows(pos_BT, ids_BT), read.cache, want=Want(logits="none", hidden=(-1,)))
        read.cache.commit(None, torch.tensor([len(ids)], device=target.device))
        hidden_E, at = step.hidden[-1][0, -1], at + len(ids)
    wide = torch.promote_types(target.dtype, torch.float32)
    logits_V = linear(hidden_E.to(wide), target.head_weight.to(wide))
    rivals_2 = logits_V[list(rivals)]
    logits_V[list(barred)] = -torch.inf
    return float(torch.maximum(logits_V.max(), rivals_2.max()) - rivals_2.min())

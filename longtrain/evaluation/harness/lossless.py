"""Checks that drafted sequences equal the same cache's sequences without a draft, exactly or up to rounding.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtrain.decoding.sampling import Sampling
from longtrain.errors import LongtrainError
from longtrain.evaluation.harness.answers import TakesAnswers
from longtrain.evaluation.harness.protocol import prompt_room
from longtrain.evaluation.harness.rounding import Passage, logits_at_once, noise_of, spacing
from longtrain.evaluation.records import Parting, Record
from longtrain.evaluation.suite import Suite
from longtrain.evaluation.task import Example, Task
from longtrain.log import get_logger
from longtrain.systems import System
from longtrain.systems.system import without_draft

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)

Json = dict[str, Any]

ROUNDING = 2.0
"""A token's distance from the best logit counts as rounding up to this multiple of the measured noise.

More than 1, because the noise is the largest of some hundred measurements and can be exceeded by chance.
"""
WRONG = 4.0
"""A difference of this multiple of the noise or more is an error instead of a warning."""
WINDOW, BEFORE = 32, 8
"""Tokens of a differing sequence that are recomputed, and how many of them precede the first difference."""
MEASURED = 8
"""Differing sequences per task whose noise is measured, which bounds the time this takes."""


@dataclass(frozen=True)
class Reread:
    """The result of recomputing a differing sequence in one pass.

    Args:
        gap: the largest distance of a token's logit below the best logit of its position; infinite if one
            sequence continues where the other ended.
        spacing: the dtype's spacing at its logits, which rounding noise is never below.
        noise: the largest change by another division into steps, at least the spacing, or any number up to
            one that another sequence has; None: not measured.
        positions: number of tokens over which the noise was measured.
    """

    gap: float
    spacing: float = 0.0
    noise: float | None = None
    positions: int = 0

    @property
    def explained(self) -> bool:
        """True if the gap is rounding whatever the noise is, which then need not be measured."""
        return self.gap <= ROUNDING * self.spacing


@dataclass(frozen=True)
class _Known:
    """A recomputed sequence, the tokens per step of its noise, and the noise that was of no interest."""

    read: Reread
    rows: int = 0
    above: float = 0.0

    def serves(self, above: float | None, rows: int) -> bool:
        """True if nothing is to be computed for a draft with so many tokens per step."""
        if above is None:
            return True
        if self.read.noise is None or self.rows != rows:
            return False
        return self.read.noise > self.above or self.read.noise <= above


@dataclass(frozen=True)
class LosslessCheck:
    """Compares the sequences of a run's drafts with plain decoding.

    If a sequence differs, the target recomputes it in one pass. Every token was the best of some step, so it
    lies below the best logit of this pass by no more than rounding moves logits. That noise is measured
    on the same sequences (`harness.rounding`), and only if one of a task lies further below than the dtype's
    spacing explains.

    Only the largest noise of a task decides, so a sequence that cannot exceed it is not measured to the end;
    and what several drafts wrote alike, from the same cache, is recomputed once.

    Args:
        target: the frozen model; recomputes the logits around the first difference.
        suite: the suite that ran.
        systems: the systems that ran.
        sampling: the run's sampling settings.
    """

    target: Target
    suite: Suite
    systems: Sequence[System]
    sampling: Sampling
    _known: dict[tuple[Any, ...], _Known] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What was recomputed: with which cache, evictor and selector, and which tokens -> the result."""

    def judge(
        self, system: System, name: str, drafted: Sequence[Record], partings: Sequence[Parting]
    ) -> tuple[Json, list[Json]] | None:
        """Classify the differing sequences of a task, with metrics of each; None if nothing is generated.

        On a CPU with 32 bits or more every difference is a violation. Elsewhere a difference is a violation
        if its gap exceeds `ROUNDING` times the noise measured on these sequences, and an error from `WRONG`
        times on. Sampled sequences are only counted.

        Args:
            system: the system that drafted.
            name: the task's name.
            drafted: its records for examples that were also run without the draft.
            partings: the first differing positions of these records.
        """
        task = next(one for one in self.suite.tasks if one.name == name)
        if not isinstance(task, Task):
            return None
        there = {record.example for record in drafted}
        examples = {one.id: one for one in task.examples() if one.id in there}
        strict = is_strict(self.target)
        judged = strict or task.sampling(self.sampling).greedy
        if partings and judged:
            what = f"{system.name} in task {task.name}"
            log.info("reading differing texts of %s again: texts=%d of=%d", what, len(partings), len(drafted))
        read = [Reread(math.inf)] * len(partings)
        if judged:
            read = [self._reread(system, task, examples[one.first.example], one) for one in partings]
        noise = 0.0 if strict else max((one.spacing for one in read), default=0.0)
        if judged and not strict and not all(one.explained for one in read):
            for i, one in enumerate(partings):
                if sum(other.noise is not None for other in read) < MEASURED:
                    read[i] = self._reread(system, task, examples[one.first.example], one, noise)
                    noise = max(noise, read[i].noise or 0.0)
        known = [one.gap for one in read if one.gap < math.inf]
        summary = {
            "violations": judged * sum(strict or not one.gap <= ROUNDING * noise for one in read),
            "wrong": judged * sum(strict or not one.gap <= WRONG * noise for one in read),
            "judged": judged,
            "largest_gap": max(known, default=None),
            "noise": {
                "largest": noise,
                "allowed": ROUNDING * noise,
                "texts": sum(one.noise is not None for one in read),
                "tokens": sum(one.positions for one in read),
            }
            if noise
            else None,
        }
        return summary, [_metrics(one.gap, noise) for one in read]

    def notes(self, found: Json) -> list[str]:
        """Notes on sequences that were not compared, or that differ beyond rounding.

        Args:
            found: the output of `results.assemble`.
        """
        names, notes = {system.name for system in self.systems}, []
        for system in self.systems:
            if not system.drafts or system.lossless_of in names:
                continue
            if system.lossless_of is None and without_draft(system, self.systems) is not None:
                why = "its drafts are sampled, so that equal texts are not to be expected"
            else:
                why = "no system of this run has the same cache and no draft"
            notes.append(f"texts of {system.name} are not compared with decoding without the draft: {why}")
        return notes + [
            f"drafted texts of {name} in task {task} differ from those without the draft: {_in_words(exact)}"
            for name, task, exact in _compared(found)
            if exact["violations"]
        ]

    def _reread(
        self, system: System, task: Task, example: Example, parting: Parting, above: float | None = None
    ) -> Reread:
        """Recompute the drafted sequence around the first token that differs.

        Noise is measured unless `above` is None, and exactly if it is above that.
        """
        turn, at = parting.turn - 1, parting.position
        sides = (parting.first, parting.second)
        if any(turn >= len(record.turns) or at >= len(record.turns[turn].tokens) for record in sides):
            return Reread(math.inf)  # one sequence continues where the other has ended
        tokens, other = parting.first.turns[turn].tokens, parting.second.turns[turn].tokens[at]
        first = max(0, at - BEFORE)
        passage = replace(self._passage(system, task, example, tokens[: first + WINDOW]), first=first)
        info, bars = self.target.info, 0 if task.ignore_eos else max(0, task.min_new_tokens - first)
        barred = (*info.eos_ids, *task.stop_ids(self.target.require_tokenizer())) if bars else ()
        part = system.parts
        key = (id(part.cache), id(part.evictor), id(part.selector), passage, at, other, barred, bars)
        known = self._known.get(key)
        if known is None or not known.serves(above, system.nodes):
            logits_TV = logits_at_once(self.target, part, passage)
            gap = gap_of(logits_TV, tokens[first : first + WINDOW], barred=barred, bars=bars)
            gap = max(gap, gap_of(logits_TV[at - first :], [other], barred=barred, bars=bars - (at - first)))
            least = spacing(float(logits_TV.abs().max()), self.target.dtype)
            known = self._known[key] = _Known(Reread(gap, least))
            if above is not None:
                noise = noise_of(self.target, part, passage, logits_TV, rows=system.nodes, above=above)
                read = Reread(gap, least, max(noise, least), len(logits_TV))
                known = self._known[key] = _Known(read, system.nodes, above)
        return known.read if above is not None else Reread(known.read.gap, known.read.spacing)

    def _passage(self, system: System, task: Task, example: Example, tokens: Sequence[int]) -> Passage:
        """A sequence behind its prompt; a short one is followed by a copy of the prompt's end.

        Tokens after a sequence do not change its own logits, and give the noise measurement more positions.
        """
        tokenizer, info = self.target.require_tokenizer(), self.target.info
        prompt = task.encode(example, tokenizer, max_tokens=prompt_room(task, self.target))
        evictor = system.parts.evictor
        if isinstance(evictor, TakesAnswers):
            evictor.tell([prompt.after], [task.answer_ids(example, tokenizer)])
        room = info.max_positions - len(prompt.ids) - len(prompt.after) - len(tokens)
        more = max(0, min(WINDOW - len(tokens), room))
        return Passage(
            tuple(prompt.ids),
            (*tokens, *prompt.ids[len(prompt.ids) - min(more, len(prompt.ids)) :]),
            after=tuple(prompt.after),
            max_new_tokens=task.max_new_tokens,
            sequence_id=task.sequence_id(example),
        )


def is_strict(target: Target) -> bool:
    """True if sequences must be identical: on a CPU with 32 or 64 bits."""
    return target.device.type == "cpu" and target.dtype in (torch.float32, torch.float64)


def gap_of(logits_TV: Tensor, tokens: Sequence[int], *, barred: Sequence[int] = (), bars: int = 0) -> float:
    """The largest distance of a token's logit below the best logit of its position.

    Args:
        logits_TV: the logits that each token is chosen from, at least one row per token.
        tokens: token ids.
        barred: ids that are impossible among the first tokens (`min_new_tokens`).
        bars: the number of first tokens for which `barred` ids are impossible.
    """
    logits_TV = logits_TV[: len(tokens)].clone()
    logits_TV[: max(bars, 0), list(barred)] = -torch.inf
    ids_T1 = torch.tensor(tokens, device=logits_TV.device)[:, None]
    return float((logits_TV.amax(1) - logits_TV.gather(1, ids_T1)[:, 0]).max())


def enforce(found: Json) -> None:
    """Refuse drafts whose sequences are wrong, and warn of differences beyond rounding.

    Args:
        found: the output of `results.assemble`, with the verdicts of a `LosslessCheck`.

    Raises:
        LongtrainError: a difference that rounding does not explain, after all other warnings were logged.
    """
    wrong = []
    for name, task, exact in _compared(found):
        if not exact["violations"]:
            continue  # the table shows how many sequences differ within rounding
        first = exact["first"][0]
        message = (
            f"output of {name} in task {task} differs from decoding without the draft: {_in_words(exact)}; "
            f"first in example {first['example']}, turn {first['turn']}, token {first['position']}"
        )
        if exact["wrong"]:
            wrong.append(message)
        else:
            log.warning(message)
    if wrong:
        raise LongtrainError(f"{'; '.join(wrong)}; the draft's runtime or the engine is wrong")


def _compared(found: Json) -> list[tuple[str, str, Json]]:
    """Yield (system, task, comparison) for every compared task."""
    every = [(system["name"], task) for system in found["systems"] for task in system["tasks"]]
    return [(name, task["task"], task["exactness"]) for name, task in every if task["exactness"]]


def _metrics(gap: float, noise: float) -> Json:
    """The recorded metrics of a differing sequence; infinity becomes null, since JSON has none."""
    known = gap < math.inf
    return {"gap": gap if known else None, "multiple": gap / noise if known and noise else None}


def _in_words(exact: Json) -> str:
    """A sentence on how many sequences differ, and how many of them rounding does not explain."""
    sentence = (
        f"{exact['different']} of {exact['compared']} texts, {exact['violations']} of them beyond rounding"
    )
    noise = exact.get("noise")
    return f"{sentence} (logits move by up to {noise['largest']:.2g})" if noise else sentence

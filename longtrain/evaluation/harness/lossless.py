"""Is drafted text that of the same cache without the draft? Token for token, or but for rounding.

Shapes: B batch (1), T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from longtrain.decoding.appended import given_step
from longtrain.decoding.engine import Engine
from longtrain.decoding.prefill import prefill
from longtrain.decoding.roles import Parts
from longtrain.decoding.sampling import Sampling
from longtrain.errors import LongtrainError
from longtrain.evaluation.figures.outcomes import Parting
from longtrain.evaluation.harness.protocol import prompt_room
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import Suite
from longtrain.evaluation.task import Example, Task
from longtrain.log import get_logger
from longtrain.systems import System
from longtrain.systems.system import without_draft
from longtrain.targets.step import Rows, Want

if TYPE_CHECKING:
    from longtrain.targets.model import Target

log = get_logger(__name__)

Json = dict[str, Any]

ALLOWED_GAP = 2e-2
"""Logits. On a GPU two shapes of one product round differently; nearer than this either is an argmax."""
WRONG_GAP = 1.0
"""Logits. Farther than this no rounding, not even of 16-bit numbers, makes a token an argmax."""


@dataclass(frozen=True)
class LosslessCheck:
    """Compares the texts of a run's drafts with plain decoding.

    Args:
        target: the frozen model; recomputes the logits where texts part.
        suite: that ran.
        systems: that ran.
        sampling: of the run.
    """

    target: Target
    suite: Suite
    systems: Sequence[System]
    sampling: Sampling

    def judge(
        self, system: System, name: str, drafted: Sequence[Record], partings: Sequence[Parting]
    ) -> tuple[Json, list[float | None]] | None:
        """What differences in a task are worth, and their gaps; None where nothing is generated.

        On a CPU with 32 bits or more every difference is a violation, elsewhere those that rounding does not
        excuse; those that no rounding of any number format explains are wrong. Sampled texts are counted and
        no more.

        Args:
            system: that drafted.
            name: of the task.
            drafted: its records that have a record of the system without the draft beside them.
            partings: where texts of theirs first leave those of the other record.

        Source: design decision "exactness": identity in fp32 and fp64 on a CPU, elsewhere a top-2 gap below
        2e-2.
        """
        task = next(one for one in self.suite.tasks if one.name == name)
        if not isinstance(task, Task):
            return None
        there = {record.example for record in drafted}
        examples = {one.id: one for one in task.examples() if one.id in there}
        strict = is_strict(self.target)
        judged = strict or all(self._sampling(task, one).greedy for one in examples.values())
        gaps = [
            self._gap(system, task, examples[one.first.example], one) if judged else math.inf
            for one in partings
        ]
        if partings:
            about = (system.name, task.name, len(partings), len(drafted))
            log.info("differing texts: system=%s task=%s texts=%d of=%d", *about)
        known = [None if gap == math.inf else gap for gap in gaps]
        said = {
            "violations": judged * sum(strict or not gap < ALLOWED_GAP for gap in gaps),
            "wrong": judged * sum(strict or not gap < WRONG_GAP for gap in gaps),
            "judged": judged,
            "largest_gap": max((gap for gap in known if gap is not None), default=None),
        }
        return said, known

    def notes(self, found: Json) -> list[str]:
        """What is to be said of texts that were compared with nothing, or differ beyond rounding.

        Args:
            found: of `results.assemble`.
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
            f"drafted texts of {name} in task {task} differ from those without the draft in "
            f"{exact['different']} of {exact['compared']} examples, {exact['violations']} of them beyond "
            "rounding"
            for name, task, exact in _compared(found)
            if exact["violations"]
        ]

    def _sampling(self, task: Task, example: Example) -> Sampling:
        heat = task.temperature(example)
        return self.sampling if heat is None else replace(self.sampling, temperature=heat)

    def _gap(self, system: System, task: Task, example: Example, parting: Parting) -> float:
        """How far the worse of the two tokens lies below the best logit where two answers part."""
        turn, at = parting.turn - 1, parting.position
        sides = (parting.first, parting.second)
        if any(turn >= len(record.turns) or at >= len(record.turns[turn].tokens) for record in sides):
            return math.inf  # one text goes on where the other is over
        a, b = (record.turns[turn].tokens for record in sides)
        tokenizer, info = self.target.require_tokenizer(), self.target.info
        room, before = prompt_room(task, self.target), parting.second.texts[:turn]
        prompt = task.encode(example, tokenizer, max_tokens=room, answers=before)
        barred = at < task.min_new_tokens and not task.ignore_eos
        return gap_of(
            self.target,
            prompt.ids,
            a[:at],
            rivals=(a[at], b[at]),
            parts=system.parts,
            barred=(*info.eos_ids, *task.stop_ids(tokenizer)) if barred else (),
            after=prompt.after,
        )


def is_strict(target: Target) -> bool:
    """Whether the same text must come out to the last token: on a CPU with 32 or 64 bits."""
    return target.device.type == "cpu" and target.dtype in (torch.float32, torch.float64)


def enforce(found: Json) -> None:
    """Refuse drafts whose texts are wrong; warn of differences that rounding may explain.

    Args:
        found: of `results.assemble`, with what a `LosslessCheck` says.

    Raises:
        LongtrainError: a difference that no rounding explains, after all warnings are given.
    """
    wrong = []
    for name, task, exact in _compared(found):
        if not exact["different"]:
            continue
        message = (
            f"output of {name} in task {task} differs from decoding without the draft in "
            f"{exact['different']} of {exact['compared']} examples, {exact['violations']} of them beyond "
            f"rounding (first: {exact['first'][0]})"
        )
        if exact["wrong"]:
            wrong.append(message)
        else:
            log.warning(message)
    if wrong:
        raise LongtrainError(f"{'; '.join(wrong)}; the draft's runtime or the engine is wrong")


def _compared(found: Json) -> list[tuple[str, str, Json]]:
    """Names of system and task, and what was compared in it."""
    every = [(system["name"], task) for system in found["systems"] for task in system["tasks"]]
    return [(name, task["task"], task["exactness"]) for name, task in every if task["exactness"]]


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
        parts: evictor, cache and selector.
        barred: tokens that were impossible there (`min_new_tokens`).
        after: token ids between prompt and text that were read after eviction.
    """
    parts = parts or Parts()
    hidden = parts.hidden(drafts=False)
    read = prefill(
        target,
        Engine(target, parts).new_cache,
        [prompt],
        max_new_tokens=len(text) + 1,
        nodes=1,
        hidden=(-1, *hidden),
        evictor=parts.evictor,
        after=[after] if after else None,
    )
    if parts.selector is not None:
        parts.selector.start(read.tokens_BS, read.n_B, read.step, read.cache)
    hidden_E, at = read.step.hidden[-1][0, len(prompt) + len(after) - 1], len(prompt) + len(after)
    whole = parts.cache is None and parts.selector is None and bool(text)
    for ids in [list(text)] if whole else [[token] for token in text]:
        ids_BT = torch.tensor([ids], device=target.device)
        pos_BT = torch.arange(at, at + len(ids), device=target.device)[None]
        given, want = Rows(pos_BT, ids_BT), Want(logits="none", hidden=(-1,))
        step = given_step(target, read.cache, given, want=want, selector=parts.selector)
        hidden_E, at = step.hidden[-1][0, -1], at + len(ids)
    wide = torch.promote_types(target.dtype, torch.float32)
    logits_V = linear(hidden_E.to(wide), target.head_weight.to(wide))
    rivals_2 = logits_V[list(rivals)]
    logits_V[list(barred)] = -torch.inf
    return float(torch.maximum(logits_V.max(), rivals_2.max()) - rivals_2.min())

"""One policy's answers to the prompts of one length, at every budget: what a piece of the suite is made of.

A batch's scores are computed once and serve all budgets, unless they depend on the budget.
Shapes: L layers, B batch, G KV heads, S prompt tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from longtrain.decoding.engine import Engine, Generation
from longtrain.decoding.evict import Budget, Evictor, Keep, PromptRun
from longtrain.decoding.limits import Limits
from longtrain.decoding.roles import Parts
from longtrain.evaluation.eviction_protocol import ORACLE, Advance, Contender, Json, Protocol, label
from longtrain.evaluation.eviction_ranks import Ranks, tell
from longtrain.evaluation.eviction_tasks import CONTINUE, Judged, Prompt, agreement, judge
from longtrain.methods.policies.base import Scorer

if TYPE_CHECKING:
    from longtrain.decoding.stats import Stats
    from longtrain.targets.attention import Watch
    from longtrain.targets.model import Target

Gold = Sequence[Sequence[Sequence[int] | None]]
"""Tokens by sample and prompt; None for prompts of other tasks than `continue`."""
EXAMPLES = 3
"""Wrong answers kept of each budget."""


class Shared:
    """An evictor that computes a batch's scores when first asked, and leaves them for the next budget.

    Args:
        evictor: the policy at one budget.
        scores: of the batch at hand, by "scores"; empty: not known yet.
    """

    def __init__(self, evictor: Evictor, scores: dict[str, Tensor | None]) -> None:
        self.evictor, self.known, self.name = evictor, scores, evictor.name
        self.scorer = evictor if isinstance(evictor, Scorer) else None
        self.shares = self.scorer is not None and not getattr(evictor, "scores_depend_on_budget", False)

    def extra_rows(self, longest: int) -> int:
        """See `Evictor`."""
        return self.evictor.extra_rows(longest)

    def watch(self, lengths: Sequence[int]) -> Watch | None:
        """See `Evictor`; nothing to see where the scores are known."""
        return None if self.shares and "scores" in self.known else self.evictor.watch(lengths)

    def select(self, run: PromptRun) -> Keep | None:
        """See `Evictor`."""
        if self.scorer is None:
            return self.evictor.select(run)
        if not self.shares or "scores" not in self.known:
            self.known["scores"] = self.scorer.scores(run)
        return self.scorer.select(run, self.known["scores"])


def measure(
    target: Target,
    contender: Contender,
    prompts: Sequence[Prompt],
    *,
    protocol: Protocol,
    ranks: Ranks | None,
    gold: Gold,
    advance: Advance,
) -> Json:
    """Answers, ranking and times of one contender at one length, as plain JSON values.

    Args:
        target: the frozen model.
        contender: who is measured.
        prompts: of one length.
        protocol: how.
        ranks: true scores; None: nothing is compared.
        gold: the full cache's answers to the task `continue`; empty for the full cache itself.
        advance: told of answers done.
    """
    budgets: list[Budget | None] = [*protocol.budgets] if contender.make else [None]
    evictors = [contender.make(b) if contender.make and b else None for b in budgets]
    rows = [_Row(budget) for budget in budgets]
    compared: list[Json] = []
    length = len(prompts[0].whole)
    for first, some in _batches(prompts, protocol.batch):
        scores: dict[str, Tensor | None] = {}
        for row, evictor in zip(rows, evictors, strict=True):
            limits = protocol.limits
            engine = _engine(target, contender, Shared(evictor, scores) if evictor else None, limits)
            if evictor:
                tell(evictor, some)
            for sample in range(protocol.samples):
                made = _generate(engine, some, protocol, first=first, sample=sample)
                said = gold[sample][first : first + len(some)] if gold else made.tokens
                row.take(made, some, said, sample)
            advance(f"{contender.name} @ {length}", len(some))
            known = scores.get("scores")
            if ranks is not None and known is not None and row is rows[0] and first < protocol.rank_prompts:
                compared += ranks.compare(first, some, known)
    piece: Json = {"budgets": [row.to_json() for row in rows], "ranks": compared}
    if not contender.make:
        piece["continued"] = rows[0].continued
    piece["times"] = times(target, contender, prompts, protocol=protocol)
    return piece


def times(target: Target, contender: Contender, prompts: Sequence[Prompt], *, protocol: Protocol) -> Json:
    """Seconds to the first token at the first budget, and the full cache's on the same prompts in turn.

    Returns: `first_token_s` and `full_s`, one entry a batch, after one batch that does not count; empty for
    the full cache itself and for the oracle, which nobody can run.
    """
    found: Json = {"budget": label(protocol.budgets[0]), "first_token_s": [], "full_s": []}
    if contender.make is None or contender.kind == ORACLE:
        return found
    evictor = contender.make(protocol.budgets[0])
    engines = {
        "full_s": _engine(target, contender, None, protocol.limits),
        "first_token_s": _engine(target, contender, evictor, protocol.limits),
    }
    timed = list(_batches(prompts[: protocol.time_prompts], protocol.time_batch))
    for turn, (first, some) in enumerate([*timed[:1], *timed]):
        for key, engine in engines.items():
            made = _generate(engine, some, replace(protocol, max_new_tokens=1), first=first, sample=0)
            if turn:
                found[key].append(made.stats.prefill_s)
    return found


class _Row:
    """What one budget gave."""

    def __init__(self, budget: Budget | None) -> None:
        self.budget = budget
        self.answers: list[Json] = []
        self.wrong: list[Json] = []
        self.continued: list[list[list[int] | None]] = []
        self.kept_rows = 0.0
        self.prompt_rows = self.bytes_before = self.bytes_after = 0

    def take(
        self,
        made: Generation,
        prompts: Sequence[Prompt],
        gold: Sequence[Sequence[int] | None],
        sample: int,
    ) -> None:
        """Judge a batch of answers; a prompt's later samples add to its first."""
        assert made.texts is not None
        start = len(self.answers) - (len(prompts) if sample else 0)
        if sample == len(self.continued):
            self.continued.append([])
        self.continued[sample] += [
            tokens if prompt.task == CONTINUE else None
            for prompt, tokens in zip(prompts, made.tokens, strict=True)
        ]
        for i, (prompt, tokens, text) in enumerate(zip(prompts, made.tokens, made.texts, strict=True)):
            plain = prompt.task == CONTINUE
            marks = agreement(tokens, gold[i] or ()) if plain else judge(prompt, text)
            if sample == 0:
                self.answers.append({"task": prompt.task, "right": 0, "share": 0.0})
            self._mark(start + i, marks)
            if not marks.exact and not plain and len(self.wrong) < EXAMPLES:
                self.wrong.append({"task": prompt.task, "expected": prompt.answer, "answer": text})
        if sample == 0:
            self._sizes(made.stats)

    def to_json(self) -> Json:
        """Plain JSON values; bytes are of all prompts together."""
        return {
            "budget": label(self.budget) if self.budget else None,
            "answers": self.answers,
            "wrong": self.wrong,
            "kept_rows": self.kept_rows,
            "prompt_rows": self.prompt_rows,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }

    def _mark(self, at: int, marks: Judged) -> None:
        self.answers[at]["right"] += int(marks.exact)
        self.answers[at]["share"] += marks.share

    def _sizes(self, stats: Stats) -> None:
        self.kept_rows += sum(stats.kept_rows)
        self.prompt_rows += sum(stats.prompt_tokens)
        self.bytes_before += stats.cache_bytes_full
        self.bytes_after += stats.cache_bytes


def _engine(target: Target, contender: Contender, evictor: Any, limits: Limits) -> Engine:
    return Engine(target, Parts(evictor=evictor, name=contender.name), limits=limits)


def _generate(
    engine: Engine, prompts: Sequence[Prompt], protocol: Protocol, *, first: int, sample: int
) -> Generation:
    keys: Json = {"after": [list(prompt.question) for prompt in prompts]} if protocol.after else {}
    return engine.generate(
        [protocol.seen(prompt) for prompt in prompts],
        max_new_tokens=protocol.max_new_tokens,
        sampling=replace(protocol.sampling, seed=protocol.seed + sample),
        sequence_ids=range(first, first + len(prompts)),
        **keys,
    )


def _batches(prompts: Sequence[Prompt], size: int) -> Iterator[tuple[int, Sequence[Prompt]]]:
    return ((first, prompts[first : first + size]) for first in range(0, len(prompts), size))

"""Suite `eviction`: accuracy of eviction policies by budget on the same prompts, with the full cache and an
oracle.

Shapes: L layers, B batch, G KV heads, S prompt tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from longtrain.data.retrieval.wording import wording_of
from longtrain.decoding.evict import Budget, Evictor
from longtrain.decoding.ranking import RECALLS
from longtrain.errors import ConfigError
from longtrain.evaluation.eviction_prompts import (
    CONTINUE,
    LEAST_QUOTED,
    QUOTED,
    TASKS,
    Prompt,
    TrueScores,
    agreement,
    judge,
    make_prompts,
    wanted,
)
from longtrain.evaluation.prompts import Encoded, chat_note, uses_chat
from longtrain.evaluation.records import Record, ids_sha256
from longtrain.evaluation.suite import Metric, Scale, Suite, mean_summary
from longtrain.evaluation.suites.continuation import texts_of
from longtrain.evaluation.suites.shared import check_lengths, settings_of
from longtrain.evaluation.task import Example, Task
from longtrain.methods import policies
from longtrain.methods.policies.oracle import QuestionOracle
from longtrain.settings import Count, CountOrZero, Lengths, OneOrMore, one_of
from longtrain.systems import EVICTOR, Builder, System
from longtrain.tables import tokens

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

ORACLE = "oracle"
QUESTIONS = ("prompt", "after")
METRICS = (
    Metric("exact match", "exact", kind="wilson"),
    Metric("of the full cache", "score", kind="quotient"),
    Metric("cache before", "full_cache_bytes", kind="mean", unit="bytes"),
    Metric("cache", "cache_bytes", kind="mean", unit="bytes"),
    *(Metric(f"recall@{k}", f"recall@{k}", kind="mean") for k in RECALLS),
    Metric("Kendall τ", "rank_tau", kind="mean"),
)


@dataclass(frozen=True)
class EvictionSettings:
    """The keys of the suite; see conf/suite/eviction.yaml."""

    lengths: Lengths
    tasks: tuple[one_of(TASKS), ...]  # type: ignore[valid-type]
    prompts: Count
    max_new_tokens: Count
    oracle: bool = True
    question: one_of(QUESTIONS) = "prompt"  # type: ignore[valid-type]
    text: str | None = None
    kinds: tuple[str, ...] | None = ()
    chat: bool | None = None
    rank_prompts: CountOrZero = 16
    rank_skip: CountOrZero = 32
    time_prompts: CountOrZero = 4
    time_batch: OneOrMore = (1,)

    def __post_init__(self) -> None:
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise ConfigError(f"suite.tasks={list(self.tasks)}; allowed: each once of {', '.join(TASKS)}")
        if self.question == "after" and CONTINUE in self.tasks:
            raise ConfigError(
                "suite.question=after has no question for the task 'continue'; leave that task out"
            )


@dataclass(frozen=True, eq=False)
class EvictionTask(Task):
    """The prompts of one length; the kinds of questions alternate.

    Args:
        prompts: the prompt of each example.
        truth: true scores to compare a policy's scores with.
        rank_prompts: number of prompts whose scores are compared.
    """

    prompts: tuple[Prompt, ...] = field(default=(), repr=False)
    truth: TrueScores | None = None
    rank_prompts: int = 0

    def of(self, example: Example) -> Prompt:
        """The prompt of an example."""
        return self.prompts[int(example.fields["number"])]

    def sequence_id(self, example: Example) -> int:
        """The number of the prompt, as the key of its random numbers."""
        return int(example.fields["number"])

    def answer_ids(self, example: Example, tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
        """See `Task`."""
        return self.of(example).answer_ids

    def score(self, text: str, example: Example) -> float | None:
        """RULER's string match; continuations are scored against the full cache's by `related`."""
        prompt = self.of(example)
        return None if prompt.task == CONTINUE else judge(prompt, text).share

    def measures(self, text: str, example: Example) -> Mapping[str, float]:
        """`exact`: 1 if the answer is the expected one and nothing else."""
        prompt = self.of(example)
        return {"exact": 0.0 if prompt.task == CONTINUE else float(judge(prompt, text).exact)}

    def related(self, record: Record, full: Record, example: Example) -> Record:
        """Score a continuation by the full cache's own tokens."""
        if self.of(example).task != CONTINUE:
            return record
        found = agreement(record.turns[-1].tokens, full.turns[-1].tokens)
        measures = {**(record.measures or {}), "exact": float(found.exact)}
        return replace(record, score=float(found.share), measures=measures)

    def compares_scores(self, examples: Sequence[Example]) -> bool:
        """True if one of the prompts is among the first `rank_prompts`."""
        return self.truth is not None and any(e.fields["number"] < self.rank_prompts for e in examples)

    def compare_scores(
        self, target: Target, examples: Sequence[Example], prompts: Sequence[Encoded], s_LBGS: Tensor
    ) -> list[dict[str, float]]:
        """Recall and rank correlation of the first prompts' scores."""
        assert self.truth is not None
        answers = [self.of(example).answer_ids for example in examples]
        found = self.truth.compare(target, prompts, answers, s_LBGS)
        return [
            ranks if example.fields["number"] < self.rank_prompts else {}
            for ranks, example in zip(found, examples, strict=True)
        ]


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """One task for each prompt length. The seed determines the prompts.

    Raises:
        ConfigError: a wrong setting, or a length that does not fit the target's context window or the task.
        DataError: there is no text, or too little for `continue`.
    """
    asked = settings_of(EvictionSettings, settings)
    check_lengths(asked.lengths, asked.max_new_tokens, target)
    prompts = make_prompts(
        target,
        texts_of(asked.text, asked.kinds or ()),
        tasks=asked.tasks,
        lengths=asked.lengths,
        count=asked.prompts,
        margin=asked.max_new_tokens,
        seed=seed,
        chat=asked.chat,
    )
    agreeing, told = set(asked.tasks) == {CONTINUE}, asked.question == "after"

    def oracle(budget: Budget) -> Evictor:
        return (
            QuestionOracle(budget)
            if told
            else policies.get("oracle", budget=budget, n_tokens=asked.max_new_tokens)
        )

    def own_systems(builder: Builder) -> list[System]:
        facts = {"policy": "oracle", **({"told": True} if told else {})}
        return builder.evicting("oracle", ORACLE, oracle, facts, timed=False) if asked.oracle else []

    truth = None
    if asked.oracle and asked.rank_prompts:
        truth = TrueScores(lambda: oracle(Budget(ratio=1.0)), asked.max_new_tokens, asked.rank_skip)
    name = "agreement with the full cache" if agreeing else "string match"
    return Suite(
        str(settings["name"]),
        tuple(_task(target, length, some, asked, seed, truth) for length, some in prompts.items()),
        scale=Scale(name, 1.0),
        summarise=lambda records: mean_summary(records, maximum=1, digits=4),
        title="Eviction",
        notes=_notes(asked, target),
        needs=frozenset({EVICTOR}),
        metrics=METRICS,
        solvable=not agreeing,
        own_systems=own_systems,
        rivals=artifacts_and_policies,
    )


def _task(
    target: Target,
    length: int,
    prompts: Sequence[Prompt],
    asked: EvictionSettings,
    seed: int,
    truth: TrueScores | None,
) -> EvictionTask:
    tokenizer = target.require_tokenizer()
    asks = set(asked.tasks) != {CONTINUE}

    def of(row: Example) -> Prompt:
        return prompts[int(row.fields["number"])]

    def written(row: Example) -> Encoded:
        """The encoded prompt, or its context with the question to be read after eviction."""
        if asked.question == "after":
            return Encoded(of(row).context, after=of(row).question)
        return Encoded(of(row).whole)

    return EvictionTask(
        tokens(length),
        tuple(_row(i, prompt) for i, prompt in enumerate(prompts)),
        "{task}",
        asked.max_new_tokens,
        "string_match_all",
        None,
        chat=asks and uses_chat(tokenizer, asked.chat),
        protocol={
            "lengths": [length],
            "question": asked.question,
            "seed": seed,
            **({"wording": wording_of(tokenizer).name} if asks else {}),
            **({"quoted": [LEAST_QUOTED, QUOTED]} if "quote" in asked.tasks else {}),
        },
        written=written,
        facets_of=lambda row: {"length": length, "task": of(row).task},
        expected=lambda row: wanted(of(row)) if of(row).answer else [],
        prompts=tuple(prompts),
        truth=truth,
        rank_prompts=asked.rank_prompts,
    )


def artifacts_and_policies(systems: Sequence[System]) -> list[tuple[str, str]]:
    """Pairs of each artifact with each policy at the same budget."""
    pairs = [(a, b) for a in systems for b in systems if (a.kind, b.kind) == ("artifact", "policy")]
    return [(a.name, b.name) for a, b in pairs if a.budget == b.budget]


def _row(number: int, prompt: Prompt) -> Example:
    fields = {"number": number, "task": prompt.task, "answer": prompt.answer, "values": list(prompt.values)}
    return Example(f"{number:04d}", {**fields, "sha256": ids_sha256(prompt.whole)})


def _notes(asked: EvictionSettings, target: Target) -> list[str]:
    notes = [f"{', '.join(asked.tasks)} in equal parts; budgets count KV entries of each layer and KV head"]
    if set(asked.tasks) != {CONTINUE}:
        tokenizer = target.require_tokenizer()
        notes += [chat_note(tokenizer, asked.chat), f"questions {wording_of(tokenizer).about}"]
        notes.append(
            "questions stand at the end of the prompt, seen by every policy"
            if asked.question == "prompt"
            else "questions are read after eviction, seen by none of the policies (the oracle reads the "
            "question and its answer)"
        )
    notes += _marks(asked)
    if asked.oracle and asked.rank_prompts:
        notes.append(
            f"recall and Kendall τ: neither side pooled, without the last {asked.rank_skip} positions, which "
            "windows keep without scores; scores that depend on the budget are those of the first one"
        )
        if asked.question == "after":
            notes.append(
                "the true scores are those of the answer's tokens only; modules trained with "
                "method.response=question_answer predict those of question and answer together"
            )
    return notes


def _marks(asked: EvictionSettings) -> list[str]:
    """Notes on the meaning of the score and of the exact match for each kind of task."""
    score, exact = [], []
    if {*asked.tasks} - {CONTINUE, "quote"}:
        score.append("of the values asked for those that stand in the answer, as in RULER")
        exact.append("these values, in any order, and no other")
    if "quote" in asked.tasks:
        score.append(f"a quotation's first {QUOTED} words in a row, or those up to the end of its sentence")
        exact.append("a quotation that begins with them")
    if CONTINUE in asked.tasks:
        score.append("of `continue` the share of the full cache's tokens at the same places")
        exact.append("the whole continuation of the full cache")
    return [f"the score counts {'; '.join(score)}", f"exact match means {'; '.join(exact)}"]

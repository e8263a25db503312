"""Prompts that every eviction policy gets, and what its answers and its rankings of tokens are judged by.

Answers are compared with the expected text, rankings with the attention that the answer will give the tokens.

Shapes: T tokens, L layers, B batch, G KV heads, S prompt tokens, X rankings (a layer and KV head each).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from longtrain.data.retrieval.questions import QUESTION_TASKS
from longtrain.decoding.engine import Engine
from longtrain.decoding.evict import Evictor, Keep, PromptRun
from longtrain.decoding.limits import Limits
from longtrain.decoding.ranking import RECALLS, kendall_tau, recall_at
from longtrain.decoding.roles import Parts
from longtrain.errors import DataError
from longtrain.evaluation.corpora import HeldOutText, plain_ids, prefix_of
from longtrain.evaluation.metrics.ruler import clean, match_all
from longtrain.evaluation.prompts import Encoded
from longtrain.evaluation.records import ids_sha256
from longtrain.evaluation.suites.continuation import Point, choose_points
from longtrain.evaluation.suites.needle import numbers_in, prompt_writer
from longtrain.methods.policies.base import Scorer
from longtrain.methods.policies.oracle import ToldOracle

if TYPE_CHECKING:
    from longtrain.targets.attention import Watch
    from longtrain.targets.model import Target

CONTINUE = "continue"
"""The task of going on with plain text, judged against the full cache's own continuation."""
TASKS = (*QUESTION_TASKS, CONTINUE)
NAME = re.compile(r"\b(?!VAR\b)[A-Z]{2,}\b")
"""Names of variables in an answer, which may say VAR before each as the text does."""
QUOTED = 8
"""Words of a quotation that are compared, or those up to the end of its sentence where that comes before."""
LEAST_QUOTED = 3
"""Words of a quotation that are compared in any case: one or two stand in an answer by chance."""
SENTENCE_END = re.compile(r"[.!?](?=\W*$)")


@dataclass(frozen=True)
class Prompt:
    """A prompt in two parts.

    Args:
        task: one of `TASKS`.
        context: tokens up to where the question begins.
        question: tokens of the question and of what the assistant's turn begins with; empty for `continue`.
        answer: the expected text; empty for `continue`, whose gold is what the full cache gives.
        values: what a right answer must hold.
        answer_ids: tokens of the expected answer.
    """

    task: str
    context: tuple[int, ...]
    question: tuple[int, ...] = ()
    answer: str = ""
    values: tuple[str, ...] = ()
    answer_ids: tuple[int, ...] = ()

    @property
    def whole(self) -> tuple[int, ...]:
        """Context and question."""
        return (*self.context, *self.question)


@dataclass(frozen=True)
class Judged:
    """An answer's marks.

    Args:
        exact: whether it is what was asked for and nothing else.
        share: how much of what was asked for it holds, 0 to 1; of a question this is RULER's score.
    """

    exact: bool
    share: float


def make_prompts(
    target: Target,
    texts: Mapping[str, str],
    *,
    tasks: Sequence[str],
    lengths: Sequence[int],
    count: int,
    margin: int,
    seed: int,
    chat: bool | None = None,
) -> dict[int, list[Prompt]]:
    """Prompts by length, `count` of each length, the tasks in turn; one never depends on how many there are.

    Args:
        target: with a tokenizer.
        texts: name -> held-out text that questions are hidden in or that is continued.
        tasks: of `TASKS`.
        lengths: tokens of a prompt, context and question together.
        count: prompts of each length.
        margin: tokens of text that `continue` leaves after its prompt.
        seed: of everything random.
        chat: whether questions are put into the chat template; None: if the tokenizer has one.

    Raises:
        ConfigError: a length too short for its task, a target without a tokenizer, or no chat template where
            one is asked for.
        DataError: no text, or too little for `continue`.
    """
    tokenizer = target.require_tokenizer()
    writer = prompt_writer(target, texts, chat=chat) if set(tasks) != {CONTINUE} else None
    prefix, points = prefix_of(tokenizer), []
    if CONTINUE in tasks:
        each = -(-count // len(tasks))
        points = _points(target, texts, max(lengths), count=each, margin=margin, seed=seed)

    def make(length: int, index: int) -> Prompt:
        task = tasks[index % len(tasks)]
        if task == CONTINUE:
            return Prompt(task, tuple(points[index // len(tasks)].prompt(length, prefix)))
        assert writer is not None
        made = writer.question(task, length, np.random.default_rng([seed, length, index]))
        parts = (made.context_T, made.question_T, made.answer_T)
        context, question, answer = (tuple(map(int, part)) for part in parts)
        return Prompt(task, context, question, made.answer, made.values, answer)

    return {length: [make(length, index) for index in range(count)] for length in lengths}


def judge(prompt: Prompt, text: str) -> Judged:
    """Marks of an answer to a question.

    The share is RULER's string match: of the values asked for, those that stand in the answer, case ignored;
    of a quotation its first words in a row (`quoted`), since its question does not say how long it goes on.
    Exact are the values asked for, in any order, and no other number or name, and a quotation that begins
    with those words.

    Args:
        prompt: what was asked; not of the task `continue`.
        text: the answer, its end mark taken off.
    """
    found = match_all(_spaced(clean(text)), wanted(prompt))
    if prompt.task == "quote":
        return Judged(_spaced(text).startswith(quoted(prompt.answer)), found)
    said = NAME.findall(text) if prompt.task == "chains" else numbers_in(text)
    return Judged(Counter(said) == Counter(prompt.values), found)


def wanted(prompt: Prompt) -> list[str]:
    """What must stand in a right answer, each run of white space being one space."""
    if prompt.task == "quote":
        return [quoted(prompt.answer)]
    return list(prompt.values)


def quoted(passage: str) -> str:
    """The words of a passage that a quotation must hold, one space between them.

    The first `QUOTED`, or fewer where the passage's first sentence ends after `LEAST_QUOTED` words or more:
    whoever quotes to the end of the sentence has quoted it. Quotation marks after that end are left out.
    """
    words = passage.split()[:QUOTED]
    for count, word in enumerate(words, 1):
        ended = SENTENCE_END.search(word)
        if ended and count >= LEAST_QUOTED:
            return " ".join([*words[: count - 1], word[: ended.end()]])
    return " ".join(words)


def agreement(tokens: Sequence[int], gold: Sequence[int]) -> Judged:
    """Marks of a continuation: the share of the full cache's tokens that stand at the same places."""
    same = sum(a == b for a, b in zip(tokens, gold, strict=False))
    longest = max(len(tokens), len(gold), 1)
    return Judged(list(tokens) == list(gold), same / longest)


def _spaced(text: str) -> str:
    """A text whose runs of white space are one space each: passages keep the line breaks of their text."""
    return " ".join(text.split())


def _points(
    target: Target, texts: Mapping[str, str], longest: int, *, count: int, margin: int, seed: int
) -> list[Point]:
    """Places in the texts to continue from, the same at every length."""
    tokenizer = target.require_tokenizer()
    documents = [
        HeldOutText(name, "text", np.asarray(plain_ids(tokenizer, text), dtype=np.int64))
        for name, text in texts.items()
    ]
    points = choose_points(documents, longest=longest, count=count, margin=margin, seed=seed).points
    if len(points) < count:
        raise DataError(
            f"the text gives {len(points)} places to continue from at {longest} tokens, and {count} prompts "
            "need one each; pass fewer suite.prompts, shorter lengths or more text (suite.text=FOLDER)"
        )
    return points


Ids = Sequence[int]


@dataclass(frozen=True)
class TrueScores:
    """The scores of an oracle, computed for a batch when first asked for and kept on the host.

    Args:
        oracle: makes the evictor that has the true scores.
        answer_tokens: most tokens of an answer.
        skip: last positions of a prompt that are left out: a policy with a window keeps them unscored.
    """

    oracle: Callable[[], Evictor]
    answer_tokens: int
    skip: int
    known: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def compare(
        self, target: Target, prompts: Sequence[Encoded], answers: Sequence[Ids], s_LBGS: Tensor
    ) -> list[dict[str, float]]:
        """`recall@k` and `rank_tau` of a batch's scores beside the true ones, mean over layers and KV heads.

        Neither side is pooled. Recall at k is left out for prompts of k ranked tokens or fewer, all of which
        would be among the best.

        Args:
            target: the frozen model.
            prompts: the batch.
            answers: tokens of the expected answers, for an oracle that is told them.
            s_LBGS: a policy's scores.
        """
        names = tuple(ids_sha256([*prompt.ids, *prompt.after]) for prompt in prompts)
        if names not in self.known:
            self.known[names] = self._compute(target, prompts, answers).cpu()
        found = []
        for b, prompt in enumerate(prompts):
            size = max(1, len(prompt.ids) - self.skip)
            true_XS = self.known[names][:, b, :, :size].flatten(0, 1).to(s_LBGS.device)
            found.append(_compare(s_LBGS[:, b, :, :size].flatten(0, 1), true_XS))
        return found

    def _compute(self, target: Target, prompts: Sequence[Encoded], answers: Sequence[Ids]) -> Tensor:
        oracle = self.oracle()
        if isinstance(oracle, ToldOracle):
            oracle.tell([prompt.after for prompt in prompts], answers)
        look = _Look(oracle, self.answer_tokens)
        engine = Engine(target, Parts(evictor=look, name="oracle"), limits=Limits(batch=len(prompts)))
        engine.generate([prompt.ids for prompt in prompts], max_new_tokens=1)
        assert look.found is not None
        return look.found


def _compare(pred_XS: Tensor, true_XS: Tensor) -> dict[str, float]:
    size = true_XS.shape[-1]
    found = {f"recall@{k}": float(recall_at(pred_XS, true_XS, k).mean()) for k in RECALLS if size > k}
    tau_X = kendall_tau(pred_XS, true_XS)
    real = tau_X[~tau_X.isnan()]  # of the rankings that say anything
    return found | ({"rank_tau": float(real.mean())} if len(real) else {})


class _Look:
    """Takes an evictor's scores and evicts nothing."""

    def __init__(self, evictor: Evictor, answer_tokens: int) -> None:
        self.evictor, self.name, self.answer_tokens = evictor, evictor.name, answer_tokens
        self.found: Tensor | None = None

    def extra_rows(self, longest: int) -> int:
        return max(self.evictor.extra_rows(longest), self.answer_tokens)

    def watch(self, lengths: Sequence[int]) -> Watch | None:
        return self.evictor.watch(lengths)

    def select(self, run: PromptRun) -> Keep | None:
        assert isinstance(self.evictor, Scorer)
        self.found = self.evictor.scores(replace(run, max_new_tokens=self.answer_tokens))
        return None

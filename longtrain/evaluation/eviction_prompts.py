"""The prompts that all eviction policies get, and the references that score their answers and token rankings.

Answers are compared with the expected text, rankings with the attention that the answer pays to the tokens.

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
from longtrain.evaluation.prompts import Encoded
from longtrain.evaluation.records import ids_sha256
from longtrain.evaluation.scoring.ruler import clean, match_all
from longtrain.evaluation.suites.continuation import Point, choose_points
from longtrain.evaluation.suites.needle import numbers_in, prompt_writer
from longtrain.methods.policies.base import Scorer
from longtrain.methods.policies.oracle import QuestionOracle

if TYPE_CHECKING:
    from longtrain.targets.attention import AttentionHook
    from longtrain.targets.model import Target

CONTINUE = "continue"
"""The task of continuing plain text, scored against the full cache's own continuation."""
TASKS = (*QUESTION_TASKS, CONTINUE)
NAME = re.compile(r"\b(?!VAR\b)[A-Z]{2,}\b")
"""Names of variables in an answer; `VAR`, which may stand before each name as in the text, is not matched."""
QUOTED = 8
"""Number of words of a quotation that are compared, unless its sentence ends earlier."""
LEAST_QUOTED = 3
"""Minimum number of words of a quotation that are compared: one or two occur in an answer by chance."""
SENTENCE_END = re.compile(r"[.!?](?=\W*$)")


@dataclass(frozen=True)
class Prompt:
    """A prompt in two parts.

    Args:
        task: one of `TASKS`.
        context: tokens up to where the question begins.
        question: tokens of the question and of the beginning of the assistant's turn; empty for `continue`.
        answer: the expected text; empty for `continue`, whose reference is the full cache's output.
        values: strings that a right answer must contain.
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
        """Token ids of context and question together."""
        return (*self.context, *self.question)


@dataclass(frozen=True)
class Judged:
    """The scores of an answer.

    Args:
        exact: True if the answer is the expected one and nothing else.
        share: share of the expected content that the answer contains, 0 to 1; for questions, RULER's score.
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
    """Make `count` prompts of each length, the tasks in turn; a prompt does not depend on `count`.

    Args:
        target: the frozen model, which needs a tokenizer.
        texts: name -> held-out text to hide questions in, or to continue.
        tasks: names from `TASKS`.
        lengths: tokens of a prompt, context and question together.
        count: number of prompts of each length.
        margin: tokens of text that must follow the prompt of a `continue` task.
        seed: the random seed.
        chat: put questions into the chat template; None: if the tokenizer has one.

    Raises:
        ConfigError: a length too short for its task, a target without a tokenizer, or no chat template where
            one is required.
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
    """Score an answer to a question.

    The share is RULER's string match: the share of the expected values that occur in the answer, case
    ignored; for a quotation, its first words as one string (`quoted`), since the question does not say how
    long to quote. Exact means the expected values, in any order, and no other number or name, or a quotation
    that begins with those words.

    Args:
        prompt: a prompt of any task except `continue`.
        text: the answer without its end token.
    """
    found = match_all(_spaced(clean(text)), wanted(prompt))
    if prompt.task == "quote":
        return Judged(_spaced(text).startswith(quoted(prompt.answer)), found)
    mentioned = NAME.findall(text) if prompt.task == "chains" else numbers_in(text)
    return Judged(Counter(mentioned) == Counter(prompt.values), found)


def wanted(prompt: Prompt) -> list[str]:
    """The strings that a right answer must contain, with single spaces."""
    if prompt.task == "quote":
        return [quoted(prompt.answer)]
    return list(prompt.values)


def quoted(passage: str) -> str:
    """The beginning of a passage that a quotation must contain, with single spaces between words.

    The first `QUOTED`, or fewer where the passage's first sentence ends after `LEAST_QUOTED` words or more:
    an answer that quotes up to the end of the sentence is right. Quotation marks after that end are dropped.
    """
    words = passage.split()[:QUOTED]
    for count, word in enumerate(words, 1):
        ended = SENTENCE_END.search(word)
        if ended and count >= LEAST_QUOTED:
            return " ".join([*words[: count - 1], word[: ended.end()]])
    return " ".join(words)


def agreement(tokens: Sequence[int], gold: Sequence[int]) -> Judged:
    """Score a continuation: the share of the full cache's tokens that it has at the same positions."""
    same = sum(a == b for a, b in zip(tokens, gold, strict=False))
    longest = max(len(tokens), len(gold), 1)
    return Judged(list(tokens) == list(gold), same / longest)


def _spaced(text: str) -> str:
    """Replace every run of white space by one space, since passages keep their text's line breaks."""
    return " ".join(text.split())


def _points(
    target: Target, texts: Mapping[str, str], longest: int, *, count: int, margin: int, seed: int
) -> list[Point]:
    """Positions in the texts to continue from, the same at every length."""
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
    """True importance scores from an oracle, computed at the first access for a batch and cached on the host.

    Args:
        oracle: creates the evictor that computes the true scores.
        answer_tokens: the maximum number of tokens of an answer.
        skip: number of last prompt positions to exclude: policies with a window keep them without scoring.
    """

    oracle: Callable[[], Evictor]
    answer_tokens: int
    skip: int
    known: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def compare(
        self, target: Target, prompts: Sequence[Encoded], answers: Sequence[Ids], s_LBGS: Tensor
    ) -> list[dict[str, float]]:
        """Compare a batch's scores with the true ones: `recall@k` and `rank_tau`, mean over layers and KV
        heads.

        Neither side is pooled. Recall at k is omitted for prompts of k ranked tokens or fewer, all of which
        would be among the best.

        Args:
            target: the frozen model.
            prompts: the prompts of the batch.
            answers: tokens of the expected answers, for an oracle that reads them.
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
        if isinstance(oracle, QuestionOracle):
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
    real = tau_X[~tau_X.isnan()]  # without rankings whose correlation is undefined
    return found | ({"rank_tau": float(real.mean())} if len(real) else {})


class _Look:
    """Records an evictor's scores and evicts nothing."""

    def __init__(self, evictor: Evictor, answer_tokens: int) -> None:
        self.evictor, self.name, self.answer_tokens = evictor, evictor.name, answer_tokens
        self.found: Tensor | None = None

    def extra_tokens(self, longest: int) -> int:
        return max(self.evictor.extra_tokens(longest), self.answer_tokens)

    def hook(self, lengths: Sequence[int]) -> AttentionHook | None:
        return self.evictor.hook(lengths)

    def select(self, run: PromptRun) -> Keep | None:
        assert isinstance(self.evictor, Scorer)
        self.found = self.evictor.scores(replace(run, max_new_tokens=self.answer_tokens))
        return None

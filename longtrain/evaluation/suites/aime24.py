"""AIME 2024 as a suite: 30 contest problems with whole numbers as answers; short prompts, long solutions."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.metrics.aime import LARGEST, THOUGHT, THOUGHT_END, right
from longtrain.evaluation.prompts import Encoded, encode_chat
from longtrain.evaluation.suite import ByTask, Suite, Summary, mean_summary
from longtrain.evaluation.suites.settings import Settings
from longtrain.evaluation.suites.shared import not_greedy, read_rows
from longtrain.evaluation.task import Example, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

TITLE = "AIME 2024"
PROBLEMS = 30
MAX_NEW_TOKENS = 32768
PUBLISHED = "31800c941395d49f30bed365e3e8ad5e6760fcadab7caddc76801d9f8689854e"
"""`fingerprint` of the 30 problems and answers of both contests, as HuggingFaceH4/aime_2024 and Qwen2.5-Math
(evaluation/data/aime24) have them."""
TEMPLATE = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
"""The instruction that Qwen's model cards (QwQ-32B, Qwen3) give for mathematics."""

FIELDS = {"answer": (str, int)}
MARGIN = 32
"""Tokens left free between the longest prompt, its answer and the target's window."""


class ContestTask(Task):
    """Problems whose answer is a whole number from 0 to 999."""

    def encode(
        self,
        example: Example,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int,
        answers: Sequence[str] = (),
    ) -> Encoded:
        """The problem, never cut; as a chat message with thinking as `protocol` has it."""
        text = self.prompt(example)
        if not self.chat:
            return Encoded(tuple(tokenizer(text, verbose=False).input_ids))
        message = [{"role": "user", "content": text}]
        return Encoded(encode_chat(tokenizer, message, thinking=bool(self.protocol["thinking"])))

    def references(self, example: Example) -> list[str]:
        """The answer."""
        return [str(example.fields["answer"])]


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """The problems at `suite.data`.

    Args:
        settings: `data`, `limit`, `max_new_tokens`, `chat`, `thinking`; see conf/suite/aime24.yaml.
        target: answers are no longer than its window leaves.
        seed: of the run; nothing is drawn here.
        sampling: how the run decodes; the suite's own is greedy.

    Raises:
        ConfigError: a wrong setting, or no room for an answer.
        DataError: a problem or an answer is missing, or an answer is no whole number from 0 to 999.
    """
    read = Settings(settings)
    limit, chat = read.optional_integer("limit"), read.flag("chat")
    rows = problems(read.text("data"))[:limit]
    task = ContestTask(
        "aime24", rows, TEMPLATE, 1, "exact_number", None, chat, protocol={"thinking": read.flag("thinking")}
    )
    opened = _opens_thoughts(task, target)
    task = replace(
        task,
        judge=lambda text, row: right(text, row.fields["answer"], opened=opened),
        protocol={**task.protocol, "prompt_opens_thoughts": opened},
    )
    asked = read.integer("max_new_tokens")
    room = target.info.max_positions - _longest(task, target) - MARGIN
    if room < 1:
        raise ConfigError(
            f"suite aime24: the target reads {target.info.max_positions} tokens, its longest prompt leaves "
            "no room for an answer; take a target with a longer window"
        )
    found = replace(task, max_new_tokens=min(asked, room))
    notes = []
    if len(rows) != PROBLEMS:
        notes.append(f"{len(rows)} of {PROBLEMS} problems")
    elif fingerprint(rows) != PUBLISHED:
        notes.append("problems or answers are not those published")
    if asked != MAX_NEW_TOKENS:
        notes.append(f"solutions of up to {asked} tokens instead of {MAX_NEW_TOKENS}")
    if asked > room:
        notes.append(f"the target's window ends solutions after {room} tokens, before the {asked} asked for")
    notes += not_greedy(sampling)
    if not chat:
        notes.append("without chat template")
    title = f"Variant of {TITLE}" if notes else TITLE
    if asked <= room and asked == MAX_NEW_TOKENS:
        notes.append(f"solutions of up to {asked} tokens")

    def summarise(records: ByTask) -> Summary:
        return mean_summary(title, records, notes=notes)

    return Suite("aime24", (found,), summarise=summarise)


def problems(where: str) -> tuple[Example, ...]:
    """The problems of a file or data set: rows with `problem` (or `question`) and `answer`.

    Raises:
        DataError: one of these is missing or of another type, or no whole number from 0 to 999.
    """
    found = []
    for number, row in enumerate(read_rows(where, TITLE, FIELDS), 1):
        problem = row.get("problem", row.get("question"))
        if not isinstance(problem, str) or not problem.strip():
            raise DataError(f"{where}, row {number}: field 'problem' (or 'question') must be a text")
        answer = str(row["answer"]).strip()
        if not (answer.isascii() and answer.isdigit() and int(answer) <= LARGEST):
            raise DataError(
                f"{where}, row {number}: answer {row['answer']!r}; allowed: a whole number from 0 to "
                f"{LARGEST}"
            )
        found.append(Example(str(row.get("id", number)), {"problem": problem, "answer": int(answer)}))
    return tuple(found)


def fingerprint(rows: Sequence[Example]) -> str:
    """Hash of problems and answers in any order; of a problem's text, letters and digits alone count."""
    plain = sorted(
        f"{re.sub('[^0-9a-z]+', '', str(row.fields['problem']).lower())} {row.fields['answer']}"
        for row in rows
    )
    return hashlib.sha256("\n".join(plain).encode()).hexdigest()


def _opens_thoughts(task: Task, target: Target) -> bool:
    """Whether the chat template ends prompts inside the model's thoughts, as QwQ's does."""
    if not task.chat or target.tokenizer is None:
        return False
    ids = task.encode(task.rows[0], target.tokenizer, max_tokens=target.info.max_positions).ids
    prompt = str(target.tokenizer.decode(list(ids)))
    return prompt.rfind(THOUGHT) > prompt.rfind(THOUGHT_END)


def _longest(task: Task, target: Target) -> int:
    """Tokens of the longest prompt."""
    if target.tokenizer is None:
        raise ConfigError(f"target {target.info.name} has no tokenizer, so no problem can be given to it")
    most = target.info.max_positions
    return max(len(task.encode(row, target.tokenizer, max_tokens=most).ids) for row in task.examples())

"""AIME 2024 as a suite: 30 contest problems with whole numbers as answers; short prompts, long solutions.

There is no official scorer for generated texts; `longtrain.evaluation.metrics.aime` says what counts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.metrics.aime import LARGEST, SCORER, THOUGHT, THOUGHT_END, right
from longtrain.evaluation.prompts import Encoded, encode_chat
from longtrain.evaluation.suite import ByTask, Suite, Summary, mean_summary
from longtrain.evaluation.suites.shared import not_greedy, read_rows, settings_of
from longtrain.evaluation.task import Example, Task
from longtrain.settings import Count, Text

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


@dataclass(frozen=True)
class Aime24Settings:
    """The keys of conf/suite/aime24.yaml that are this suite's own."""

    data: Text
    limit: Count | None
    max_new_tokens: Count
    chat: bool
    thinking: bool


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """The problems at `suite.data`.

    Args:
        settings: the group `suite`; see conf/suite/aime24.yaml.
        target: answers are no longer than its window leaves.
        seed: of the run; nothing is drawn here.
        sampling: how the run decodes; the suite's own is greedy.

    Raises:
        ConfigError: a wrong setting, or no room for an answer.
        DataError: a problem or an answer is missing, or an answer is no whole number from 0 to 999.
    """
    own = settings_of(Aime24Settings, settings)
    protocol: dict[str, Any] = {"thinking": own.thinking, "scorer": SCORER}
    task = ContestTask(
        "aime24",
        problems(own.data)[: own.limit],
        TEMPLATE,
        own.max_new_tokens,
        "whole_number",
        None,
        own.chat,
        protocol=protocol,
    )
    prompts = [_prompt_ids(task, one, target) for one in task.rows]
    opened = own.chat and _opens_thoughts(str(target.require_tokenizer().decode(list(prompts[0]))))
    window = target.info.max_positions
    room = window - max(map(len, prompts)) - MARGIN
    if room < 1:
        raise ConfigError(
            f"suite aime24: the target reads {window} tokens, its longest prompt leaves no room for an "
            "answer; take a target with a longer window"
        )
    task = replace(
        task,
        judge=lambda text, row: right(text, row.fields["answer"], opened=opened),
        protocol={**protocol, "prompt_opens_thoughts": opened},
        max_new_tokens=min(own.max_new_tokens, room),
    )
    wrong = departures(task, own, room, sampling)
    title = f"Variant of {TITLE}" if wrong else TITLE
    notes = wrong or [f"solutions of up to {own.max_new_tokens} tokens"]

    def summarise(records: ByTask) -> Summary:
        return mean_summary(title, records, notes=notes)

    return Suite("aime24", (task,), summarise=summarise)


def departures(task: ContestTask, own: Aime24Settings, room: int, sampling: Sampling) -> list[str]:
    """What is not as usual, with which the result is a variant; `room` is what the window leaves answers."""
    notes = []
    if len(task.rows) != PROBLEMS:
        notes.append(f"{len(task.rows)} of {PROBLEMS} problems")
    elif fingerprint(task.rows) != PUBLISHED:
        notes.append("problems or answers are not those published")
    if own.max_new_tokens != MAX_NEW_TOKENS:
        notes.append(f"solutions of up to {own.max_new_tokens} tokens instead of {MAX_NEW_TOKENS}")
    if own.max_new_tokens > room:
        ends = f"the target's window ends solutions after {room} tokens"
        notes.append(f"{ends}, before the {own.max_new_tokens} asked for")
    notes += not_greedy(sampling)
    return notes if own.chat else [*notes, "without chat template"]


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


def _prompt_ids(task: ContestTask, one: Example, target: Target) -> tuple[int, ...]:
    tokenizer = target.require_tokenizer()
    return task.encode(one, tokenizer, max_tokens=target.info.max_positions).ids


def _opens_thoughts(prompt: str) -> bool:
    """Whether a prompt ends inside the model's thoughts, as QwQ's chat template has it."""
    return prompt.rfind(THOUGHT) > prompt.rfind(THOUGHT_END)

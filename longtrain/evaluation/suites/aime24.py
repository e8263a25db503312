"""AIME 2024 as a suite: 30 contest problems with whole numbers as answers; short prompts, long solutions.

There is no official scorer for generated texts; `longtrain.evaluation.metrics.aime` says what counts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.metrics.aime import LARGEST, SCORER, THOUGHT, THOUGHT_END, right
from longtrain.evaluation.prompts import Encoded, encode_chat
from longtrain.evaluation.published import Published
from longtrain.evaluation.suite import Suite
from longtrain.evaluation.suites.shared import read_rows, settings_of
from longtrain.evaluation.task import Example, Task
from longtrain.settings import Count, Text

if TYPE_CHECKING:
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

TEMPLATE = "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
"""The instruction that Qwen's model cards (QwQ-32B, Qwen3) give for mathematics."""


def fingerprint(rows: Sequence[Example]) -> str:
    """Hash of problems and answers in any order; of a problem's text, letters and digits alone count."""
    plain = sorted(
        f"{re.sub('[^0-9a-z]+', '', str(row.fields['problem']).lower())} {row.fields['answer']}"
        for row in rows
    )
    return hashlib.sha256("\n".join(plain).encode()).hexdigest()


NAME = "aime24"
MAX_NEW_TOKENS = 32768
PUBLISHED = Published(
    "AIME 2024",
    tasks={NAME: 30},
    sha256={NAME: "31800c941395d49f30bed365e3e8ad5e6760fcadab7caddc76801d9f8689854e"},
    fingerprint=fingerprint,
    settings={"max_new_tokens": MAX_NEW_TOKENS, "chat": True},
)
"""The problems of both contests, as HuggingFaceH4/aime_2024 and Qwen2.5-Math (evaluation/data/aime24) have
them."""
FIELDS = {"answer": (str, int)}
MARGIN = 32
"""Tokens left free between the longest prompt, its answer and the target's window."""


@dataclass(frozen=True)
class Aime24Settings:
    """The keys of conf/suite/aime24.yaml that are this suite's own."""

    data: Text
    limit: Count | None
    max_new_tokens: Count
    chat: bool
    thinking: bool


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """The problems at `suite.data`, with solutions no longer than the target's window leaves.

    Raises:
        ConfigError: a wrong setting, or no room for an answer.
        DataError: a problem or an answer is missing, or an answer is no whole number from 0 to 999.
    """
    own = settings_of(Aime24Settings, settings)
    tokenizer = target.require_tokenizer()

    def written(row: Example) -> Encoded:
        text = TEMPLATE.format(**row.fields)
        if not own.chat:
            return Encoded(tuple(tokenizer(text, verbose=False).input_ids))
        return Encoded(encode_chat(tokenizer, [{"role": "user", "content": text}], thinking=own.thinking))

    rows = problems(own.data)[: own.limit]
    prompts = [written(row).ids for row in rows]
    opened = own.chat and _opens_thoughts(str(tokenizer.decode(list(prompts[0]))))
    window = target.info.max_positions
    room = window - max(map(len, prompts)) - MARGIN
    if room < 1:
        raise ConfigError(
            f"suite aime24: the target reads {window} tokens, its longest prompt leaves no room for an "
            "answer; take a target with a longer window"
        )
    task = Task(
        NAME,
        rows,
        TEMPLATE,
        min(own.max_new_tokens, room),
        "whole_number",
        lambda text, row: right(text, row.fields["answer"], opened=opened),
        own.chat,
        protocol={"thinking": own.thinking, "scorer": SCORER, "prompt_opens_thoughts": opened},
        written=written,
        expected=lambda row: [str(row.fields["answer"])],
    )
    departures = PUBLISHED.departures({NAME: rows}, vars(own), sampling)
    if own.max_new_tokens > room:
        ends = f"the target's window ends solutions after {room} tokens"
        departures.append(f"{ends}, before the {own.max_new_tokens} asked for")
    notes = [] if departures else [f"solutions of up to {own.max_new_tokens} tokens"]
    return Suite(NAME, (task,), title=PUBLISHED.title, departures=departures, notes=notes)


def problems(where: str) -> tuple[Example, ...]:
    """The problems of a file or data set: rows with `problem` (or `question`) and `answer`.

    Raises:
        DataError: one of these is missing or of another type, or no whole number from 0 to 999.
    """
    found = []
    for number, row in enumerate(read_rows(where, PUBLISHED.title, FIELDS), 1):
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


def _opens_thoughts(prompt: str) -> bool:
    """Whether a prompt ends inside the model's thoughts, as QwQ's chat template has it."""
    return prompt.rfind(THOUGHT) > prompt.rfind(THOUGHT_END)

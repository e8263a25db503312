"""What a judge is told: the published prompts to the letter, or a user's own file of them, with their hash.

Slips included ("You evaluation should focus"): another wording gives other ratings.

Sources, both under the Apache License 2.0: MT-Bench's four prompts of single-answer grading are those of
lm-sys/FastChat, fastchat/llm_judge/data/judge_prompts.jsonl; LongBench-Write's is that of THUDM/LongWriter,
evaluation/judge.txt, copyright THU-KEG & Zhipu-AI.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

from longtrain.data.read.files import read_jsonl, read_text
from longtrain.errors import ConfigError, DataError

_TASK = (
    "Please act as an impartial judge and evaluate the quality of the response provided by an AI "
    "assistant to the user question"
)
_GENERAL = (
    " displayed below. Your evaluation should consider factors such as the helpfulness, relevance, "
    "accuracy, depth, creativity, and level of detail of the response. "
)
_CORRECT = (
    "Your evaluation should consider correctness and helpfulness. You will be given a reference answer "
    "and the assistant's answer. "
)
_EXPLAIN = "Begin your evaluation by providing a short explanation. "
_COMPARE = (
    "Begin your evaluation by comparing the assistant's answer with the reference answer. Identify and "
    "correct any mistakes. "
)
_RATE = (
    "Be as objective as possible. After providing your explanation, you must rate the response on a "
    'scale of 1 to 10 by strictly following this format: "[[rating]]", for example: "Rating: '
    '[[5]]".\n\n'
)
_ANSWER = "[The Start of Assistant's Answer]\n{answer}\n[The End of Assistant's Answer]"
_REFERENCE = "[The Start of Reference Answer]\n{ref_answer_1}\n[The End of Reference Answer]\n\n"
_CONVERSATION = (
    "<|The Start of Assistant A's Conversation with User|>\n\n"
    "### User:\n{question_1}\n\n"
    "### Assistant A:\n{answer_1}\n\n"
    "### User:\n{question_2}\n\n"
    "### Assistant A:\n{answer_2}\n\n"
    "<|The End of Assistant A's Conversation with User|>"
)
_REFERENCES = (
    "<|The Start of Reference Answer|>\n\n"
    "### User:\n{question_1}\n\n"
    "### Reference answer:\n{ref_answer_1}\n\n"
    "### User:\n{question_2}\n\n"
    "### Reference answer:\n{ref_answer_2}\n\n"
    "<|The End of Reference Answer|>\n\n\n"
)

MT_BENCH: dict[str, tuple[str, str]] = {
    "single-v1": (
        "You are a helpful assistant.",
        f"[Instruction]\n{_TASK}{_GENERAL}{_EXPLAIN}{_RATE}[Question]\n{{question}}\n\n{_ANSWER}",
    ),
    "single-math-v1": (
        "You are a helpful assistant.",
        f"[Instruction]\n{_TASK} displayed below. {_CORRECT}{_COMPARE}{_RATE}[Question]\n{{question}}\n\n"
        f"{_REFERENCE}{_ANSWER}",
    ),
    "single-v1-multi-turn": (
        f"{_TASK}{_GENERAL}You evaluation should focus on the assistant's answer to the second user "
        f"question. {_EXPLAIN}{_RATE}",
        _CONVERSATION,
    ),
    "single-math-v1-multi-turn": (
        f"{_TASK}. {_CORRECT}You evaluation should focus on the assistant's answer to the second question. "
        f"{_COMPARE}{_RATE}",
        _REFERENCES + _CONVERSATION,
    ),
}
"""Name -> (system prompt, template of the user's message)."""

PLACES = {
    "single-v1": {"question", "answer"},
    "single-math-v1": {"question", "answer", "ref_answer_1"},
    "single-v1-multi-turn": {f"{what}_{turn}" for what in ("question", "answer") for turn in (1, 2)},
    "single-math-v1-multi-turn": {
        f"{what}_{turn}" for what in ("question", "answer", "ref_answer") for turn in (1, 2)
    },
}
"""Name -> the places that a prompt of MT-Bench is filled at."""

LONGBENCH_WRITE = (
    "You are an expert in evaluating text quality. Please evaluate the quality of an AI assistant's "
    "response to a user's writing request. Be as strict as possible.\n\n"
    "You need to evaluate across the following six dimensions, with scores ranging from 1 to 5. The "
    "scoring criteria from 5 to 1 for each dimension are as follows:\n\n"
    "1. Relevance: From content highly relevant and fully applicable to the user's request to "
    "completely irrelevant or inapplicable.\n\n"
    "2. Accuracy: From content completely accurate with no factual errors or misleading information to "
    "content with numerous errors and highly misleading.\n\n"
    "3. Coherence: From clear structure with smooth logical connections to disorganized structure with "
    "no coherence.\n\n"
    "4. Clarity: From clear language, rich in detail, and easy to understand to confusing expression "
    "with minimal details.\n\n"
    "5. Breadth and Depth: From both broad and deep content with a lot of information to seriously "
    "lacking breadth and depth with minimal information.\n\n"
    "6. Reading Experience: From excellent reading experience, engaging and easy to understand content "
    "to very poor reading experience, boring and hard to understand content.\n\n"
    "Please evaluate the quality of the following response to a user's request according to the above "
    "requirements.\n\n"
    "<User Request>\n\n"
    "$INST$\n\n"
    "</User Request>\n\n"
    "<Response>\n\n"
    "$RESPONSE$\n\n"
    "</Response>\n\n"
    "Please evaluate the quality of the response. You must first provide a brief analysis of its "
    "quality, then give a comprehensive analysis with scores for each dimension. The output must "
    'strictly follow the JSON format: {"Analysis": ..., "Relevance": ..., "Accuracy": ..., '
    '"Coherence": ..., "Clarity": ..., "Breadth and Depth": ..., "Reading Experience": ...}. You do '
    "not need to consider whether the response meets the user's length requirements in your "
    "evaluation. Ensure that only one integer between 1 and 5 is output for each dimension score."
)


@dataclass(frozen=True)
class Prompts:
    """The prompts of one benchmark's judge.

    Args:
        texts: name -> (system prompt, template); an empty system prompt is not sent.
        official: whether these are the published texts.
        source: where they are from, for the result.
    """

    texts: Mapping[str, tuple[str, str]]
    official: bool
    source: str

    @property
    def sha256(self) -> str:
        """Of all the texts, 16 digits."""
        content = json.dumps({name: list(pair) for name, pair in self.texts.items()}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def facts(self) -> dict[str, str | bool]:
        """For the result."""
        return {"sha256": self.sha256, "official": self.official, "source": self.source}


def mt_bench_prompts(where: str | None = None) -> Prompts:
    """The prompts of MT-Bench's single-answer grading.

    Args:
        where: a JSONL file as FastChat's judge_prompts.jsonl, rows of `name`, `system_prompt` and
            `prompt_template`; other names than the four are left out. None: the published ones.

    Raises:
        ConfigError: no such file.
        DataError: a prompt or one of its places is missing.
    """
    if where is None:
        return Prompts(MT_BENCH, True, "lm-sys/FastChat, judge_prompts.jsonl")
    path = _file(where)
    texts = {}
    for place, row in read_jsonl(path):
        if row.get("name") not in MT_BENCH:
            continue
        for field in ("system_prompt", "prompt_template"):
            if not isinstance(row.get(field), str):
                raise DataError(f"{place}: prompt {row['name']} has no text '{field}'")
        _check_places(place, row["name"], row["prompt_template"])
        texts[row["name"]] = (row["system_prompt"], row["prompt_template"])
    if missing := [name for name in MT_BENCH if name not in texts]:
        raise DataError(f"{path} has no prompt {', '.join(missing)}; it needs {', '.join(MT_BENCH)}")
    return Prompts(texts, texts == MT_BENCH, path.name)


def longbench_write_prompts(where: str | None = None) -> Prompts:
    """The prompt of LongBench-Write.

    Args:
        where: a text file that holds `$INST$` and `$RESPONSE$`; None: the published one.

    Raises:
        ConfigError: no such file.
        DataError: it lacks one of the two.
    """
    if where is None:
        return Prompts({"judge": ("", LONGBENCH_WRITE)}, True, "THUDM/LongWriter, evaluation/judge.txt")
    path = _file(where)
    text = read_text(path)
    for mark in ("$INST$", "$RESPONSE$"):
        if mark not in text:
            raise DataError(f"{path} lacks {mark}; the request goes where $INST$ is, the text at $RESPONSE$")
    return Prompts({"judge": ("", text)}, text == LONGBENCH_WRITE, path.name)


def _check_places(place: str, name: str, template: str) -> None:
    try:
        there = {field for _, field, _, _ in Formatter().parse(template) if field is not None}
    except ValueError as error:
        raise DataError(f"{place}: prompt {name}: {error}; a brace is written {{{{ or }}}}") from None
    if there != PLACES[name]:
        raise DataError(
            f"{place}: prompt {name} has the places {', '.join(sorted(there)) or 'none'}; it needs "
            f"{', '.join(sorted(PLACES[name]))}"
        )


def _file(where: str) -> Path:
    path = Path(where).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"suite.judge.prompts={where} is no file; pass a file of prompts, or null for the published ones"
        )
    return path

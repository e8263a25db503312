"""The protocol of an evaluation: all settings that determine prompts, decoding and scores, and their hash."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longtrain.decoding.sampling import Sampling
from longtrain.errors import ConfigError
from longtrain.evaluation.prompts import encode_chat
from longtrain.evaluation.suite import Suite
from longtrain.evaluation.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from longtrain.targets.model import Target

Json = dict[str, Any]
VERSION = 1
"""Version of the hashed settings; increased when the harness changes prompts or decoding."""
SLACK = 16
"""Tokens by which a prompt that was cut in the middle may exceed its limit after it is tokenised again."""


@dataclass(frozen=True)
class Protocol:
    """The settings that two results must share to be comparable; weights and systems may differ.

    Args:
        settings: JSON values.
    """

    settings: Json

    @property
    def hash(self) -> str:
        """16 hex digits."""
        return json_hash(self.settings)


def protocol_of(suite: Suite, target: Target, sampling: Sampling) -> Protocol:
    """The protocol of a suite on a target.

    Args:
        suite: the suite with all its examples.
        target: its tokenizer, chat template and context window determine the prompts.
        sampling: the run's settings; a task may have its own temperature.

    Raises:
        ConfigError: a task's answers do not fit the target's window.
    """
    from longtrain.data.packing.prepare import tokenizer_hash

    template = getattr(target.tokenizer, "chat_template", None)
    tasks: Json = {}
    for task in suite.tasks:
        tasks[task.name] = task.settings()
        if isinstance(task, Task):
            tasks[task.name]["max_prompt_tokens"] = prompt_room(task, target)
    settings = {
        "version": VERSION,
        "suite": suite.name,
        "suite_settings": {},  # kept in the hash, so that it equals that of results recorded earlier
        "tokenizer": tokenizer_hash(target.tokenizer)[:16] if target.tokenizer else None,
        "chat_template": json_hash(template) if template else None,
        "rendered_chat": _rendered(target.tokenizer) if target.tokenizer and template else None,
        "eos_ids": list(target.info.eos_ids),
        "decoding": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
        },
        "tasks": tasks,
    }
    return Protocol(json.loads(json.dumps(settings, allow_nan=False)))


def prompt_room(task: Task, target: Target) -> int:
    """The maximum number of tokens of the text of a task's prompt.

    `task.max_prompt_tokens`, or what the target's window leaves after the answer, the chat
    template and a little slack.

    Raises:
        ConfigError: no room is left.
    """
    if task.max_prompt_tokens is not None:
        return task.max_prompt_tokens
    window, answers = target.info.max_positions, task.max_new_tokens
    around = _template_tokens(target.tokenizer) if task.chat and target.tokenizer else 0
    room = window - answers - around - SLACK
    if room < 2:
        raise ConfigError(
            f"task {task.name} answers with up to {answers} tokens, which leaves no prompt in the target's "
            f"window of {window}; take a target with a longer window, or pass a lower suite.max_new_tokens"
        )
    return room


def json_hash(values: Any) -> str:
    """16 hex digits of the SHA-256 of JSON values, independent of the order of keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, allow_nan=False).encode()).hexdigest()[:16]


def _rendered(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the tokens of a short conversation rendered with thinking and without.

    The result also depends on the library's version and on the special tokens, so the template's text alone
    is not enough.
    """
    probe = [{"role": "user", "content": "Which day is it?"}]
    return json_hash([encode_chat(tokenizer, probe, thinking=thinking) for thinking in (False, True)])


def _template_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of tokens that the chat template adds around a message."""
    if not tokenizer.chat_template:
        return 0  # `encode` refuses the first prompt with the reason
    return len(encode_chat(tokenizer, [{"role": "user", "content": ""}]))

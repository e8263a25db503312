"""Shell completion by Hydra, extended by the job names that come first in our commands.

`longtrain completion SHELL` prints Hydra's function for the shell's start-up file. At each Tab that function
asks `longtrain -sc query=SHELL`, with the line typed so far in the variable COMP_LINE.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from longtrain.errors import ConfigError
from longtrain.jobs import JOBS

SHELLS = ("bash", "zsh", "fish")
OTHER_WORDS = ("config", "recipes", "completion")
FLAGS = ("-sc", "--shell-completion")
"""Hydra's flags for completion requests from a shell."""


def install(words: Sequence[str]) -> list[str]:
    """The words for Hydra that print the completion function of `longtrain completion SHELL`.

    Raises:
        ConfigError: the shell is not supported.
    """
    if len(words) != 1 or words[0] not in SHELLS:
        raise ConfigError(f"completion for {' '.join(words) or 'which shell'}? allowed: {', '.join(SHELLS)}")
    return [FLAGS[0], f"install={words[0]}"]


def first_words(typed: Sequence[str]) -> list[str]:
    """Jobs and other first words that complete a single word; Hydra does not know them."""
    if len(typed) != 1:
        return []
    return sorted(word for word in (*JOBS, *OTHER_WORDS) if word.startswith(typed[0]))


def typed_words() -> list[str]:
    """The words of COMP_LINE after the program's name; the last one is incomplete, and may be empty."""
    line = os.environ.get("COMP_LINE", "")
    return [*line.split()[1:], *([""] if line[-1:].isspace() else [])]


def without_job(typed: Sequence[str], asked: Sequence[str]) -> list[str]:
    """The words for Hydra with the job as a flag; also removes the job from COMP_LINE.

    Args:
        typed: the result of `typed_words`.
        asked: the words of `-sc query=SHELL`.
    """
    rest = [*typed[1:]] if typed[:1] == ["config"] else [*typed]
    job = rest.pop(0) if len(rest) > 1 and rest[0] in JOBS else "train"
    os.environ["COMP_LINE"] = " ".join(["longtrain", *rest])
    return [f"--config-name={job}", *asked]

"""What can go wrong between a question to the judge and its reply."""

from __future__ import annotations

from longtrain.errors import LongtrainError


class JudgeError(LongtrainError):
    """The judge cannot be used as it is: unreachable, a wrong key or model, or no chat endpoint at all."""


class RefusedError(Exception):
    """The judge works, but not for this one question, too long or filtered; the text says why."""


class StoppedError(Exception):
    """The run is ending; the question was not asked."""

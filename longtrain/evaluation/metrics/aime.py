"""The answer to a contest problem: a whole number from 0 to 999, in a box or the last one named."""

from __future__ import annotations

import re

BOX = "\\boxed"
LARGEST = 999
THOUGHT, THOUGHT_END = "<think>", "</think>"

_NUMBER = re.compile(r"[-/]?[0-9](?:[0-9.,]*[0-9])?")
_WHOLE = re.compile(r"(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.0+)?")
_SPACES = ("{,}", "\\,", "\\!", "\\ ")
"""What LaTeX writes inside long numbers."""


def answer_of(text: str, *, opened: bool = False) -> int | None:
    r"""The number that a solution gives as its answer.

    It is the last number in the last `\boxed{...}`, or in the whole text where nothing is boxed. What a model
    thinks does not count: neither what stands before the end of its thoughts, nor thoughts without an end. If
    that number is part of a fraction, not whole, negative or above 999, there is no answer: nothing before it
    is taken instead.

    Args:
        text: what was generated.
        opened: whether the prompt opens the thoughts, so that the text begins inside them.

    Returns: the number, or None.
    """
    _, ended, text = text.rpartition(THOUGHT_END)
    if THOUGHT in text or (opened and not ended):
        return None
    box = _last_box(text)
    if box is not None and "frac" in box:
        return None
    said = text if box is None else box
    for space in _SPACES:
        said = said.replace(space, "," if "," in space else "")
    numbers = _NUMBER.findall(said)
    if not numbers:
        return None
    last: str = numbers[-1]
    if not _WHOLE.fullmatch(last):
        last = last.rpartition(",")[2]
    if not _WHOLE.fullmatch(last):
        return None
    value = int(last.partition(".")[0].replace(",", ""))
    return value if value <= LARGEST else None


def right(text: str, answer: int, *, opened: bool = False) -> float:
    """1 if a solution's answer is the expected one, else 0. `opened`: see `answer_of`."""
    return float(answer_of(text, opened=opened) == answer)


def _last_box(text: str) -> str | None:
    """What the last box holds, braces in it balanced; an open box holds the rest; None without a box."""
    at = text.rfind(BOX)
    if at < 0:
        return None
    rest = text[at + len(BOX) :].lstrip()
    if not rest.startswith("{"):
        return rest.split("$")[0].split("\n")[0]
    depth = 0
    for end, char in enumerate(rest):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return rest[1:end]
    return rest[1:]

r"""The answer to a contest problem: one whole number from 0 to 999.

AIME has no official scorer; this one is longtrain's own. It takes the places where Qwen2.5-Math looks for
an answer, in their order: the last box, what follows "answer is", the last number. It is no general checker:
math-verify needs SymPy and a signal handler, works out `3\cdot 68` and finds nothing in `\boxed{204`. Here a
whole number that is written out counts, and nothing that has to be worked out first.
"""

from __future__ import annotations

import re

LARGEST = 999
SCORER = "longtrain: last box, else after 'answer is', else last number; one whole number written out"
"""What the protocol of a result says of this scorer; another text makes another protocol."""
THOUGHT, THOUGHT_END = "<think>", "</think>"

BOX = "\\boxed"
_WHOLE = re.compile(r"0*([0-9]{1,3})(?:\.0*)?")
_THOUSANDS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.0+)?")
_NUMBER = re.compile(r"[-−/]?[0-9](?:[0-9.,]*[0-9])?")
_ANSWER = re.compile(r"\banswers?\b[^.\n0-9$\\]{0,60}?(?:\bis\b(?:\s+equal\s+to\b)?|:|=)", re.IGNORECASE)
_MATH = re.compile(r"\$+(.+?)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SUM = re.compile(r"[-+−0-9.,/^*×·÷=√%°\\ ]+")
"""Numbers and what joins them, in running text."""
_FACTOR = re.compile(r"\s*(?:pi|sqrt|times|plus|minus|over|percent|or|choose|[a-zA-Z])\b|\([0-9]")
"""What makes a part of the number before it."""
_EQUALS = re.compile(r"(?<![<>!])=")

_WORDS = re.compile(r"\\(?:text[a-z]*|mbox|math[a-z]+)\s*\{([^{}]*)\}((?:\^\{?[0-9]\}?)?)")
_LAYOUT = re.compile(r"\\[,!; ]|\\(?:left|right|displaystyle|quad)\b|\^\{?\\circ\}?|°|\bdegrees?\b|[$~]")
_BEFORE = re.compile(r"(?:[+^×·÷√_]\{?|[0-9)}]\s*[-−*/]|\\(?:cdot|times|div|pm|sqrt|d?frac)\b\{?|\}\{)\s*$")
_AFTER = re.compile(
    r"\s*(?:[+^×·÷√/%]|\*\s*[0-9(]|[-−]\s*[0-9]|\\(?:cdot|times|div|pm|sqrt|d?frac|pi)\b)|[a-zA-Z]\b"
)
"""Operators beside a number in running text."""


def answer_of(text: str, *, opened: bool = False) -> int | None:
    r"""The number that a solution gives as its answer.

    It is what the last `\boxed{...}` holds; without a box the number that follows the last "answer is";
    without either the last number of the text. `m+n=204` gives what stands after its last equals sign; units
    and option letters do not matter. If a number is there that is part of a product, a sum, a root, a power
    or a fraction, that is not whole, is negative or above 999, there is no answer: nothing else is taken
    instead. What a model thinks does not count: neither what stands before the end of its thoughts, nor
    thoughts without an end.

    Args:
        text: what was generated.
        opened: whether the prompt opens the thoughts, so that the text begins inside them.

    Returns: the number, or None.
    """
    _, ended, text = text.rpartition(THOUGHT_END)
    if THOUGHT in text or (opened and not ended):
        return None
    box = _last_box(text)
    if box is not None:
        return _written_out(box)
    named = list(_ANSWER.finditer(text))
    if named:
        rest = text[named[-1].end() :].lstrip(" \n\t*_:")
        if math := _MATH.match(rest):
            return _written_out(next(part for part in math.groups() if part is not None))
        if found := _SUM.match(rest):
            return None if _FACTOR.match(rest, found.end()) else _written_out(found[0])
    return _last_number(text)


def right(text: str, answer: int, *, opened: bool = False) -> float:
    """1 if a solution's answer is the expected one, else 0. `opened`: see `answer_of`."""
    return float(answer_of(text, opened=opened) == answer)


def _written_out(said: str) -> int | None:
    """The whole number that an expression is, after its last equals sign; None if it is anything else."""
    said = _LAYOUT.sub("", _WORDS.sub(_word, said))
    last: str = _EQUALS.split(said)[-1]
    found = _WHOLE.fullmatch(last.lstrip(" \n\t{([*").rstrip(" \n\t})].,;:!*-–"))
    return int(found[1]) if found else None


def _word(found: re.Match[str]) -> str:
    """What a LaTeX command with words in it counts as: a number or a variable stays, a unit does not."""
    inside = found[1]
    stays = any(char.isdigit() for char in inside) or re.fullmatch("[a-zA-Z]", inside)
    return f"{inside}{found[2]}" if stays else " "


def _last_number(text: str) -> int | None:
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    if _THOUSANDS.fullmatch(last[0]) or _AFTER.match(text, last.end()):
        return None
    said = last[0].rpartition(",")[2]
    alone = "," in last[0] or not _BEFORE.search(text[: last.start()][-24:])
    found = _WHOLE.fullmatch(said) if alone else None
    return int(found[1]) if found else None


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

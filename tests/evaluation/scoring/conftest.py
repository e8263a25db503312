"""Random and adversarial pairs of texts for the comparison of metrics with their official scorers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

_WORDS = """
the a an The A AN cat sat mat on of and Ü naïve don't e.g. U.S. 3.5 7 07 ٣ ७ ７ ² 日本 数字 ... . .. - -- '
Paragraph paragraph yes no unanswerable \ufeff İ ß ﬁ x,y (z) [w] $5 100% a.b .c d. — “quoted” 🙂
the. .the \u0301
"""
WORDS = _WORDS.split()
SPACES = (" ", " ", " ", " ", "  ", "\n", "\t", "\u00a0", "\u3000", "\x1c", "\r\n", "")
EDGES = (
    *("", " ", "\n", "\t \n", ".", "..", "...", ". . .", " . ", "a", "the", "the a an", "A.", ".A", "a.b.c"),
    *("the cat", "the cat.", "the cat. ", "The  cat", "cat the", "cat cat cat", "\u00a0", "\u200b", "½", "٣"),
    *("!!!", "!", "a!b", "a-b", "." * 500, ". " * 200, "x " * 300, "x. " * 100, "\n\n\nfirst\nsecond"),
)


def text(rng: random.Random, vocabulary: int, longest: int) -> str:
    """Random words of the first of a shuffled list, with random spaces."""
    words = rng.sample(WORDS, vocabulary)
    return "".join(
        rng.choice(words) + rng.choice(SPACES) for _ in range(rng.choice((0, 1, 2, 3, 8, longest)))
    )


def near(rng: random.Random, other: str) -> str:
    """A text with some of its characters or words dropped, doubled or moved."""
    parts = list(other) if rng.random() < 0.3 else other.split(" ")
    joint = "" if parts == list(other) else " "
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(parts) + 1)
        part = parts[at : at + 1]
        parts[at : at + 1] = rng.choice(([], part * 2, [*part[::-1], "."], ["\n"]))
    return joint.join(parts)


@pytest.fixture(scope="session")
def text_pairs() -> Callable[..., list[tuple[str, str]]]:
    """`text_pairs(count, longest)`: all pairs of `EDGES`, then random pairs, half of them nearly equal."""

    def make(count: int, *, longest: int = 30, seed: int = 0) -> list[tuple[str, str]]:
        rng = random.Random(seed)
        pairs = [(a, b) for a in EDGES for b in EDGES]
        while len(pairs) < count:
            b = text(rng, rng.choice((2, 5, len(WORDS))), longest)
            pairs.append(
                (near(rng, b) if rng.random() < 0.5 else text(rng, rng.choice((2, 5, 40)), longest), b)
            )
        return pairs

    return make

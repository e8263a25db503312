"""A target that reads bytes, some text, and the writer of retrieval documents over it."""

from __future__ import annotations

import numpy as np

MARKS = {256: "<user>", 257: "<assistant>", 258: "<end>"}
VOCABULARY = [chr(i) for i in range(256)] + list(MARKS.values())
WORDS = (
    np.random.default_rng(9)
    .choice(["sea", "boat", "calm", "men", "home", "rope", "wind", "shore"], (400, 3))
    .tolist()
)
TEXT = "".join(f"The {a} was {b}. A {c} came in\nand the men went home. " for a, b, c in WORDS)


def encode(text: str) -> list[int]:
    return list(text.encode("latin-1"))


def decode(ids: np.ndarray) -> str:
    return "".join(VOCABULARY[i] for i in ids.tolist())

"""Pieces of long documents, cut out of the characters first: little more is tokenised than is asked about.

Shapes: T tokens of one window or piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from longtrain.data.chat.prompts import log_uniform, random_of
from longtrain.data.config import DataConfig
from longtrain.data.read.adapters import Document

WINDOW_CHARS = 6
"""Characters of a window for each token that is wanted: prose and code have 3 to 5 a token. A window with too
few tokens is doubled."""


@dataclass(frozen=True)
class Window:
    """The characters of a document that are tokenised for one piece.

    Args:
        name: name of the piece.
        start: first character.
        chars: number of characters; fewer at the document's end.
        tokens: tokens of the piece, the beginning-of-sequence token included.
        within: where the piece begins among its possible places in the window: 0 the first, below 1.
    """

    name: str
    start: int
    chars: int
    tokens: int
    within: float

    def of(self, text: str) -> str:
        """Return the window's characters of a document's text."""
        return text[self.start : self.start + self.chars]

    def doubled(self, text: str) -> Window:
        """Return the window with twice as many characters, some of them before it at the document's end."""
        chars = 2 * self.chars
        return replace(self, start=min(self.start, max(0, len(text) - chars)), chars=chars)


def windows(document: Document, config: DataConfig, *, count: int, limit: int) -> list[Window]:
    """Choose the windows of a long document, at random places, for pieces of log-uniform length.

    They are a function of the seed and the document's name, and so are the lengths, which are those that
    `cut_text` gives pieces of a long text.

    Args:
        document: the document, whose name seeds the random places.
        config: `prompt_tokens` bounds the pieces.
        count: number of pieces.
        limit: largest number of tokens of a piece.

    Returns:
        The windows; none for a document that is to be tokenised whole: a conversation, or text that is no
        longer than all windows may be.
    """
    if document.text is None or config.prompt_tokens is None:
        return []
    low, high = config.prompt_tokens[0], min(config.prompt_tokens[1], limit)
    if high < low or len(document.text) <= WINDOW_CHARS * high * count:
        return []
    chosen = []
    for number in range(count):
        rng = random_of(config.seed, f"{document.name}:{number}")
        tokens = log_uniform(rng, low, high)
        chars = WINDOW_CHARS * tokens
        start = int(rng.integers(len(document.text) - chars + 1))
        name = f"{document.name}@{number}" if count > 1 else document.name
        chosen.append(Window(name, start, chars, tokens, float(rng.random())))
    return chosen


def cut_window(
    window: Window,
    ids_T: np.ndarray,
    text: str,
    encode: Callable[[str], np.ndarray],
    *,
    shortest: int,
    bos: int | None,
) -> np.ndarray | None:
    """Cut a piece of the wanted number of tokens out of a window.

    The window's last token is never in it, since the characters may end within a word.

    Args:
        window: where the piece is.
        ids_T: all tokens of the window.
        text: the document's text.
        encode: tokenises a window that has to be larger.
        shortest: fewest tokens of a piece, for a document that has fewer than the window wants.
        bos: the beginning-of-sequence token, put at the start of every piece; None: there is none.

    Returns:
        Token ids; None: the document has fewer than `shortest`.
    """
    while len(ids_T) <= window.tokens and window.chars < len(text):
        window = window.doubled(text)
        ids_T = encode(window.of(text))
    head_T = ids_T[: int(len(ids_T) > 0 and ids_T[0] == bos)]
    body_T = ids_T[len(head_T) :]
    n = min(window.tokens, len(ids_T) - 1) - len(head_T)
    if n < max(1, shortest - len(head_T)):
        return None
    start = int(window.within * (len(body_T) - n))
    return np.concatenate([head_T, body_T[start : start + n]])

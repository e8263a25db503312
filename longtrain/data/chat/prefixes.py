"""Tokenises texts that begin alike, such as a conversation up to each turn, without reading all again.

Shapes: T tokens of one text.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np


class Prefixes:
    """Tokenises texts, each only from the last added token that its start has in common with an earlier one.

    A fast tokenizer splits a text at its added tokens first, from left to right, and then tokenises the parts
    between them one by one. So the ids up to an added token do not depend on what follows it. This does not
    hold for an added token that looks at the text around it, that is searched for in the normalised text, or
    that is a part of another; a text is never split at those.

    Args:
        tokenizer: of Hugging Face.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        texts = [str(token) for token in added.values()]
        self._splits = {
            number: str(token)
            for number, token in added.items()
            if not (token.normalized or token.single_word) and sum(str(token) in text for text in texts) == 1
        }
        self._text, self._ids_T = "", np.zeros(0, np.int64)
        self._at: list[tuple[int, int, int]] = []
        """Where the added tokens of `_splits` stand in the text: the first character of each, the one after
        it, and the token's number."""

    @staticmethod
    def serves(tokenizer: Any) -> bool:
        """True if the tokenizer is a fast one that tokenises the text of its chat template as any other."""
        from transformers import PreTrainedTokenizerBase

        own = getattr(type(tokenizer), "apply_chat_template", None)
        return (
            own is PreTrainedTokenizerBase.apply_chat_template
            and tokenizer.is_fast
            and not tokenizer.split_special_tokens
        )

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text without a beginning or an end of sequence around it, int64_T."""
        shared = bisect_left(self._at, True, key=lambda one: not text.startswith(self._text[: one[1]]))
        start, _, known = self._at[shared - 1] if shared else (0, 0, 0)
        encoded = self._tokenizer(text[start:], add_special_tokens=False, verbose=False)
        new_T = np.asarray(encoded["input_ids"], np.int64)
        ids_T = np.concatenate([self._ids_T[:known], new_T])
        if not self._text.startswith(text):
            at = self._at[: max(0, shared - 1)]
            for number in np.flatnonzero(np.isin(new_T, list(self._splits))).tolist():
                begin, end = (start + char for char in encoded.token_to_chars(number))
                if text[begin:end] == self._splits[ids_T[known + number]]:
                    at.append((begin, end, known + number))
            self._text, self._ids_T, self._at = text, ids_T, at
        return ids_T

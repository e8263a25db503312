"""Text to hide needles in: essays cut into sentences, and the sentence of noise that RULER repeats."""

from __future__ import annotations

import hashlib
import json
import re
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from longtrain.assets import asset_dir
from longtrain.data.read.files import read_text
from longtrain.errors import DataError
from longtrain.evaluation.contexts import read_texts

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The line that noise haystacks repeat."""

_END = re.compile(r"[.!?…]+[\"'”’)\]]*$")
_BEGIN = re.compile(r"[\"'“‘(\[]*[A-Z0-9]")
_ABBREVIATION = re.compile(
    r"(?:^|[\"'“‘(\[])(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Prof|Rev|Sr|Jr|Col|Gen|Capt|Lt|vs|etc|[ei]\.[eg]|cf|No|Fig)\.$"
)


class Haystack:
    """Running text as words, cut into sentences.

    A needle stands between two sentences. RULER finds them with NLTK's trained splitter, which must be
    downloaded; here a sentence ends at a full stop, question or exclamation mark that is no abbreviation's
    and that a capital or digit follows. Only the places where a needle can stand depend on it.

    Args:
        name: what reports call it.
        text: any text; every run of white space counts as one space.

    Raises:
        DataError: the text has fewer than two words.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.words = re.sub(r"\s+", " ", text).split(" ")
        if len(self.words) < 2:
            raise DataError(f"haystack {name} has {len(self.words)} words; give a text, as long as you have")
        self.digest = hashlib.sha256(" ".join(self.words).encode()).hexdigest()[:16]
        self._sentences = lru_cache(maxsize=8)(self._cut)

    @classmethod
    def read(cls, where: str | Path) -> Haystack:
        """A haystack from a file: a JSON object with the key `text` (the official PaulGrahamEssays.json,
        plain, .xz or .gz), a text file, or a folder of text files.

        Raises:
            DataError: nothing is there, or it has no text.
        """
        path = Path(where).expanduser()
        if ".json" not in path.suffixes[-2:]:
            return cls(path.name, "\n".join(text for _, _, text in read_texts(path)))
        try:
            text = json.loads(read_text(path))["text"]
        except (OSError, ValueError, KeyError, TypeError, DataError) as error:
            raise DataError(
                f"haystack {path} cannot be read ({type(error).__name__}: {error}); allowed: a JSON object "
                "with the key 'text', as RULER's download_paulgraham_essay.py writes, or a text file"
            ) from None
        if not isinstance(text, str):
            raise DataError(f"haystack {path}: 'text' is {type(text).__name__}; allowed: a string")
        return cls(path.name, text)

    @classmethod
    def bundled(cls) -> Haystack:
        """The held-out novels that ship with longtrain. RULER itself uses Paul Graham's essays."""
        return cls("bundled", cls.read(asset_dir("bundled") / "text" / "heldout").text)

    @property
    def text(self) -> str:
        """The whole text, with single spaces."""
        return " ".join(self.words)

    def sentences(self, n_words: int) -> list[str]:
        """The first `n_words` words as sentences, from the start again if the text is shorter."""
        return self._sentences(n_words)

    def _cut(self, n_words: int) -> list[str]:
        times = -(-n_words // len(self.words))
        words = " ".join((self.words * times)[:n_words]).strip().split(" ")
        ends = [
            bool(_END.search(word) and _BEGIN.match(after) and not _ABBREVIATION.search(word))
            for word, after in pairwise(words)
        ]
        starts = [0, *(i + 1 for i, end in enumerate(ends) if end), len(words)]
        return [" ".join(words[a:b]) for a, b in pairwise(starts)]

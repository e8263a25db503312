"""Source texts of RULER's prompts: running text, word lists, and hashes of the published files."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from longtrain.assets import asset_dir
from longtrain.data.read.files import open_bytes, read_text
from longtrain.data.retrieval.material import ADJECTIVES, NOUNS
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.corpora import read_texts
from longtrain.files import UTF8

_END = re.compile(r"[.!?…]+[\"'”’)\]]*$")
_BEGIN = re.compile(r"[\"'“‘(\[]*[A-Z0-9]")
_ABBREVIATION = re.compile(
    r"(?:^|[\"'“‘(\[])(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Prof|Rev|Sr|Jr|Col|Gen|Capt|Lt|vs|etc|[ei]\.[eg]|cf|No|Fig)\.$"
)


class Haystack:
    """Running text as words and sentences.

    Needles are inserted between two sentences. RULER splits them with NLTK's trained splitter, which must be
    downloaded; here a sentence ends at a full stop, question or exclamation mark that does not end an
    abbreviation and that a capital or digit follows. Only the possible positions of needles depend on it.

    Args:
        name: its name in reports.
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
            DataError: the file does not exist, or has no text.
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
    @lru_cache(maxsize=1)
    def bundled(cls) -> Haystack:
        """The held-out novels that ship with longtrain. RULER itself uses Paul Graham's essays."""
        return cls("bundled", cls.read(asset_dir("bundled") / "text" / "heldout").text)

    @property
    def text(self) -> str:
        """The whole text, with single spaces."""
        return " ".join(self.words)

    def sentences(self, n_words: int) -> list[str]:
        """The first `n_words` words as sentences; the text is repeated if it is shorter."""
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


SOURCES = ("longtrain", "wonderwords")


@dataclass(frozen=True)
class Vocabulary:
    """Word lists. Reports must name the list that a result used, since the official words differ.

    Args:
        name: its name in reports.
        adjectives: first halves of keys.
        nouns: second halves of keys.
        pool: distinct words for word lists, sorted.
        more: a larger list, used instead of `pool` if a prompt needs more words than `pool` has.
    """

    name: str
    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    pool: tuple[str, ...]
    more: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> str:
        """A hash of all lists, for protocols."""
        lists = [self.adjectives, self.nouns, self.pool, self.more]
        return hashlib.sha256(json.dumps(lists).encode()).hexdigest()[:16]

    def with_more(self, path: str | Path) -> Vocabulary:
        """A copy with a larger list from a file.

        RULER needs it for `cwe` beyond some 100K tokens (its json/english_words.json).

        Args:
            path: a text file with a word a line, or JSON: a list of words, or an object with words as values.

        Raises:
            DataError: the file cannot be read, or has another format.
        """
        file = Path(path).expanduser()
        try:
            text = file.read_text(encoding=UTF8)
            found: Any = json.loads(text) if file.suffix == ".json" else text.split()
        except (OSError, ValueError) as error:
            raise DataError(f"word list {file} cannot be read: {error}") from None
        found = list(found.values()) if isinstance(found, dict) else found
        if not isinstance(found, list) or not found or not all(isinstance(word, str) for word in found):
            raise DataError(
                f"word list {file} is no list of words; allowed: a word a line, a JSON list, or a JSON "
                "object with words as values"
            )
        return replace(self, name=f"{self.name}+{file.name}", more=tuple(dict.fromkeys(found)))

    def words(self, count: int) -> tuple[str, ...]:
        """A list of at least `count` distinct words.

        Raises:
            DataError: there are fewer words than that.
        """
        if count <= len(self.pool):
            return self.pool
        if count <= len(self.more):
            return self.more
        most = max(len(self.pool), len(self.more))
        raise DataError(
            f"a word list needs {count} different words, '{self.name}' has {most}; give a file of more "
            "(Vocabulary.with_more) or a shorter length"
        )


def vocabulary(source: str = "longtrain") -> Vocabulary:
    """The word lists of a source.

    Args:
        source: `longtrain`: short lists of adjectives and nouns, and for word lists the words of the bundled
            novels; nothing to install. `wonderwords`: the official lists, from the package of that name.

    Raises:
        ConfigError: the package is missing.
    """
    return _own() if source == "longtrain" else _wonderwords()


@lru_cache(maxsize=1)
def _own() -> Vocabulary:
    found = {*ADJECTIVES, *NOUNS}
    for file in sorted((asset_dir("bundled") / "text" / "heldout").glob("*.txt")):
        found.update(re.findall(r"(?<![\w'’-])[a-z]{4,12}(?![\w'’-])", file.read_text(encoding="utf-8")))
    return Vocabulary("longtrain", ADJECTIVES, NOUNS, tuple(sorted(found)))


@lru_cache(maxsize=1)
def _wonderwords() -> Vocabulary:
    try:
        folder = files("wonderwords.assets")
    except ModuleNotFoundError:
        raise ConfigError(
            "words=wonderwords needs the package wonderwords; run: pip install 'longtrain[ruler]', or use "
            "words=longtrain"
        ) from None
    lists = {
        kind: tuple(line.rstrip() for line in (folder / f"{kind}list.txt").read_text("utf-8").splitlines())
        for kind in ("adjective", "noun", "verb")
    }
    pool = sorted({word for words in lists.values() for word in words})
    return Vocabulary("wonderwords", lists["adjective"], lists["noun"], tuple(pool))


SHA256 = {
    "haystack": (
        "8d31e1b660e0f2180bcca6d238e18f77921df9d158611582b860da1762b6d3dd",  # as written by RULER's script
        "c991a4f897d482a4c845028f5bd3aa8951569b1ab1708723bcc6ec72e66b9446",  # ShadowKV's copy
    ),
    "squad": ("80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",),
    "hotpotqa": (
        "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",  # the authors' own file
        "e3da074df24e8369009918aa5cdbdd254dadcde4c63f7569d36afd6f2268caa8",  # the mirror that RULER downloads
    ),
    "more_words": ("affcd6d45fdf3cc843d585c99c97ad615094e760e6c4756b654bab6c73bc2eca",),
}
"""Name of a published file -> hashes of its uncompressed versions: PaulGrahamEssays.json, dev-v2.0.json,
hotpot_dev_distractor_v1.json, english_words.json.
"""


def is_published(what: str, path: Path) -> bool:
    """True if a file (plain or compressed) is one that RULER's published prompts are generated from.

    Args:
        what: a key of `SHA256`.
        path: an existing path; a folder is never a published file.
    """
    if not path.is_file():
        return False
    with open_bytes(path) as file:
        return hashlib.sha256(file.read()).hexdigest() in SHA256[what]

"""Lists of English words that keys and word lists are made of."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from longtrain.assets import asset_dir
from longtrain.data.retrieval.material import ADJECTIVES, NOUNS
from longtrain.errors import ConfigError, DataError

SOURCES = ("longtrain", "wonderwords")


@dataclass(frozen=True)
class Vocabulary:
    """Word lists. Which one a result used must be said beside it: the words differ, not their use.

    Args:
        name: what reports call it.
        adjectives: first halves of keys.
        nouns: second halves of keys.
        pool: different words for word lists, sorted.
        more: a larger list, used instead of `pool` where a prompt needs more words than that has.
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
        """The same with a larger list from a file.

        RULER needs it for `cwe` beyond some 100K tokens (its json/english_words.json).

        Args:
            path: a text file with a word a line, or JSON: a list of words, or an object with words as values.

        Raises:
            DataError: the file cannot be read, or holds something else.
        """
        file = Path(path).expanduser()
        try:
            text = file.read_text(encoding="utf-8")
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
        """A list of at least `count` different words.

        Raises:
            DataError: there are not so many.
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
        ConfigError: no such source, or the package is missing.
    """
    if source == "longtrain":
        return _own()
    if source == "wonderwords":
        return _wonderwords()
    raise ConfigError(f"unknown word lists '{source}'; known: {', '.join(SOURCES)}")


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

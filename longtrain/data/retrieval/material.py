"""Building blocks of retrieval documents: token roles, turn marks, and running text to hide sentences in.

Shapes: T tokens of one document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from longtrain.errors import DataError

Ids: TypeAlias = NDArray[np.int32]
_BLOCK = 2**20
"""Number of tokens that are searched for breaks at once."""


class Role(IntEnum):
    """The role of a token in the loss."""

    TEXT = 0
    """Running text of the context, or of a plain document."""
    PROMPT = 1
    """Questions, and sentences hidden in the context, which are not worth predicting."""
    ANSWER = 2
    """Text of the assistant."""
    VALUE = 3
    """Tokens of an answer that can only be known from the context."""


@dataclass(frozen=True)
class RoleDocument:
    """A generated document: `ids_T` and, for each token, its `Role` in `roles_T` (uint8)."""

    ids_T: Ids
    roles_T: NDArray[np.uint8]
    kind: str


@dataclass(frozen=True)
class ChatIds:
    """Token ids around turns: before the user's, before the assistant's, after the assistant's.

    `start` holds the tokens before the first turn, if the template has any.
    """

    user: tuple[int, ...]
    assistant: tuple[int, ...]
    end: tuple[int, ...]
    start: tuple[int, ...] = ()


class TextStream:
    """Concatenated tokenised documents, with the positions (breaks) where sentences can be inserted.

    Token t is a break if the token before it ends a sentence and t starts with a space and a letter, or the
    token before it ends a line and t starts with a letter: text inserted there does not change how the tokens
    around it are tokenised.

    Args:
        ids_T: all documents' ids in one array (a memory map will do).
        token_text: text of each vocabulary entry, by id.
        kind: text kind (book, code).
    """

    def __init__(self, ids_T: NDArray[np.integer], token_text: Sequence[str], kind: str) -> None:
        if len(ids_T) < 64:
            raise DataError(f"text of kind '{kind}' has {len(ids_T)} tokens; at least 64 are needed")
        self.ids_T, self.kind, self.token_text = ids_T, kind, token_text
        ends = np.array([text[-1:] in (".", "!", "?") for text in token_text])
        line = np.array([text[-1:] == "\n" for text in token_text])
        letter = np.array([text[:1].isalpha() for text in token_text])
        self.spaced_V = np.array([text[:1] == " " and text[1:2].isalpha() for text in token_text])
        found = [np.zeros(0, np.int64)]
        for low in range(0, len(ids_T) - 1, _BLOCK):
            part = np.asarray(ids_T[low : low + _BLOCK + 1])
            before, after = part[:-1], part[1:]
            breaks = (ends[before] & self.spaced_V[after]) | (line[before] & letter[after])
            found.append(low + 1 + np.flatnonzero(breaks))
        self.break_at = np.concatenate(found)

    def text(self, ids_T: NDArray[np.integer]) -> str:
        """Decode tokens to text, each separately."""
        return "".join(self.token_text[i] for i in ids_T.tolist())

    def cut(self, n: int, rng: np.random.Generator) -> tuple[Ids, NDArray[np.int64]]:
        """Return a slice of n tokens, from a break if possible, and the offsets of the breaks inside it."""
        total = len(self.ids_T)
        start = int(rng.integers(total))
        at = int(np.searchsorted(self.break_at, start))
        if at < len(self.break_at):
            start = int(self.break_at[at])
        start = max(0, min(start, total - n))
        piece = np.array(self.ids_T[start : start + n], dtype=np.int32)
        if len(piece) < n:
            piece = np.resize(piece, n)
        low, high = np.searchsorted(self.break_at, [start + 1, min(start + n, total)])
        return piece, self.break_at[low:high] - start


class DocumentBuilder:
    """Builds a document from runs of token ids, each with one role."""

    def __init__(self) -> None:
        self.runs: list[Ids] = []
        self.roles: list[int] = []
        self.n = 0

    def add(self, role: Role, *runs: Ids) -> None:
        """Append runs of one role."""
        for run in runs:
            self.runs.append(run)
            self.roles.append(int(role))
            self.n += len(run)

    def extend(self, other: DocumentBuilder) -> None:
        """Append the runs of another builder."""
        self.runs += other.runs
        self.roles += other.roles
        self.n += other.n

    def document(self, kind: str) -> RoleDocument:
        """Return the finished document."""
        ids_T = np.concatenate(self.runs)
        roles_T = np.repeat(np.array(self.roles, dtype=np.uint8), [len(run) for run in self.runs])
        return RoleDocument(ids_T, roles_T, kind)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    "able amber ancient angry austere azure bashful bitter blue bold brave brief bright bronze busy "
    "calm careful civil clean "
    "clever cold coral cosmic crimson cruel curly curved daily damp dark deep dense distant dry "
    "dusty eager early earnest "
    "elder empty exact faint fair famous fancy fertile fierce firm flat foreign fragile frank fresh "
    "frosty gentle giant "
    "glad golden grand grave green grim happy hard harsh hasty heavy hollow honest humble idle "
    "ivory jolly keen kind large "
    "late lavish lazy level light little lively lonely loud loyal lucky mellow merry mighty modest "
    "narrow neat nimble "
    "noble northern obscure odd old open orange pale patient plain polite proud purple quaint quick "
    "quiet rapid rare ready "
    "red rich rigid ripe robust rough round royal rural rusty sacred sandy scarlet secret serious "
    "sharp shiny short shy "
    "silent silver simple sleepy slow small smooth sober soft solemn solid southern spare square "
    "steady steep stern still "
    "strange strong sturdy subtle sunny sweet swift tall tame tender thick thin tidy timid tiny "
    "tough tranquil true upper "
    "urban vague vast velvet violet vivid warm weary western white whole wide wild windy wise "
    "wooden yellow young"
)

NOUNS = _words(
    "actor anchor angel apple arch arrow badge banner barn basin basket beacon bear beetle bell "
    "bench berry bird blade "
    "blanket boat bottle bowl branch bread bridge brook brush bucket button cabin cable camel "
    "candle canoe canyon carpet "
    "cart castle cave cedar chain chair chapel chest circle cliff clock cloud coat compass copper "
    "corner cottage cradle "
    "crown crystal curtain daisy desert desk diamond donkey door dragon drum eagle engine falcon "
    "farm feather fence ferry "
    "field finger flag flame flute forest fountain fox garden gate glass glove goose grain grape "
    "hammer harbor harp hat "
    "hawk hedge helmet hill horn horse house island jacket jewel kettle key kite kitten ladder lake "
    "lamp lantern leaf "
    "lemon letter lily lion lizard lock magnet maple market meadow mill mirror monkey moon mountain "
    "needle nest oak oar "
    "ocean orchard otter owl paddle palace panda paper parade path peach pearl pebble pencil pepper "
    "piano pigeon pillow "
    "pine planet plate plum pocket pond pony prairie quilt rabbit raven ribbon ring river road "
    "robin rocket roof rope rose "
    "saddle sail salmon school shadow shell shield ship shore silk slipper spider spoon spring "
    "squirrel stable star stone "
    "storm stove street summit swan table teapot temple tent thistle throne tiger timber tower "
    "train tree trumpet tulip "
    "turtle valley vase village violin wagon wall walnut wharf wheel whistle willow window wing "
    "wolf wood yard"
)

"""Suite `needle`: a value hidden at a given depth of held-out text, scored as in RULER."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from longtrain.data.retrieval.synthetic import RetrievalWriter, TextStream
from longtrain.data.retrieval.wording import Wording, wording_of
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.corpora import plain_ids
from longtrain.evaluation.prompts import Encoded, chat_ids, chat_note, uses_chat
from longtrain.evaluation.published import not_greedy
from longtrain.evaluation.scoring.ruler import clean, match_all
from longtrain.evaluation.suite import Metric, Suite
from longtrain.evaluation.suites.continuation import texts_of
from longtrain.evaluation.suites.shared import check_lengths, settings_of
from longtrain.evaluation.task import Example, Task
from longtrain.settings import Count, Counts, Lengths, within, wrong

if TYPE_CHECKING:
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

NUMBER = re.compile(r"\d+")
LISTED = re.compile(r"^\s*\d{1,2}[.)]\s+", re.MULTILINE)
"""Matches the number of an item in a numbered list, which is not a number of the answer."""
HIDDEN = "One of the special magic numbers for KEY is: VALUE."
"""The hidden sentence; `data/retrieval/wording.py` has the text around it."""

KEPT = 64
"""Number of prompts cached between encoding and scoring."""


@dataclass(frozen=True)
class NeedleSettings:
    """The keys of the suite; see conf/suite/needle.yaml."""

    lengths: Lengths
    depths: tuple[Annotated[int, within(0, 100)], ...]
    needles: Counts
    prompts: Count
    max_new_tokens: Count
    text: str | None = None
    kinds: tuple[str, ...] | None = ()
    chat: bool | None = None

    def __post_init__(self) -> None:
        if not self.depths or len(set(self.depths)) < len(self.depths):
            raise wrong("suite.depths", list(self.depths), "one or more different percentages")


@dataclass(frozen=True)
class NeedleTask(Task):
    """The prompts with a given number of needles: the value must occur in the answer, as in RULER."""

    def measures(self, text: str, example: Example) -> Mapping[str, float]:
        """`exact`: 1 if the answer contains the value and no other number."""
        return {"exact": float(numbers_in(text) == self.references(example))}


def numbers_in(text: str) -> list[str]:
    """The numbers of an answer in order, except those of list items."""
    return NUMBER.findall(LISTED.sub("", text))


def prompt_writer(target: Target, texts: Mapping[str, str], *, chat: bool | None = None) -> RetrievalWriter:
    """A writer of retrieval prompts for the target's tokenizer, vocabulary and chat format.

    Args:
        target: the target that reads the prompts.
        texts: name -> text to hide needles in.
        chat: use the chat template; None: if the tokenizer has one.

    Raises:
        ConfigError: the target has no tokenizer, or `chat` is True and it has no chat template.
        DataError: there is no text.
    """
    tokenizer = target.require_tokenizer()
    if not any(texts.values()):
        raise DataError(
            "there is no text to hide needles in; pass suite.text=FOLDER, or null: what ships here"
        )

    encode, wording = partial(plain_ids, tokenizer), wording_of(tokenizer)
    vocabulary = [str(tokenizer.decode([i])) for i in range(target.info.vocab_size)]
    ids_T = np.concatenate([np.array(encode(text), dtype=np.int64) for text in texts.values() if text])
    streams = [TextStream(ids_T, vocabulary, "held-out")]
    marks = chat_ids(tokenizer, chat=chat, without=wording.without_template)
    return RetrievalWriter(encode, marks, streams, separator=-1, wording=wording)


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """One task for each number of needles, over the grid of `suite.lengths` and `suite.depths`.

    The seed determines keys, values, positions and text.

    Raises:
        ConfigError: a wrong setting, or a length beyond the target's window or too short for its needles.
        DataError: there is no text to hide needles in.
    """
    asked = settings_of(NeedleSettings, settings)
    check_lengths(asked.lengths, asked.max_new_tokens, target)
    texts = texts_of(asked.text, asked.kinds or ())
    writer = prompt_writer(target, texts, chat=asked.chat)

    @lru_cache(maxsize=KEPT)
    def needle(length: int, needles: int, depth: int, index: int) -> tuple[Encoded, str]:
        rng = np.random.default_rng([seed, length, needles, depth, index])
        ids, value = writer.needle_prompt(length, needles, rng, depth=depth / 100)
        return Encoded(tuple(ids)), value

    def of(row: Example) -> tuple[Encoded, str]:
        return needle(*(row.fields[key] for key in ("length", "needles", "depth", "index")))

    tokenizer = target.require_tokenizer()
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in sorted(texts.items())}
    tasks = tuple(
        NeedleTask(
            f"needles_{count}",
            _rows(asked, count),
            _template(writer.wording),
            asked.max_new_tokens,
            "string_match_all",
            lambda text, row: match_all(clean(text), [of(row)[1]]),
            chat=uses_chat(tokenizer, asked.chat),
            protocol={"seed": seed, "texts": digests},
            written=lambda row: of(row)[0],
            facets_of=lambda row: {key: int(row.fields[key]) for key in ("length", "depth")},
            expected=lambda row: [of(row)[1]],
        )
        for count in asked.needles
    )
    shortest = asked.lengths[0]
    for row in (row for task in tasks for row in task.rows if row.fields["length"] == shortest):
        try:
            of(row)  # refuse lengths that cannot hold the needles before anything runs
        except ConfigError as error:
            raise ConfigError(
                f"suite.lengths holds {shortest} and suite.needles {row.fields['needles']}: {error}"
            ) from None
    return Suite(
        "needle",
        tasks,
        title="Needle grid",
        notes=[*not_greedy(sampling), chat_note(tokenizer, asked.chat), writer.wording.about],
        metrics=(
            Metric("share of full", "score", kind="quotient", unit="percent", plotted=True),
            Metric("that number and no other", "exact", kind="wilson", unit="percent"),
        ),
        solvable=True,
    )


def _template(wording: Wording) -> str:
    """The wording of a prompt, for readers."""
    words = wording.hidden(single=wording.singular == 1)
    intro, ask, answer = (text.format(key=" KEY").strip("\n") for text in vars(words).values())
    begun = f" ...{answer}" if wording.always_begun else ""
    return f"{intro} ... {HIDDEN} ... {ask}{begun}"


def _rows(asked: NeedleSettings, needles: int) -> tuple[Example, ...]:
    return tuple(
        Example(
            f"{length}-{depth}-{index}",
            {"length": length, "depth": depth, "needles": needles, "index": index},
        )
        for length in asked.lengths
        for depth in asked.depths
        for index in range(asked.prompts)
    )

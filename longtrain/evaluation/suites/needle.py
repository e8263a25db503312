"""Needle grids as a suite: a seven-digit value hidden at a stated depth of held-out text, exact match."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from longtrain.data.retrieval.synthetic import RetrievalWriter, TextStream
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.corpora import plain_ids
from longtrain.evaluation.prompts import Encoded, chat_ids
from longtrain.evaluation.suite import ByTask, Suite, Summary, mean_summary
from longtrain.evaluation.suites.continuation import texts_of
from longtrain.evaluation.suites.shared import check_lengths, not_greedy, settings_of
from longtrain.evaluation.task import Example, Facet, WrittenTask
from longtrain.settings import Count, Counts, Lengths, within, wrong

if TYPE_CHECKING:
    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target

TITLE = "Needle grid"
NUMBER = re.compile(r"\d+")
WORDING = (
    "Some special magic numbers are hidden within the following text. ... One of the special magic numbers "
    "for KEY is: VALUE. ... What are all the special magic numbers for KEY mentioned in the provided text?"
)
"""What a prompt says, for readers; `data/retrieval/phrases.py` writes it."""

KEPT = 64
"""Prompts kept in memory between encoding and scoring."""

Write = Callable[[int, int, int, int], tuple[tuple[int, ...], str]]
"""Writes a prompt from its length, count of needles, depth and number: its tokens and the value expected."""


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

    def __post_init__(self) -> None:
        if not self.depths or len(set(self.depths)) < len(self.depths):
            raise wrong("suite.depths", list(self.depths), "one or more different percentages")


def prompt_writer(target: Target, texts: Mapping[str, str]) -> RetrievalWriter:
    """A writer of retrieval prompts into texts, in the target's own tokens and chat format.

    Raises:
        ConfigError: the target has no tokenizer.
        DataError: no text.
    """
    tokenizer = target.require_tokenizer()
    if not any(texts.values()):
        raise DataError(
            "there is no text to hide needles in; pass suite.text=FOLDER, or null: what ships here"
        )

    encode = partial(plain_ids, tokenizer)
    vocabulary = [str(tokenizer.decode([i])) for i in range(target.info.vocab_size)]
    ids_T = np.concatenate([np.array(encode(text), dtype=np.int64) for text in texts.values() if text])
    streams = [TextStream(ids_T, vocabulary, "held-out")]
    return RetrievalWriter(encode, chat_ids(tokenizer), streams, separator=-1)


@dataclass(frozen=True, eq=False)
class NeedleTask(WrittenTask):
    """Some needles in one prompt, one of them asked for: rows hold the place in the grid."""

    write: Write = field(kw_only=True)

    def needle(self, example: Example) -> tuple[tuple[int, ...], str]:
        """Token ids and the value expected."""
        fields = example.fields
        return self.write(fields["length"], fields["needles"], fields["depth"], fields["index"])

    def written(self, example: Example) -> Encoded:
        """Exactly as many tokens as the length says, chat marks included."""
        return Encoded(self.needle(example)[0])

    def facets(self, example: Example) -> dict[str, Facet]:
        """Length, and depth in percent of the text."""
        return {key: int(example.fields[key]) for key in ("length", "depth")}

    def references(self, example: Example) -> list[str]:
        """The value."""
        return [self.needle(example)[1]]

    def score(self, text: str, example: Example) -> float:
        """1 if the numbers in the answer are exactly the value asked for, else 0."""
        return float(NUMBER.findall(text) == [self.needle(example)[1]])


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """A task for every count of needles, each over the grid of `suite.lengths` and `suite.depths`.

    Args:
        settings: `lengths`, `depths`, `needles`, `prompts`, `max_new_tokens`, `text`, `kinds`; see
            conf/suite/needle.yaml.
        target: its tokenizer and chat template write the prompts.
        seed: of keys, values, places and text.
        sampling: how the run decodes.

    Raises:
        ConfigError: a wrong setting, a length beyond the target's window or too short for its needles.
        DataError: no text to hide needles in.
    """
    asked = settings_of(NeedleSettings, settings)
    lengths, most = asked.lengths, asked.max_new_tokens
    check_lengths(lengths, most, target)
    texts = texts_of(asked.text, asked.kinds or ())
    writer = prompt_writer(target, texts)

    @lru_cache(maxsize=KEPT)
    def write(length: int, needles: int, depth: int, index: int) -> tuple[tuple[int, ...], str]:
        rng = np.random.default_rng([seed, length, needles, depth, index])
        ids, value = writer.needle_prompt(length, needles, rng, depth=depth / 100)
        return tuple(ids), value

    protocol = {
        "seed": seed,
        "texts": {
            name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in sorted(texts.items())
        },
    }
    tasks = tuple(
        NeedleTask(
            f"needles_{count}",
            _rows(lengths, asked.depths, count, asked.prompts),
            WORDING,
            most,
            "exact_number",
            None,
            chat=bool(target.tokenizer and target.tokenizer.chat_template),
            protocol=protocol,
            write=write,
        )
        for count in asked.needles
    )
    _check(tasks, lengths[0])
    notes = not_greedy(sampling)
    if not tasks[0].chat:
        notes.append("without chat template: the tokenizer has none")

    def summarise(records: ByTask) -> Summary:
        return mean_summary(TITLE, records, notes=notes)

    return Suite("needle", tasks, summarise=summarise)


def _rows(lengths: Sequence[int], depths: Sequence[int], needles: int, prompts: int) -> tuple[Example, ...]:
    return tuple(
        Example(
            f"{length}-{depth}-{index}",
            {"length": length, "depth": depth, "needles": needles, "index": index},
        )
        for length in lengths
        for depth in depths
        for index in range(prompts)
    )


def _check(tasks: Sequence[NeedleTask], shortest: int) -> None:
    """Refuse a length that cannot hold the needles before anything runs."""
    for task in tasks:
        for row in task.rows:
            if row.fields["length"] == shortest:
                try:
                    task.written(row)
                except ConfigError as error:
                    raise ConfigError(
                        f"suite.lengths holds {shortest} and suite.needles {row.fields['needles']}: {error}"
                    ) from None

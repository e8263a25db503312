"""Needle grids as a suite: a seven-digit value hidden at a stated depth of held-out text, exact match."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from longtrain.assets import asset_dir
from longtrain.data.retrieval.synthetic import RetrievalWriter, TextStream
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.contexts import read_texts
from longtrain.evaluation.prompts import Encoded, chat_ids
from longtrain.evaluation.suite import ByTask, Suite, Summary, mean_summary
from longtrain.evaluation.suites.continuation import HELD_OUT
from longtrain.evaluation.suites.shared import not_greedy, settings_of
from longtrain.evaluation.task import Example, Facet, Task
from longtrain.settings import Count, Counts, Lengths, within, wrong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, verbose=False)

    vocabulary = [str(tokenizer.decode([i])) for i in range(target.info.vocab_size)]
    ids_T = np.concatenate([np.array(encode(text), dtype=np.int64) for text in texts.values() if text])
    streams = [TextStream(ids_T, vocabulary, "held-out")]
    return RetrievalWriter(encode, chat_ids(tokenizer), streams, separator=-1)


class Writer:
    """Writes a prompt from its place in the grid; the last ones are kept."""

    def __init__(self, writer: RetrievalWriter, seed: int) -> None:
        self.writer, self.seed = writer, seed
        self.prompt = lru_cache(maxsize=KEPT)(self._prompt)

    def _prompt(self, length: int, needles: int, depth: int, index: int) -> tuple[tuple[int, ...], str]:
        rng = np.random.default_rng([self.seed, length, needles, depth, index])
        ids, value = self.writer.needle_prompt(length, needles, rng, depth=depth / 100)
        return tuple(ids), value


@dataclass(frozen=True, eq=False)
class NeedleTask(Task):
    """Some needles in one prompt, one of them asked for: rows hold the place in the grid."""

    writer: Writer = field(kw_only=True)

    def written(self, example: Example) -> tuple[tuple[int, ...], str]:
        """Token ids and the value expected."""
        fields = example.fields
        return self.writer.prompt(fields["length"], fields["needles"], fields["depth"], fields["index"])

    def prompt(self, example: Example) -> str:
        """Prompts are written in tokens; see `encode`."""
        raise NotImplementedError("needle prompts are tokens from the start; use encode")

    def size(self, example: Example) -> int:
        """The length."""
        return int(example.fields["length"])

    def encode(
        self,
        example: Example,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int,
        answers: Sequence[str] = (),
    ) -> Encoded:
        """Exactly as many tokens as the length says, chat marks included."""
        return Encoded(self.written(example)[0])

    def facets(self, example: Example) -> dict[str, Facet]:
        """Length, and depth in percent of the text."""
        return {key: int(example.fields[key]) for key in ("length", "depth")}

    def references(self, example: Example) -> list[str]:
        """The value."""
        return [self.written(example)[1]]

    def score(self, text: str, example: Example) -> float:
        """1 if the numbers in the answer are exactly the value asked for, else 0."""
        return float(NUMBER.findall(text) == [self.written(example)[1]])


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
    if lengths[-1] + most > target.info.max_positions:
        raise ConfigError(
            f"suite.lengths={list(lengths)} with answers of {most} tokens; allowed: together up to "
            f"{target.info.max_positions}, the tokens that target {target.info.name} reads"
        )
    where = asked.text or asset_dir("bundled") / HELD_OUT
    texts = {name: text for name, _, text in read_texts(where, kinds=asked.kinds or (), prose="book")}
    writer = Writer(prompt_writer(target, texts), seed)
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
            writer=writer,
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

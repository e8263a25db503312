"""QuantSpec's corpora as suites: documents that fill a prompt of a stated length, to continue or summarise.

Shapes: T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation import corpora
from longtrain.evaluation.corpora import plain_ids, prefix_of
from longtrain.evaluation.prompts import Encoded, around_message
from longtrain.evaluation.suite import ByTask, Suite, Summary
from longtrain.evaluation.suites.shared import (
    ACCEPTANCE_SCALE,
    acceptance_summary,
    check_lengths,
    not_greedy,
    settings_of,
)
from longtrain.evaluation.task import Example, WrittenTask
from longtrain.settings import Count, CountOrZero, Lengths, Text, one_of, wrong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from longtrain.decoding.sampling import Sampling
    from longtrain.targets.model import Target


@dataclass(frozen=True)
class Corpus:
    """What is asked of the documents of a corpus.

    Args:
        title: of results.
        like: the corpus of `data_prep` that is measured; a local file's rows have its columns.
        lengths: of prompts, as QuantSpec measures.
        skip: tokens left out at the beginning of a document.
        head: stands before a document, which is cut where the prompt is full.
        tail: stands after it.
    """

    title: str
    like: str
    lengths: tuple[int, ...]
    skip: int = 0
    head: str = ""
    tail: str = ""


PROMPTS, NEW_TOKENS = 11, 90
"""Prompts of each length, and tokens of an answer. Source: QuantSpec Section 5.1 and its code."""

CORPORA = {
    "pg19": Corpus("Acceptance on PG-19", "pg19_test", (4096, 8192), 8000),
    "infbench_sum": Corpus(
        "Acceptance on InfiniteBench's summaries",
        "infbench_sum",
        (16384, 32768),
        0,
        "You are given a book and you are tasked to summarize it. Write a summary of about 1000 to 1200 "
        "words. Only write about the plot and characters of the story. Do not discuss the themes or "
        "background of the book. Do not provide any analysis or commentary.\n\n",
        "\n\nNow summarize the book. Summary:",
    ),
    "multi_lexsum": Corpus(
        "Acceptance on Multi-LexSum",
        "multi_lexsum",
        (8192, 32768, 65536, 131072),
        0,
        "You are given the legal documents in a civil rights lawsuit, and you are tasked to summarize the "
        "case. Write a concise summary of one paragraph (200 to 250 words). The summary should contain a "
        "short description of the background, the parties involved, and the outcomes of the case.\n\n"
        "Legal documents:\n",
        "\n\nNow please summarize the case. Summary:",
    ),
}
"""`suite.name` -> corpus.

Source: prompts of HELMET (Yen et al. 2024), as QuantSpec's code shortens them (Data/data_converter.py).
"""


@dataclass(frozen=True)
class DocumentSettings:
    """The keys of the three suites; see conf/suite/pg19.yaml."""

    name: one_of(CORPORA)  # type: ignore[valid-type]
    data: Text
    lengths: Lengths
    prompts: Count
    skip_tokens: CountOrZero
    max_new_tokens: Count
    ignore_eos: bool
    chat: bool

    def __post_init__(self) -> None:
        if self.max_new_tokens < 2:
            raise wrong("suite.max_new_tokens", self.max_new_tokens, "2 or more")


@dataclass(frozen=True)
class Documents(WrittenTask):
    """Prompts of exactly stated lengths. Answers are not scored.

    Args:
        ids: example -> its prompt.
    """

    ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    def written(self, example: Example) -> Encoded:
        """What stands before the document, its beginning, and what stands after it."""
        return Encoded(self.ids[example.id])

    def facets(self, example: Example) -> dict[str, int | float | str]:
        """Prompt length."""
        return {"length": int(example.fields["length"])}

    def score(self, text: str, example: Example) -> float | None:
        """Gives no score: answers are cut short, what matters is how they are drafted."""
        return None


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """One task: the first documents that fill each length.

    Args:
        settings: see conf/suite/pg19.yaml.
        target: gives the tokenizer and its window.
        seed: of the run; nothing is drawn here.
        sampling: how the run decodes.

    Raises:
        ConfigError: a wrong setting, or a length that the target does not hold.
        DataError: the text cannot be read, or no document fills a length.
    """
    options = settings_of(DocumentSettings, settings)
    name, corpus, tokenizer = options.name, CORPORA[options.name], target.require_tokenizer()
    lengths, answer = options.lengths, options.max_new_tokens
    check_lengths(lengths, answer, target)
    wanted, skip = options.prompts, options.skip_tokens
    head, tail, prefix = _around(corpus, tokenizer, chat=options.chat)
    ids: dict[str, tuple[int, ...]] = {}
    rows: dict[int, list[Example]] = {length: [] for length in lengths}
    longest = 0
    for title, text in corpora.texts(options.data, like=corpus.like):
        if all(len(some) == wanted for some in rows.values()):
            break
        body = _body(tokenizer, head, text, skip)
        longest = max(longest, len(prefix) + len(body) + len(tail))
        for length, some in rows.items():
            room = length - len(prefix) - len(tail)
            if room < 1 or len(body) < room or len(some) == wanted:
                continue
            prompt = (*prefix, *body[:room], *tail)
            digest = hashlib.sha256(" ".join(map(str, prompt)).encode()).hexdigest()
            row = Example(
                f"{len(some) + 1}@{length}", {"document": title, "length": length, "sha256": digest}
            )
            some.append(row)
            ids[row.id] = prompt
    for length, some in rows.items():
        if not some:
            raise DataError(
                f"no document at {options.data} fills a prompt of {length} tokens (the longest gives "
                f"{longest}); pass shorter suite.lengths or longer text"
            )
    task = Documents(
        name,
        tuple(row for some in rows.values() for row in some),
        corpus.head + "{document}" + corpus.tail,
        answer,
        "acceptance",
        None,
        chat=options.chat,
        ignore_eos=options.ignore_eos,
        protocol={"lengths": list(lengths), "skip_tokens": skip},
        ids=ids,
    )
    notes = [
        f"{answer} new tokens"
        + (", the end of text ignored" if task.ignore_eos else " or fewer where the text ends"),
        *(
            f"{len(some)} of {wanted} prompts at {length} tokens"
            for length, some in rows.items()
            if len(some) < wanted
        ),
    ]
    notes += not_greedy(sampling)
    departures = []
    if options.data != corpus.like or Path(corpus.like).exists():
        departures.append(f"documents of a copy or of another text, not read as the corpus {corpus.like}")
    if others := [length for length in lengths if length not in corpus.lengths]:
        departures.append(f"prompts of {', '.join(map(str, others))} tokens (QuantSpec: {_listed(corpus)})")
    for what, value, own in (
        ("prompts of each length", wanted, PROMPTS),
        ("tokens skipped at the beginning", skip, corpus.skip),
        ("new tokens", answer, NEW_TOKENS),
    ):
        if value != own:
            departures.append(f"{what}: {value} instead of {own}")
    if not task.ignore_eos:
        departures.append("answers end where the text does")
    if options.chat:
        departures.append("in the target's chat template (QuantSpec has none)")
    title = f"Variant of {corpus.title}" if departures else corpus.title

    def summarise(records: ByTask) -> Summary:
        return acceptance_summary(title, records, [*notes, *departures])

    return Suite(name, (task,), scale=ACCEPTANCE_SCALE, summarise=summarise)


def _listed(corpus: Corpus) -> str:
    return ", ".join(map(str, corpus.lengths))


def _body(tokenizer: PreTrainedTokenizerBase, head: str, text: str, skip: int) -> list[int]:
    """Tokens of the head and of the text from its token `skip` on."""
    if not skip:
        return plain_ids(tokenizer, head + text)
    return [*plain_ids(tokenizer, head), *plain_ids(tokenizer, text)[skip:]]


def _around(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, *, chat: bool
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Text before a document, tokens after it, and special tokens before everything."""
    before, after, prefix = "", "", tuple(prefix_of(tokenizer))
    if chat:
        if not tokenizer.chat_template:
            raise ConfigError(
                "suite.chat=true and the tokenizer has no chat template; set target.chat_template, or "
                "suite.chat=false"
            )
        before, after = around_message(tokenizer, enable_thinking=False)
        prefix = ()
    return before + corpus.head, tuple(plain_ids(tokenizer, corpus.tail + after)), prefix

"""QuantSpec's corpora as suites: documents that fill a prompt of a stated length, to continue or summarise.

Shapes: T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError, DataError
from longtrain.evaluation import corpora
from longtrain.evaluation.corpora import plain_ids, prefix_of
from longtrain.evaluation.prompts import around_message
from longtrain.evaluation.published import Published, not_greedy
from longtrain.evaluation.suite import Suite
from longtrain.evaluation.suites.drafted import (
    ACCEPTANCE_SCALE,
    acceptance_summary,
    drafted,
    ended,
    tell_of_drafts,
)
from longtrain.evaluation.suites.shared import check_lengths, settings_of
from longtrain.evaluation.task import Example
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

    @property
    def published(self) -> Published:
        """What QuantSpec measures. Source: QuantSpec Section 5.1 and its code."""
        return Published(
            self.title,
            lengths=self.lengths,
            settings={
                "data": self.like,
                "prompts": 11,
                "skip_tokens": self.skip,
                "max_new_tokens": 90,
                "ignore_eos": True,
                "chat": False,
            },
            sampled=lambda sampling: (),
        )


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


def build(settings: Mapping[str, Any], target: Target, *, seed: int, sampling: Sampling) -> Suite:
    """One task: the first documents that fill each length.

    Raises:
        ConfigError: a wrong setting, or a length that the target does not hold.
        DataError: the text cannot be read, or no document fills a length.
    """
    options = settings_of(DocumentSettings, settings)
    corpus, answer = CORPORA[options.name], options.max_new_tokens
    check_lengths(options.lengths, answer, target)
    prompts = _prompts(options, corpus, target.require_tokenizer())
    task = drafted(
        options.name,
        prompts,
        max_new_tokens=answer,
        ignore_eos=options.ignore_eos,
        facets_of=lambda row: {"length": int(row.fields["length"])},
        protocol={"lengths": list(options.lengths), "skip_tokens": options.skip_tokens},
        template=corpus.head + "{document}" + corpus.tail,
        chat=options.chat,
    )
    notes = [f"{answer} new tokens{ended(options.ignore_eos)}", *not_greedy(sampling)]
    for length in options.lengths:
        found = sum(row.fields["length"] == length for row in task.rows)
        if found < options.prompts:
            notes.append(f"{found} of {options.prompts} prompts at {length} tokens")
    departures = corpus.published.departures({}, vars(options), sampling)
    if options.data == corpus.like and Path(corpus.like).exists():
        departures.append(f"documents of another text, not read as the corpus {corpus.like}")
    return Suite(
        options.name,
        (task,),
        scale=ACCEPTANCE_SCALE,
        summarise=acceptance_summary,
        title=corpus.published.title,
        departures=departures,
        notes=notes,
        meet=tell_of_drafts,
    )


def _prompts(
    options: DocumentSettings, corpus: Corpus, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[Example, tuple[int, ...]]]:
    """Rows with their prompts: of each length the first documents that fill it."""
    head, tail, prefix = _around(corpus, tokenizer, chat=options.chat)
    found: dict[int, list[tuple[Example, tuple[int, ...]]]] = {length: [] for length in options.lengths}
    longest = 0
    for title, text in corpora.texts(options.data, like=corpus.like):
        if all(len(some) == options.prompts for some in found.values()):
            break
        body = _body(tokenizer, head, text, options.skip_tokens)
        longest = max(longest, len(prefix) + len(body) + len(tail))
        for length, some in found.items():
            room = length - len(prefix) - len(tail)
            if room < 1 or len(body) < room or len(some) == options.prompts:
                continue
            prompt = (*prefix, *body[:room], *tail)
            digest = hashlib.sha256(" ".join(map(str, prompt)).encode()).hexdigest()
            fields = {"document": title, "length": length, "sha256": digest}
            some.append((Example(f"{len(some) + 1}@{length}", fields), prompt))
    for length, some in found.items():
        if not some:
            raise DataError(
                f"no document at {options.data} fills a prompt of {length} tokens (the longest gives "
                f"{longest}); pass shorter suite.lengths or longer text"
            )
    return [one for some in found.values() for one in some]


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

"""QuantSpec's corpora as tasks of `suite=speculation`: documents cut to a given prompt length.

Shapes: T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from longtrain.errors import DataError
from longtrain.evaluation import corpora
from longtrain.evaluation.corpora import plain_ids, prefix_of
from longtrain.evaluation.published import Published
from longtrain.evaluation.suites.drafted import drafted, ended
from longtrain.evaluation.suites.shared import check_lengths
from longtrain.evaluation.task import Example, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from longtrain.decoding.sampling import Sampling
    from longtrain.evaluation.suites.speculation import SpeculationSettings
    from longtrain.targets.model import Target


@dataclass(frozen=True)
class Corpus:
    """A corpus of long documents, and the instruction around each of them.

    Args:
        title: title of the results.
        like: the corpus of `data_prep`; lines of a local file have the same columns.
        lengths: prompt lengths that QuantSpec measures.
        skip: tokens skipped at the beginning of a document.
        head: text before a document, which is cut at the prompt's length.
        tail: text after the document.
    """

    title: str
    like: str
    lengths: tuple[int, ...]
    skip: int = 0
    head: str = ""
    tail: str = ""


TITLE = "Acceptance on long documents"
PROMPTS = 11
"""Documents of each length if `suite.limit` is not set."""
PUBLISHED = Published(
    TITLE,
    settings={"documents": None, "limit": None, "documents_max_new_tokens": 90, "ignore_eos": True},
    sampled=lambda sampling: (),
)
"""QuantSpec's measurement settings, without a chat template. Source: QuantSpec Section 5.1 and its code."""
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
"""Name of a task -> corpus.

Source: prompts of HELMET (Yen et al. 2024), as QuantSpec's code shortens them (Data/data_converter.py).
"""


def task_of(name: str, options: SpeculationSettings, target: Target) -> tuple[Task, list[str]]:
    """The first documents of a corpus that are long enough for each length, and notes on them.

    Args:
        name: a key of `CORPORA`.
        options: settings of the suite. Without `lengths`, QuantSpec's lengths within the target's window are
            used.
        target: its tokenizer encodes the prompts, which must fit its context window.

    Raises:
        ConfigError: a length beyond the target's context window.
        DataError: the text cannot be read, or no document is long enough.
    """
    corpus, answer = CORPORA[name], options.documents_max_new_tokens
    room = target.info.max_positions - answer
    lengths = options.lengths or tuple(n for n in corpus.lengths if n <= room) or corpus.lengths[:1]
    check_lengths(lengths, answer, target)
    count = PROMPTS if options.limit is None else options.limit
    prompts = _prompts(
        corpus, options.documents or corpus.like, target.require_tokenizer(), lengths=lengths, count=count
    )
    task = drafted(
        name,
        prompts,
        max_new_tokens=answer,
        ignore_eos=options.ignore_eos,
        facets_of=lambda row: {"length": int(row.fields["length"])},
        protocol={"lengths": list(lengths), "skip_tokens": corpus.skip},
        template=corpus.head + "{document}" + corpus.tail,
    )
    notes = [f"documents with answers of {answer} tokens{ended(options.ignore_eos)}"]
    for length in lengths:
        found = sum(row.fields["length"] == length for row in task.rows)
        if found < count:
            notes.append(f"{found} of {count} prompts of {name} at {length} tokens")
    return task, notes


def departures_of(name: str, options: SpeculationSettings, sampling: Sampling) -> list[str]:
    """Departures of a run from QuantSpec's settings."""
    corpus = CORPORA[name]
    asked = vars(options) | {"lengths": options.lengths or corpus.lengths}
    found = replace(PUBLISHED, lengths=corpus.lengths).departures({}, asked, sampling)
    if options.documents is None and Path(corpus.like).exists():
        found.append(f"documents of another text, not read as the corpus {corpus.like}")
    return found


def _prompts(
    corpus: Corpus, where: str, tokenizer: PreTrainedTokenizerBase, *, lengths: Sequence[int], count: int
) -> list[tuple[Example, tuple[int, ...]]]:
    """Examples with their prompts: for each length the first documents that are long enough."""
    prefix, tail = tuple(prefix_of(tokenizer)), tuple(plain_ids(tokenizer, corpus.tail))
    found: dict[int, list[tuple[Example, tuple[int, ...]]]] = {length: [] for length in lengths}
    longest = 0
    for title, text in corpora.texts(where, like=corpus.like):
        if all(len(some) == count for some in found.values()):
            break
        body = _body(tokenizer, corpus.head, text, corpus.skip)
        longest = max(longest, len(prefix) + len(body) + len(tail))
        for length, some in found.items():
            room = length - len(prefix) - len(tail)
            if room < 1 or len(body) < room or len(some) == count:
                continue
            prompt = (*prefix, *body[:room], *tail)
            digest = hashlib.sha256(" ".join(map(str, prompt)).encode()).hexdigest()
            fields = {"document": title, "length": length, "sha256": digest}
            some.append((Example(f"{len(some) + 1}@{length}", fields), prompt))
    for length, some in found.items():
        if not some:
            raise DataError(
                f"no document at {where} fills a prompt of {length} tokens (the longest gives "
                f"{longest}); pass shorter suite.lengths or longer text"
            )
    return [one for some in found.values() for one in some]


def _body(tokenizer: PreTrainedTokenizerBase, head: str, text: str, skip: int) -> list[int]:
    """Tokens of the head, then of the text from its token `skip` on."""
    if not skip:
        return plain_ids(tokenizer, head + text)
    return [*plain_ids(tokenizer, head), *plain_ids(tokenizer, text)[skip:]]

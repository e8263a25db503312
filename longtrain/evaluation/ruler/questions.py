"""Questions over documents, SQuAD 2.0 and HotpotQA (distractor), mixed with documents of other questions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from longtrain.errors import DataError
from longtrain.files import read_json


@dataclass(frozen=True)
class RulerQuestion:
    """A question with its answers and documents (indices into `Questions.documents`).

    Args:
        query: the question.
        answers: the accepted answers.
        own: documents that contain the answer.
        near: documents of the same article, used as distractors before others.
    """

    query: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    """Questions in their file's order, and the distinct documents of all of them, sorted."""

    name: str
    documents: tuple[str, ...]
    items: tuple[RulerQuestion, ...]

    @cached_property
    def digest(self) -> str:
        """A hash of all questions and documents, for protocols."""
        rows = [self.documents, [[q.query, q.answers, q.own, q.near] for q in self.items]]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


Row = tuple[str, list[str], list[str], list[str]]
"""A question's text, its answers, its own documents, and documents of the same article."""
Parsed = tuple[list[str], list[Row]]
"""All documents of a file, and its questions."""


def squad(data: Any) -> Parsed:
    """SQuAD 2.0 in its own format (dev-v2.0.json); questions that cannot be answered are left out."""
    documents, found = list[str](), list[Row]()
    for article in data["data"]:
        paragraphs = [_string(paragraph["context"]) for paragraph in article["paragraphs"]]
        documents += paragraphs
        for paragraph, context in zip(article["paragraphs"], paragraphs, strict=True):
            near = [other for other in paragraphs if other != context]
            for row in paragraph["qas"]:
                if not row["is_impossible"]:
                    texts = [_string(answer["text"]) for answer in row["answers"]]
                    found.append((_string(row["question"]), texts, [context], near))
    return documents, found


def hotpotqa(data: Any) -> Parsed:
    """HotpotQA in its own format (hotpot_dev_distractor_v1.json): a question has up to ten documents."""
    documents, found = list[str](), list[Row]()
    for row in data:
        own = [f"{_string(title)}\n{''.join(sentences)}" for title, sentences in row["context"]]
        documents += own
        found.append((_string(row["question"]), [_string(row["answer"])], own, list[str]()))
    return documents, found


def squad_rows(rows: Iterable[Mapping[str, Any]]) -> Parsed:
    """SQuAD 2.0 as the Hub has it: one question each, with its article's title."""
    rows, articles = list(rows), dict[str, dict[str, None]]()
    for row in rows:
        articles.setdefault(row["title"], {})[row["context"]] = None
    found = list[Row]()
    for row in rows:
        near = [other for other in articles[row["title"]] if other != row["context"]]
        if texts := list(row["answers"]["text"]):
            found.append((row["question"], texts, [row["context"]], near))
    return [document for documents in articles.values() for document in documents], found


def hotpotqa_rows(rows: Iterable[Mapping[str, Any]]) -> Parsed:
    """HotpotQA as the Hub has it: columns of titles and of sentences."""
    return hotpotqa(
        {**row, "context": list(zip(row["context"]["title"], row["context"]["sentences"], strict=True))}
        for row in rows
    )


@dataclass(frozen=True)
class Dataset:
    """A data set of questions: its format, its parser and its source.

    Args:
        title: the name of the data set.
        layout: description of the file format, for messages.
        parse: the parser of a file's content into documents and questions.
        parse_rows: the parser of the examples of the data set on the Hub.
        url: the address of the file.
        hub: the data set on the Hub with its configuration; its split is `validation`.
    """

    title: str
    layout: str
    parse: Callable[[Any], Parsed]
    parse_rows: Callable[[Iterable[Mapping[str, Any]]], Parsed]
    url: str
    hub: tuple[str, str]

    def read(self, path: str | Path) -> Questions:
        """Read the questions of a local file.

        Raises:
            DataError: the file cannot be read or has another format.
        """
        file = Path(path).expanduser()
        try:
            data = read_json(file)
        except (OSError, ValueError) as error:
            raise DataError(f"question file {file} cannot be read as JSON: {error}") from None
        return self._questions(self.parse, data, file)

    def of_rows(self, rows: Iterable[Mapping[str, Any]], name: str) -> Questions:
        """Parse the questions of examples from the Hub; `name` is used in messages."""
        return self._questions(self.parse_rows, rows, name)

    def _questions(self, parse: Callable[[Any], Parsed], data: Any, file: str | Path) -> Questions:
        try:
            all_documents, found = parse(data)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            reason = f"no key {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(
                f"question file {file} is not in {self.title}'s format ({reason}); expected: {self.layout}"
            ) from None
        if not found:
            raise DataError(
                f"question file {file} has no question with an answer; expected {self.title}: {self.layout}"
            )
        documents = sorted(set(all_documents))
        place = {document: i for i, document in enumerate(documents)}
        items = []
        for query, answers, own, near in found:
            if not answers or not own:
                raise DataError(
                    f"question file {file}: question '{query[:60]}' has {len(answers)} answers and "
                    f"{len(own)} documents; it needs at least one of each"
                )
            places = (tuple(place[document] for document in some) for some in (own, near))
            items.append(RulerQuestion(query, tuple(answers), *places))
        return Questions(Path(file).name, tuple(documents), tuple(items))


DATASETS = {
    "squad": Dataset(
        "SQuAD 2.0",
        "data[].paragraphs[].{context, qas[].{question, is_impossible, answers[].text}}",
        squad,
        squad_rows,
        "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",
        ("rajpurkar/squad_v2", "squad_v2"),
    ),
    "hotpotqa": Dataset(
        "HotpotQA",
        "[].{question, answer, context[].[title, [sentence]]}",
        hotpotqa,
        hotpotqa_rows,
        "http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json",
        ("hotpotqa/hotpot_qa", "distractor"),
    ),
}


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is {type(value).__name__} where a string is expected")
    return value

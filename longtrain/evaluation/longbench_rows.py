"""Reads LongBench's examples from a local folder, a zip file or the Hub, and checks if they are the published
ones.

The data set's own loader is not used: it is a script that needs the Hub, and scores must match to the digit.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longtrain.assets import asset_dir
from longtrain.data.read.files import PACKED_SUFFIXES, local_file, read_jsonl
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.suites.shared import check_fields, distinct, on_hub
from longtrain.evaluation.task import Example

HUB = "THUDM/LongBench"
PUBLISHED = (HUB, "zai-org/LongBench")
"""The authors' data set on the Hub, under its first and its present name."""
ARCHIVE = "data.zip"
"""The file of the Hub's data set that holds `data/TASK.jsonl` of every task."""

DATA = json.loads((asset_dir("bundled") / "benchmarks" / "longbench.json").read_text(encoding="utf-8"))
TEMPLATES: dict[str, str] = DATA["templates"]
"""Task -> prompt, unchanged from the official file, in the order of the paper's tables."""
WORDS_OFF = 0.05
"""Tolerance of a copy's mean number of words relative to the published ones, which are rounded."""

FIELDS: dict[str, tuple[type, ...]] = {
    "input": (str,),
    "context": (str,),
    "answers": (list,),
    "length": (int,),
    "dataset": (str,),
    "language": (str,),
    "all_classes": (list, type(None)),
    "_id": (str,),
}
"""Field of a published example -> its allowed types."""
OWN_FIELDS = {field: FIELDS[field] for field in ("input", "context", "answers")}
"""Fields that users' own examples must have; the others are derived from these and from the file's name."""

CODE = ("lcc", "repobench-p")
"""Tasks whose field `language` is a programming language; in the other tasks it is `en`."""

_PUBLISHED_ID = re.compile(r"[0-9a-f]{48}")


def read_tasks(where: str, names: tuple[str, ...]) -> dict[str, tuple[Example, ...]]:
    """Read the examples of each task, in the order of its file.

    Args:
        where: a folder with `TASK.jsonl` files (plain, .xz or .gz; also in a folder `data` in it), a zip file
            of one, or a data set on the Hub, e.g. `HUB`. A path that exists on disk takes precedence.
        names: task names.

    Raises:
        ConfigError: `where` is none of these.
        DataError: a task's file is missing or empty, an example lacks a field, has one of another type or
            belongs to another task (file and line are named), or the Hub does not answer.
    """
    path, whole = Path(where).expanduser(), published(where)
    if path.is_dir():
        return {name: read_rows(_file(path, name), name) for name in names}
    if on_hub(where):
        try:
            path = local_file(f"hub:{where}/{ARCHIVE}")
        except DataError as error:
            raise DataError(
                f"{error}: suite.data=PATH, the folder or zip file that `hf download {where} {ARCHIVE} "
                "--repo-type dataset` gives where there is a network"
            ) from error
    if not (path.is_file() and zipfile.is_zipfile(path)):
        raise ConfigError(
            f"LongBench data at {where}: no folder, no zip file and no Hub id; pass a folder with files like "
            f"{names[0]}.jsonl, or {HUB} while online"
        )
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
        wanted = {f"{name}.jsonl" for name in names}
        for member in archive.infolist():
            if Path(member.filename).name in wanted and "__MACOSX" not in member.filename:
                member.filename = Path(member.filename).name
                archive.extract(member, folder)
        found = {name: _file(Path(folder), name, shown=str(path)) for name in names}
        return {name: read_rows(file, name, path, whole=whole) for name, file in found.items()}


def published(where: str) -> bool:
    """True if examples come from the authors' own data set on the Hub, and not from a copy on disk."""
    return where in PUBLISHED and not Path(where).exists()


def unlike_published(name: str, rows: Sequence[Example]) -> list[str]:
    """Evidence that a copy's examples are not the published ones; empty if all known facts match.

    No hash of the whole data set is published, so a copy is compared with the facts that are published:
    ids of 48 hex digits, the answers of the examples in MiniLongBench, and the paper's mean length.

    Args:
        name: the task's name.
        rows: all examples of the copy.
    """
    found = []
    if strange := [row for row in rows if not _PUBLISHED_ID.fullmatch(str(row.fields["_id"]))]:
        found.append(f"{len(strange)} ids of {name} that are not of the published form")
    missing = set(DATA["answers"][name]) - {answer_mark(name, row.fields["answers"]) for row in rows}
    if missing:
        found.append(f"{len(missing)} published examples of {name} are missing")
    words = sum(len(_text_of(row.fields).split()) for row in rows) / len(rows)
    if abs(words / DATA["mean_words"][name] - 1) > WORDS_OFF:
        found.append(
            f"examples of {name} have {words:.0f} words on average, published {DATA['mean_words'][name]}"
        )
    return found


def answer_mark(name: str, answers: Sequence[str]) -> str:
    """12 hex digits of the hash of an example's answers, with runs of white space replaced by one space."""
    text = "\n".join([name, *(" ".join(answer.split()) for answer in answers)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_rows(
    path: Path, name: str, shown: Path | None = None, *, whole: bool = False
) -> tuple[Example, ...]:
    """Read and check the examples of one task's file; a repeated `_id` gets the suffix `#2`, `#3` and so on.

    Users' own examples may omit fields that no score depends on. Defaults: `length` is the number of words,
    `dataset` the file's name, `language` English, `all_classes` null and `_id` the line number.

    Args:
        path: the file.
        name: the task's name.
        shown: the location to name in messages; None: the file's folder.
        whole: require every published field.

    Raises:
        DataError: there is no example, or an invalid one.
    """
    rows: list[dict[str, Any]] = []
    for place, given in read_jsonl(path):
        where = str((shown or path.parent) / place)
        check_fields(given, where, f"LongBench's {name}", FIELDS if whole else OWN_FIELDS)
        usual = {"dataset": name, "language": "en", "all_classes": None, "_id": f"{name}-{len(rows) + 1}"}
        fields = {**given, **{key: value for key, value in usual.items() if key not in given}}
        _check({"length": 0, **fields}, where, name)
        fields.setdefault("length", len(_text_of(fields).split()))
        rows.append(fields)
    if not rows:
        raise DataError(f"{path} has no example; LongBench's {name} was expected there")
    return tuple(map(Example, distinct(row["_id"] for row in rows), rows))


def _text_of(fields: Mapping[str, Any]) -> str:
    return " ".join([fields["input"], fields["context"], *fields["answers"]])


def _file(folder: Path, name: str, shown: str = "") -> Path:
    """The path of a task's file, in the folder or in `data` below it."""
    for parent in (folder, folder / "data"):
        for packed in PACKED_SUFFIXES:
            if (file := parent / f"{name}.jsonl{packed}").is_file():
                return file
    there = sorted(file.name for file in folder.glob("*.jsonl*")) or ["no .jsonl file"]
    raise DataError(
        f"{shown or folder} has no {name}.jsonl, it has {', '.join(there)}; add the file or "
        "leave out the task"
    )


def _check(fields: Mapping[str, Any], place: str, name: str) -> None:
    check_fields(fields, place, f"LongBench's {name}", FIELDS)
    if fields["dataset"] != name:
        raise DataError(
            f"{place}: field 'dataset' is {fields['dataset']!r}; in a file of {name} it must be {name!r}"
        )
    if name not in CODE and fields["language"] != "en":
        raise DataError(f"{place}: field 'language' is {fields['language']!r}; of {name} it must be 'en'")
    for field in ("answers", "all_classes"):
        for item in fields[field] or ():
            if not isinstance(item, str):
                raise DataError(f"{place}: field '{field}' holds {item!r}; it must hold strings alone")
    if not fields["answers"]:
        raise DataError(
            f"{place}: field 'answers' is an empty list, so no output could score; give an answer or leave "
            "out the example"
        )
    if name == "trec" and not fields["all_classes"]:
        raise DataError(f"{place}: field 'all_classes' is empty; {name} needs the list of all classes")
    if name == "passage_retrieval_en":
        for answer in fields["answers"]:
            if not re.search(r"Paragraph \d", answer):
                raise DataError(f"{place}: answer {answer!r} must hold e.g. 'Paragraph 7'")

"""Reads local text and JSONL files, plain or compressed (.xz, .gz), one file or a folder of them."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from longtrain.assets import asset_dir
from longtrain.errors import ConfigError, DataError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
PACKED_SUFFIXES = ("", ".xz", ".gz")
BUNDLED = "bundled:"
HUB = "hub:"


def find(where: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The files that `where` names: itself, or every file of a folder with one of the suffixes, sorted.

    Args:
        where: a path (`~` and `$VARS` are expanded), or `bundled:FOLDER`, text that ships with the package.
        suffixes: e.g. `TEXT_SUFFIXES`; each also counts with `.xz` or `.gz` behind it.

    Raises:
        DataError: nothing there.
    """
    if where.startswith(BUNDLED):
        path = asset_dir("bundled") / "text" / where.removeprefix(BUNDLED)
    else:
        path = Path(os.path.expandvars(where)).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"no file or folder at {path}; pass a path that exists (given: {where})")
    endings = tuple(suffix + packed for suffix in suffixes for packed in PACKED_SUFFIXES)
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(endings))
    if not files:
        raise DataError(f"folder {path} holds no file ending in {', '.join(suffixes)} (plain, .xz or .gz)")
    return files


def local_file(where: str) -> Path:
    """A path, or `hub:ORG/NAME/FILE`: a file of a data set on the Hub, kept in the local cache.

    Raises:
        ConfigError: `hub:` without a data set and a file.
        DataError: the Hub does not give it.
    """
    if not where.startswith(HUB):
        return Path(os.path.expandvars(where)).expanduser()
    owner, _, rest = where.removeprefix(HUB).partition("/")
    name, _, file = rest.partition("/")
    if not (owner and name and file):
        raise ConfigError(f"'{where}' names no file of a data set; allowed: hub:ORG/NAME/FILE")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(f"{owner}/{name}", file, repo_type="dataset"))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{file} of data set {owner}/{name} could not be fetched from the Hub ({reason}); check the name "
            "and the network, or pass a local path"
        ) from error


def open_text(path: Path) -> TextIO:
    """Open a plain, .xz or .gz file as UTF-8 text."""
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open("r", encoding="utf-8")


def read_text(path: Path) -> str:
    """A whole text file.

    Raises:
        DataError: not UTF-8, or a damaged archive.
    """
    try:
        with open_text(path) as file:
            return file.read()
    except (UnicodeDecodeError, lzma.LZMAError, EOFError, gzip.BadGzipFile) as error:
        raise DataError(
            f"cannot read {path} as UTF-8 text: {error}; convert or leave out the file"
        ) from error


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a JSONL file, or of a JSON file that is one list, each with a name `file:line`.

    Raises:
        DataError: a line that is not a JSON object, by its number.
    """
    try:
        with open_text(path) as file:
            if file.read(64).lstrip().startswith("["):
                file.seek(0)
                rows = enumerate(json.load(file), 1)
                yield from ((f"{path.name}:{number}", _object(row, path, number)) for number, row in rows)
                return
            file.seek(0)
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path.name}:{number}", _object(_parse(line, path, number), path, number)
    except (UnicodeDecodeError, lzma.LZMAError, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"cannot read {path}: {error}; convert or leave out the file") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is neither JSON lines nor one JSON list: {error}") from error


def stem(path: Path) -> str:
    """A file's name without its suffixes for text and packing."""
    name = path.name
    for suffix in (".xz", ".gz", *TEXT_SUFFIXES, *JSONL_SUFFIXES):
        name = name.removesuffix(suffix)
    return name


def need(where: str | None, reader: str) -> str:
    """The path of a source that must have one.

    Raises:
        ConfigError: it is not set.
    """
    if not where:
        raise ConfigError(
            f"data source '{reader}' has no path; pass e.g. data.{reader}=PATH (a file or a folder)"
        )
    return where


def _parse(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{number} is not JSON ({error}); one JSON object a line is wanted") from error


def _object(row: Any, path: Path, number: int) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number} holds a {type(row).__name__}; one JSON object a row is wanted")
    return row

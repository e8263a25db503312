"""Reads text and JSONL files, plain or compressed (.xz, .gz, .zst), one or a folder of them."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterator
from functools import cache
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import IO, Any

from longtrain.assets import asset_dir
from longtrain.errors import ConfigError, DataError, first_line
from longtrain.files import UTF8, kind_of, parse_json
from longtrain.log import get_logger

log = get_logger(__name__)

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
CODE_SUFFIXES = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala", ".cs",
    ".js", ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".pl", ".swift", ".lua", ".r", ".jl", ".hs",
    ".ml", ".ex", ".clj", ".dart", ".zig", ".f90", ".sh", ".sql", ".proto",
)  # fmt: skip
NOT_SOURCE = ("node_modules", "__pycache__")
"""Folders of a source tree that are skipped, besides hidden ones (names that begin with a dot)."""
PACKED_SUFFIXES = ("", ".xz", ".gz", ".zst")
READ_BY = {
    JSONL_SUFFIXES: "data=conversations data.conversations={0} (rows of turns) or data=code data.code={0} "
    "(rows with a `text` column)",
    TEXT_SUFFIXES: "data=text data.text={0}",
    CODE_SUFFIXES: "data=code data.code={0}",
}
"""Suffixes -> the `data` settings that read a folder of such files."""
UNREADABLE = (OSError, UnicodeDecodeError, lzma.LZMAError, zlib.error, EOFError)
"""Errors raised for a file that is not UTF-8, a damaged archive, or a file without read permission."""
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Matches an escaped UTF-16 surrogate in JSON; a pair is one character, a single one is invalid text."""
BUNDLED = "bundled:"
HUB = "hub:"
Report = Callable[[DataError], None]
"""Callback for a row that cannot be read: raises, or counts the row and returns to continue reading."""


def refuse(error: DataError) -> None:
    """Raise the error of a row that cannot be read (the default callback).

    Raises:
        DataError: what was wrong.
    """
    raise error


def find_code(where: str) -> list[Path]:
    """Return the source files of a tree, or the JSON lines files of a folder; of a file, the file itself.

    A folder with more source files than JSON lines files is read as a source tree, else as JSON lines; the
    log names the files that are not read. Hidden files and the folders of `NOT_SOURCE` are ignored.

    Raises:
        DataError: nothing there.
    """
    root = place(where)
    if not root.is_dir():
        return [root]
    own = visible(root, without=NOT_SOURCE)
    source = [file for file in own if file.suffix.lower() in CODE_SUFFIXES]
    lines = [file for file in own if _ends(file, JSONL_SUFFIXES[:2])]
    if len(source) > len(lines):
        if lines:
            said = f"a source tree of {len(source)} files; its {len(lines)} files of JSON lines"
            log.warning("%s is read as %s (%s, ...) are not read", root, said, lines[0].relative_to(root))
        return source
    rows = [file for file in own if _ends(file, JSONL_SUFFIXES)]
    if not rows:
        raise _nothing(root, (*JSONL_SUFFIXES, *CODE_SUFFIXES[:3]), own)
    if source:
        said = f"{len(rows)} files of JSON lines; its {len(source)} source files"
        log.warning("%s is read as %s (%s, ...) are not read", root, said, source[0].relative_to(root))
    return rows


def find(where: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the file `where`, or all files of a folder with one of the suffixes, sorted.

    The log states how many other files of the folder are not read.

    Args:
        where: see `place`; hidden files of a folder are skipped, see `visible`.
        suffixes: e.g. `TEXT_SUFFIXES`, case-insensitive; each also matches with a suffix of compression.

    Raises:
        DataError: nothing there.
    """
    path = place(where)
    if path.is_file():
        if _ends(path, JSONL_SUFFIXES) and not _ends(path, suffixes):
            advice = READ_BY[JSONL_SUFFIXES].format(path)
            log.warning("%s is read as running text, JSON and all; its rows are read by %s", path, advice)
        return [path]
    every = visible(path)
    files = [file for file in every if _ends(file, suffixes)]
    if not files:
        raise _nothing(path, suffixes, every)
    if left := [file for file in every if not _ends(file, suffixes)]:
        log.warning(
            "%s: %d of its %d files are not read, since they do not end in %s: %s%s",
            path,
            len(left),
            len(every),
            ", ".join(suffixes),
            left[0].relative_to(path),
            ", ..." if len(left) > 1 else "",
        )
    return files


def visible(root: Path, without: Collection[str] = ()) -> list[Path]:
    """Return the files below a folder, sorted, without hidden ones.

    Files and folders whose names begin with a dot are hidden: `.git`, `.ipynb_checkpoints`, and the `._NAME`
    that macOS puts beside each file on a foreign disk or in an archive. Links to folders are not followed,
    and folders that may not be read are left out, as are links that lead nowhere or to themselves.

    Args:
        root: the folder.
        without: names of files and folders that are left out too.
    """
    try:
        with os.scandir(root) as entries:
            shown = [one for one in entries if one.name[0] != "." and one.name not in without]
    except PermissionError:
        return []
    found: list[Path] = []
    for entry in sorted(shown, key=lambda one: one.name):  # name by name, which is the order of the paths
        path = root / entry.name
        if entry.is_symlink():  # an entry would raise for a link to itself, which a path says is no file
            found += [path] if path.is_file() else []
        elif entry.is_dir():
            found += visible(path, without)
        elif entry.is_file():
            found.append(path)
    return found


def _ends(file: Path, suffixes: tuple[str, ...]) -> bool:
    """Return True if a file's name ends in one of the suffixes, optionally followed by one of compression."""
    return file.name.lower().endswith(_endings(suffixes))


@cache
def _endings(suffixes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the suffixes, each also with one of compression behind it."""
    return tuple(end + packed for end in suffixes for packed in PACKED_SUFFIXES)


def _nothing(folder: Path, suffixes: tuple[str, ...], every: list[Path]) -> DataError:
    """Build the error of a folder without such files; it suggests `data` settings for the files found."""
    said = (
        f"folder {folder} holds no file ending in {', '.join(suffixes)} (plain, .xz, .gz or .zst; hidden "
        "files do not count)"
    )
    for ends, data in READ_BY.items():
        if found := [file for file in every if _ends(file, ends)]:
            first = found[0].relative_to(folder)
            said += f"; {first} and its like ({len(found)} in all) are read by {data.format(folder)}"
            break
    return DataError(said)


def place(where: str) -> Path:
    """Return the file or folder that a setting names.

    Args:
        where: a path (`~` and `$VARS` are expanded), or `bundled:FOLDER`, text that ships with the package.

    Raises:
        DataError: it does not exist, or is a pipe or a device, which cannot be read twice.
    """
    if where.startswith(BUNDLED):
        path = asset_dir("bundled") / "text" / where.removeprefix(BUNDLED)
    else:
        path = Path(os.path.expandvars(where)).expanduser()
    if not path.exists():
        raise DataError(f"no file or folder at {path}; pass a path that exists (given: {where})")
    if not (path.is_file() or path.is_dir()):
        raise DataError(f"{path} is {kind_of(path.stat())}; pass a file or a folder (given: {where})")
    return path


def local_file(where: str) -> Path:
    """Return the local path of a file, given as a path or as `hub:ORG/NAME/FILE` (downloaded from the Hub).

    Raises:
        ConfigError: `hub:` without a data set and a file.
        DataError: the download failed.
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
        raise DataError(
            f"{file} of data set {owner}/{name} could not be fetched from the Hub ({first_line(error)}); "
            "check the name and the network, or pass a local path"
        ) from error


def open_bytes(path: Path) -> IO[bytes]:
    """Open a plain, .xz, .gz or .zst file for reading its decompressed bytes.

    Raises:
        OSError: the file cannot be read.
    """
    packed = path.suffix.lower()
    if packed == ".xz":
        return lzma.open(path)
    if packed == ".gz":
        return BufferedReader(gzip.open(path))
    if packed == ".zst":
        import pyarrow

        stream: Any = pyarrow.input_stream(str(path), compression="zstd")
        return BufferedReader(stream)
    return path.open("rb")


def read_text(path: Path) -> str:
    """Read a whole text file, decompressed.

    Raises:
        DataError: not UTF-8, a damaged archive, or a file that may not be read.
    """
    try:
        with TextIOWrapper(open_bytes(path), encoding=UTF8) as file:
            return file.read()
    except UNREADABLE as error:
        raise DataError(
            f"cannot read {path} as UTF-8 text: {_reason(error)}; convert or leave out the file"
        ) from error


def read_jsonl(path: Path, report: Report = refuse) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a JSONL file, or of a JSON file that is one list, each with its name `file:line`.

    Args:
        path: the file.
        report: called with the error of a line that is not a JSON object of texts, or of a file that cannot
            be read to its end. If it returns, the lines before the damage are still read.

    Raises:
        DataError: from `report`.
    """
    try:
        with open_bytes(path) as file:
            listed = file.read(64).removeprefix(BOM_UTF8).lstrip().startswith(b"[")
        with open_bytes(path) as file:
            whole = file.read() if listed else b""
            halves = SURROGATE.search(whole)
            for number, row in enumerate(parse_json(whole.decode(UTF8)) if listed else file, 1):
                if not listed and not row.strip():
                    continue
                try:
                    found = _object(row if listed else _parse(row, path, number), path, number)
                    if halves or (not listed and SURROGATE.search(row)):
                        _refuse_half_characters(found, path, number)
                except DataError as error:
                    report(error)
                    continue
                yield f"{readable(path.name)}:{number}", found
    except UNREADABLE as error:
        report(DataError(f"cannot read {path}: {_reason(error)}; convert or leave out the file"))
    except ValueError as error:
        report(DataError(f"{path} is neither JSON lines nor one JSON list: {error}"))


def _reason(error: BaseException) -> str:
    """Return an error's reason without the file's name."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _refuse_half_characters(row: dict[str, Any], path: Path, number: int) -> None:
    """Refuse a row with a lone surrogate (half of a character), which cannot be encoded or tokenised."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.start + 1].encode("unicode_escape").decode()
        raise DataError(
            f"{path}:{number} holds {half}, half of a character (a lone surrogate), which is no text; mend "
            "or drop the row"
        ) from None


def stem(path: Path) -> str:
    """Return a file's name without its suffixes for text and compression."""
    name = readable(path.name)
    for suffix in (*PACKED_SUFFIXES[1:], *TEXT_SUFFIXES, *JSONL_SUFFIXES):
        if name.lower().endswith(suffix):
            name = name[: -len(suffix)]
    return name


def readable(name: str) -> str:
    """Return a file's name as valid text; bytes that are not UTF-8 become replacement characters."""
    return os.fsencode(name).decode(errors="replace")


def need(where: str | None, reader: str) -> str:
    """Return the path of a source, which must have one.

    Raises:
        ConfigError: the source has no path.
    """
    if not where:
        raise ConfigError(
            f"data source '{reader}' has no path; pass e.g. data.{reader}=PATH (a file or a folder)"
        )
    return where


def _parse(line: bytes, path: Path, number: int) -> Any:
    try:
        return parse_json(line.decode(UTF8))
    except ValueError as error:
        raise DataError(f"{path}:{number} is not JSON ({error}); one JSON object a line is wanted") from error


def _object(row: Any, path: Path, number: int) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number} holds a {type(row).__name__}; one JSON object a row is wanted")
    return row

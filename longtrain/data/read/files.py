"""Reads text and JSONL files, plain or compressed (.xz, .gz, .zst), one or a folder of them, and MDS shards.

MDS is the format of MosaicML's streaming library (version 2). It is read by hand because that library wants
whole data sets with an index, and a cloud client for each store. A shard is: uint32 count n, uint32 offsets
[n + 1], a JSON header, then the samples. A sample is the uint32 sizes of its columns of variable size, then
all columns' bytes.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import IO, Any

import numpy as np

from longtrain.assets import asset_dir
from longtrain.errors import ConfigError, DataError
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
"""Folders of a source tree that hold no sources of its own, beside those whose names begin with a point."""
PACKED_SUFFIXES = ("", ".xz", ".gz", ".zst")
READ_BY = {
    JSONL_SUFFIXES: "data=conversations data.conversations={0} (rows of turns) or data=code data.code={0} "
    "(rows with a `text` column)",
    TEXT_SUFFIXES: "data=text data.text={0}",
    CODE_SUFFIXES: "data=code data.code={0}",
}
"""Suffixes -> the data of one's own files that reads them in a folder."""
UNREADABLE = (OSError, UnicodeDecodeError, lzma.LZMAError, zlib.error, EOFError)
"""Errors of a file that is no UTF-8 text, of a damaged archive, and of a file that may not be read."""
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""The escape of a surrogate in JSON: two together are a character, and one that stands alone is no text."""
BUNDLED = "bundled:"
HUB = "hub:"
MDS_SCALARS = {"int", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
Tell = Callable[[DataError], None]
"""What is done about a row that cannot be read: it raises, or counts and lets the others be read."""
MDS_SHAPE_TYPES = (np.uint8, np.uint16, np.uint32, np.uint64)


def refuse(error: DataError) -> None:
    """Stop at the first row that cannot be read.

    Raises:
        DataError: what was wrong.
    """
    raise error


def find_code(where: str) -> list[Path]:
    """The files of a source tree, or the JSON lines of a folder of rows; a file is itself.

    A folder is what more of its files are, source or JSON lines; the log says which of the others are not
    read. Hidden files and the folders of `NOT_SOURCE` neither count nor are read.

    Raises:
        DataError: nothing there.
    """
    root = place(where)
    if not root.is_dir():
        return [root]
    own = [file for file in visible(root) if not {*NOT_SOURCE} & {*file.relative_to(root).parts}]
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
    """The files that `where` names: itself, or every file of a folder with one of the suffixes, sorted.

    The log says how many of a folder's other files are not read.

    Args:
        where: see `place`; hidden files of a folder are left out, see `visible`.
        suffixes: e.g. `TEXT_SUFFIXES`, in capitals or not; each also counts with `.xz` or `.gz` behind it.

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


def visible(root: Path) -> list[Path]:
    """The files below a folder, sorted, without hidden ones.

    A name that begins with a point hides a file, or all that is in a folder: `.git`, `.ipynb_checkpoints`,
    and the `._NAME` that macOS puts beside each file of a foreign disk or archive.
    """
    return sorted(
        file
        for file in root.rglob("*")
        if file.is_file() and not any(part[0] == "." for part in file.relative_to(root).parts)
    )


def _ends(file: Path, suffixes: tuple[str, ...]) -> bool:
    """Whether a file's name ends in one of the suffixes, plain or with that of an archive behind it."""
    return file.name.lower().endswith(tuple(end + packed for end in suffixes for packed in PACKED_SUFFIXES))


def _nothing(folder: Path, suffixes: tuple[str, ...], every: list[Path]) -> DataError:
    """What a folder lacks, and which data reads the files that it has."""
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
    """The file or folder of that name.

    Args:
        where: a path (`~` and `$VARS` are expanded), or `bundled:FOLDER`, text that ships with the package.

    Raises:
        DataError: nothing there, or a pipe or a device, which cannot be read twice.
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


def open_bytes(path: Path) -> IO[bytes]:
    """Open a plain, .xz, .gz or .zst file; what is read is unpacked.

    Raises:
        OSError: it cannot be read.
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
    """A whole text file.

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


def read_jsonl(path: Path, tell: Tell = refuse) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a JSONL file, or of a JSON file that is one list, each with a name `file:line`.

    Args:
        path: the file.
        tell: gets the error of a line that is not a JSON object of texts, and that of a file which cannot be
            read to its end; where it goes on, what comes before the damage is read.

    Raises:
        DataError: from `tell`.
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
                    tell(error)
                    continue
                yield f"{readable(path.name)}:{number}", found
    except UNREADABLE as error:
        tell(DataError(f"cannot read {path}: {_reason(error)}; convert or leave out the file"))
    except ValueError as error:
        tell(DataError(f"{path} is neither JSON lines nor one JSON list: {error}"))


def _reason(error: BaseException) -> str:
    """What is wrong with a file, without its name."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _refuse_half_characters(row: dict[str, Any], path: Path, number: int) -> None:
    """Refuse a row with a lone surrogate: half of a character, which no tokenizer reads and no file holds.

    Raises:
        DataError: there is one.
    """
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.start + 1].encode("unicode_escape").decode()
        raise DataError(
            f"{path}:{number} holds {half}, half of a character (a lone surrogate), which is no text; mend "
            "or drop the row"
        ) from None


def stem(path: Path) -> str:
    """A file's name without its suffixes for text and packing."""
    name = readable(path.name)
    for suffix in (*PACKED_SUFFIXES[1:], *TEXT_SUFFIXES, *JSONL_SUFFIXES):
        if name.lower().endswith(suffix):
            name = name[: -len(suffix)]
    return name


def readable(name: str) -> str:
    """A file's name as text; bytes of it that are not UTF-8 become question marks."""
    return os.fsencode(name).decode(errors="replace")


def need(where: str | None, reader: str) -> str:
    """The path of a source that must have one.

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


def read_mds_shard(path: Path) -> Iterator[dict[str, Any]]:
    """Read the samples of one uncompressed MDS shard.

    Raises:
        DataError: cut short, or a column encoding other than strings, integers and arrays.
    """
    blob = np.memmap(path, np.uint8, mode="r")
    try:
        n = int(blob[:4].view(np.uint32)[0])
        offsets = np.frombuffer(blob[4 : 8 + 4 * n].tobytes(), np.uint32).astype(np.int64)
        header = parse_json(blob[8 + 4 * n : offsets[0]].tobytes())
    except (ValueError, IndexError) as error:
        raise DataError(f"{path} is not an MDS shard ({error}); download it again") from error
    if n and offsets[-1] > len(blob):
        raise DataError(f"{path} is cut short: {len(blob)} of {offsets[-1]} bytes; download it again")
    columns = list(
        zip(header["column_names"], header["column_encodings"], header["column_sizes"], strict=True)
    )
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        yield _sample(blob[begin:end].tobytes(), columns, path)


def _sample(data: bytes, columns: list[tuple[str, str, int | None]], path: Path) -> dict[str, Any]:
    variable = [size is None for _, _, size in columns]
    at = 4 * sum(variable)
    given = iter(np.frombuffer(data[:at], np.uint32).tolist())
    sample = {}
    for name, encoding, size in columns:
        size = next(given) if size is None else size
        sample[name] = _decode(encoding, data[at : at + size], path)
        at += size
    return sample


def _decode(encoding: str, data: bytes, path: Path) -> Any:
    kind, _, dtype = encoding.partition(":")
    if kind == "str":
        return data.decode("utf-8")
    if kind in MDS_SCALARS:
        return int(np.frombuffer(data, np.int64 if kind == "int" else np.dtype(kind))[0])
    if kind == "ndarray" and dtype and ":" not in dtype:
        n_dims, shape_type = data[0] >> 2, np.dtype(MDS_SHAPE_TYPES[data[0] & 3])
        at = 1 + n_dims * shape_type.itemsize
        return np.frombuffer(data[at:], dtype).reshape(np.frombuffer(data[1:at], shape_type))
    raise DataError(
        f"{path}: column encoding '{encoding}' is not read here; known: str, integers, ndarray:TYPE"
    )

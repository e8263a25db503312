"""Reads text and JSONL files, plain or compressed (.xz, .gz), one file or a folder of them, and MDS shards.

MDS is the format of MosaicML's streaming library (version 2). It is read by hand because that library wants
whole data sets with an index, and a cloud client for each store. A shard is: uint32 count n, uint32 offsets
[n + 1], a JSON header, then the samples. A sample is the uint32 sizes of its columns of variable size, then
all columns' bytes.
"""

from __future__ import annotations

import gzip
import lzma
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from longtrain.assets import asset_dir
from longtrain.errors import ConfigError, DataError
from longtrain.files import kind_of, parse_json

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
CODE_SUFFIXES = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala", ".cs",
    ".js", ".jsx", ".ts", ".tsx", ".go", ".rs", ".rb", ".php", ".pl", ".swift", ".lua", ".r", ".jl", ".hs",
    ".ml", ".ex", ".clj", ".dart", ".zig", ".f90", ".sh", ".sql", ".proto",
)  # fmt: skip
NOT_SOURCE = ("node_modules", "__pycache__")
"""Folders of a source tree that hold no sources of its own, beside those whose names begin with a point."""
PACKED_SUFFIXES = ("", ".xz", ".gz")
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
    """Files with rows of code, or those of a source tree: a folder without `.jsonl` files.

    Raises:
        DataError: nothing there.
    """
    root = Path(os.path.expandvars(where)).expanduser()
    rows = [file for suffix in JSONL_SUFFIXES[:2] for file in root.rglob(f"*{suffix}*")]
    if not root.is_dir() or rows:
        return find(where, JSONL_SUFFIXES)
    found = sorted(
        file
        for file in root.rglob("*")
        if file.suffix in CODE_SUFFIXES
        and file.is_file()
        and not any(part[0] == "." or part in NOT_SOURCE for part in file.relative_to(root).parts)
    )
    return found or find(where, (*JSONL_SUFFIXES, *CODE_SUFFIXES[:3]))


def find(where: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The files that `where` names: itself, or every file of a folder with one of the suffixes, sorted.

    Args:
        where: see `place`.
        suffixes: e.g. `TEXT_SUFFIXES`; each also counts with `.xz` or `.gz` behind it.

    Raises:
        DataError: nothing there.
    """
    path = place(where)
    if path.is_file():
        return [path]
    endings = tuple(suffix + packed for suffix in suffixes for packed in PACKED_SUFFIXES)
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(endings))
    if not files:
        raise DataError(f"folder {path} holds no file ending in {', '.join(suffixes)} (plain, .xz or .gz)")
    return files


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


def read_jsonl(path: Path, tell: Tell = refuse) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a JSONL file, or of a JSON file that is one list, each with a name `file:line`.

    Args:
        path: the file.
        tell: gets the error of a line that is not a JSON object.

    Raises:
        DataError: from `tell`, the line by its number; or the file cannot be read at all.
    """
    try:
        with open_text(path) as file:
            whole = file.read(64).lstrip().startswith("[")
            file.seek(0)
            for number, row in enumerate(parse_json(file.read()) if whole else file, 1):
                if not whole and not row.strip():
                    continue
                try:
                    found = _object(row if whole else _parse(row, path, number), path, number)
                except DataError as error:
                    tell(error)
                    continue
                yield f"{path.name}:{number}", found
    except (UnicodeDecodeError, lzma.LZMAError, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"cannot read {path}: {error}; convert or leave out the file") from error
    except ValueError as error:
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
        ConfigError: the source has no path.
    """
    if not where:
        raise ConfigError(
            f"data source '{reader}' has no path; pass e.g. data.{reader}=PATH (a file or a folder)"
        )
    return where


def _parse(line: str, path: Path, number: int) -> Any:
    try:
        return parse_json(line)
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

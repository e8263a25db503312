"""Corpora on the Hugging Face Hub, described by `data_prep/*.yaml`: id, revision, licence, split, adapter."""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from longtrain.assets import asset_dir
from longtrain.data.read.adapters import ADAPTERS
from longtrain.data.read.files import Report, read_jsonl, refuse
from longtrain.data.read.mds import read_mds_shard
from longtrain.errors import ConfigError, DataError, first_line
from longtrain.files import read_text
from longtrain.log import get_logger
from longtrain.settings import CountOrZero, OneOf, read

log = get_logger(__name__)

FORMATS = ("datasets", "jsonl", "mds")
Row = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Part:
    """A corpus, or a part of one that is read with the same settings.

    Args:
        hub: dataset id on the Hub.
        licence: the licence stated on its card, with remarks.
        adapter: a key of `adapters.ADAPTERS`.
        revision: commit, or `main`.
        format: `datasets` (streamed by that library), or `jsonl` / `mds` files of the repository.
        config: configuration of the dataset.
        split: the split of the dataset.
        files: patterns of the paths in the repository that `jsonl` and `mds` read.
        columns: adapter column -> corpus column, where the names differ.
        kind: text kind; empty: the adapter's.
        share: share of the manifest's rows, if there are several parts.
        shuffle_buffer: size of the buffer from which rows are drawn at random, so that a few rows of a large
            corpus are not its first ones; 0: the corpus's order. `datasets` also shuffles its files.
        shuffle_seed: seed of the shuffling.
        source_tokenizer: Hub id of the tokenizer with which an already tokenised corpus is decoded to text.
    """

    hub: str
    licence: str
    adapter: Annotated[str, OneOf(*sorted(ADAPTERS))]
    revision: str = "main"
    format: Annotated[str, OneOf(*FORMATS)] = "datasets"
    config: str | None = None
    split: str = "train"
    files: tuple[str, ...] = ()
    columns: dict[str, str] = field(default_factory=dict)
    kind: str = ""
    share: int | float = 1.0
    shuffle_buffer: CountOrZero = 0
    shuffle_seed: CountOrZero = 0
    source_tokenizer: str | None = None


@dataclass(frozen=True)
class Manifest:
    """A file of `data_prep/`: a name and one or more parts."""

    name: str
    parts: tuple[Part, ...]
    note: str = ""

    @classmethod
    def load(cls, name: str) -> Manifest:
        """Read a manifest by name (a file of `data_prep/`) or path.

        Raises:
            ConfigError: the manifest does not exist, or has an unknown key, adapter or format.
        """
        import yaml

        folder = asset_dir("data_prep")
        path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
            raise ConfigError(f"no data manifest '{name}'; known: {known}, or a path to a .yaml file")
        values = yaml.safe_load(read_text(path))
        shared = {key: value for key, value in values.items() if key not in ("name", "note", "parts")}
        items = values.get("parts") or [{}]
        parts = tuple(_part({**shared, **item}, path) for item in items)
        return cls(name=values.get("name", path.stem), parts=parts, note=values.get("note", ""))


def resolve(part: Part, known: str | None = None) -> str:
    """Resolve a part's revision to a commit.

    Args:
        part: a part of a manifest.
        known: the commit resolved last time, used if the Hub cannot be reached.

    Raises:
        DataError: the Hub cannot be reached, and no commit is known.
    """
    if len(part.revision) == 40 and set(part.revision) <= set("0123456789abcdef"):
        return part.revision
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(part.hub, revision=part.revision).sha
    except Exception as error:
        if known:
            return known
        raise DataError(
            f"cannot reach dataset {part.hub} on the Hugging Face Hub ({first_line(error)}); go online for "
            f"'longtrain prepare', or use local files: data=text data.text=PATH"
        ) from error
    log.warning(
        "dataset=%s revision=%s is not a fixed commit; recorded commit=%s", part.hub, part.revision, commit
    )
    return str(commit)


def rows(part: Part, commit: str, limit: int | None, report: Report = refuse) -> Iterator[Row]:
    """Stream the rows of a part with their names, in the corpus's order or shuffled in a buffer.

    Args:
        part: a part of a manifest.
        commit: the dataset's commit.
        limit: largest number of rows; None: all.
        report: called with the error of a JSON lines row that cannot be read.

    Raises:
        DataError: the Hub cannot be reached or has no such file, split or configuration; or from `report`.
    """
    try:
        if part.format == "datasets":
            named = _stream(part, commit)
        elif part.format == "mds":
            named = _drawn(part, _samples(part, commit))
        else:
            named = _drawn(
                part, (row for path in _download(part, commit) for row in read_jsonl(path, report))
            )
        yield from islice(named, limit)
    except (OSError, ValueError) as error:
        raise DataError(
            f"reading dataset {part.hub} failed: {first_line(error)}; check network and manifest"
        ) from error


def _stream(part: Part, commit: str) -> Iterator[Row]:
    from datasets import load_dataset

    files = list(part.files) or None
    stream = load_dataset(
        part.hub, part.config, split=part.split, revision=commit, data_files=files, streaming=True
    )
    if part.shuffle_buffer:
        stream = stream.shuffle(seed=part.shuffle_seed, buffer_size=part.shuffle_buffer)
    for number, row in enumerate(stream):
        yield f"{part.hub}#{number}", row


def _drawn(part: Part, named: Iterator[Row]) -> Iterator[Row]:
    """Yield the rows, each drawn at random from a buffer of `shuffle_buffer` rows."""
    rng = random.Random(part.shuffle_seed)
    held = list(islice(named, part.shuffle_buffer))
    for row in named:
        if not held:
            yield row
            continue
        at = rng.randrange(len(held))
        row, held[at] = held[at], row
        yield row
    rng.shuffle(held)
    yield from held


def _samples(part: Part, commit: str) -> Iterator[Row]:
    decode = _decoder(part.source_tokenizer) if part.source_tokenizer else None
    for path in _download(part, commit):
        for number, sample in enumerate(read_mds_shard(path)):
            name = f"{path.parent.parent.name}/{path.parent.name}/{path.stem}#{number}"
            if decode is None:
                yield name, sample
                continue
            spans = sample.get("indices")
            plain = {key: value for key, value in sample.items() if isinstance(value, str | int)}
            for i, (begin, end) in enumerate([] if spans is None else spans.reshape(-1, 2).tolist()):
                yield f"{name}/{i}", {"text": decode(sample["input_ids"][begin:end].tolist()), **plain}


def _download(part: Part, commit: str) -> Iterator[Path]:
    """Yield the part's files, each downloaded when it is needed."""
    from huggingface_hub import HfApi, hf_hub_download

    listed = HfApi().list_repo_files(part.hub, repo_type="dataset", revision=commit)
    chosen = sorted(name for name in listed if any(fnmatch.fnmatch(name, pattern) for pattern in part.files))
    if not chosen:
        raise DataError(f"dataset {part.hub} at {commit} has no file like {', '.join(part.files)}")
    for name in chosen:
        yield Path(hf_hub_download(part.hub, name, repo_type="dataset", revision=commit))


def _decoder(tokenizer: str) -> Any:
    from tokenizers import Tokenizer

    inner = Tokenizer.from_pretrained(tokenizer)
    return lambda ids: inner.decode(ids, skip_special_tokens=True)


def _part(values: dict[str, Any], path: Path) -> Part:
    files = values.get("files") or ()
    values["files"] = (files,) if isinstance(files, str) else files
    part = read(Part, values, str(path))
    if part.format != "datasets" and not part.files:
        raise ConfigError(f"{path}: format={part.format} reads files of the repository; give their patterns")
    return part

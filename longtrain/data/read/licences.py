"""Chooses the files of permissively licensed packages in an installed Python environment (`site-packages`).

A package's licence is read from its own metadata (`NAME.dist-info/METADATA`), and the files that belong to it
from `NAME.dist-info/RECORD`. A file that no package lists is left out, and so is a package whose metadata
state no licence that is known to be permissive. The statement of a package covers the files that it vendors.

Source: Core metadata specifications (`License-Expression`, `License`, `Classifier`) and "Recording installed
projects" (`RECORD`) of the Python Packaging User Guide; SPDX licence expressions, SPDX 2.3, Annex D.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from longtrain.data.read.adapters import PERMISSIVE
from longtrain.errors import DataError
from longtrain.log import get_logger

log = get_logger(__name__)

INSTALLED = ("site-packages", "dist-packages")
"""Names of the folders that packages are installed in, looked for below a source's folder."""
ALSO_PERMISSIVE = {
    "0bsd", "blueoak-1.0.0", "bsd", "bsd-1-clause", "bsl-1.0", "cnri-python", "hpnd", "mit-0", "mit-cmu",
    "ncsa", "postgresql", "psf-2.0", "python-2.0", "python-2.0.1", "x11", "zlib", "zpl-2.1",
}  # fmt: skip
IDS = PERMISSIVE | ALSO_PERMISSIVE
"""SPDX identifiers of permissive licences, lower case."""
NAMES = re.compile(
    r"(the )?("
    r"mit(/x11)?|mit no attribution|expat"
    r"|apache( software)?( licen[cs]e)?,?( version| v)? ?(2(\.0)?)?"
    r"|(new|modified|simplified|revised|original|\d|two|three|zero)?[- ]?(clause )?bsd"
    r"([- ](\d|two|three)[- ]clause)?"
    r"|isc|unlicense|zlib(/libpng)?|psfl?|python software foundation|boost software( licen[cs]e)? 1\.0"
    r"|historical permission notice and disclaimer|university of illinois/ncsa open source"
    r"|cc0 1\.0 universal( public domain dedication)?"
    r")( licen[cs]e)?",
)
"""Matches the usual names of permissive licences, lower case and without an abbreviation in brackets."""
OTHERS = re.compile(
    r"gpl|gnu|mozilla|\bmpl|eclipse|\bepl|cddl|eupl|european union|cecill|sspl|busl|cc-by|creative commons"
    r"|proprietary|commercial|nvidia|source.available",
)
"""Matches names of licences that are not permissive; other words say nothing either way."""
LONGEST_NAME = 120
"""A first line of a `License` field with more characters is a licence's text, not its name."""


@dataclass(frozen=True)
class Package:
    """An installed package, with the licence that its metadata state.

    Args:
        name: its name.
        version: its version.
        licence: what the metadata say, empty if nothing.
        permissive: True if that is known to be permissive.
    """

    name: str
    version: str
    licence: str
    permissive: bool


def choose(root: Path, files: Sequence[Path]) -> tuple[list[Path], list[dict[str, Any]]]:
    """Return the files of permissively licensed packages, and those outside every environment.

    Args:
        root: the folder that was searched.
        files: the files found in it.

    Returns:
        The chosen files in their order; and for each package with files: name, version, licence, number of
        its files and whether they were taken. The latter is empty if `root` holds no environment.

    Raises:
        DataError: no file is left, or a package's metadata cannot be read.
    """
    owners: dict[str, Package] = {}
    bases = _environments(root, files)
    for base in bases:
        owners.update(_owners(base))
    if not bases:
        return list(files), []
    kept: list[Path] = []
    counts: Counter[Package] = Counter()
    unknown = 0
    for file in files:
        package = owners.get(str(file))
        if package is not None:
            counts[package] += 1
        elif bases.isdisjoint(file.parents):
            kept.append(file)
            continue
        else:
            unknown += 1
        if package is not None and package.permissive:
            kept.append(file)
    left = [package for package in counts if not package.permissive]
    log.info(
        "environment=%s packages=%d files=%d of %d; left out: %d packages without a permissive licence%s, %d "
        "files of no package (licences: any takes all)",
        root,
        len(counts) - len(left),
        len(kept),
        len(files),
        len(left),
        f" ({', '.join(sorted(package.name for package in left)[:4])}{', ...' if len(left) > 4 else ''})"
        if left
        else "",
        unknown,
    )
    if not kept:
        raise DataError(
            f"{root} holds no file of a package whose metadata state a permissive licence ({len(left)} "
            f"packages and {unknown} files of no package are left out); give another folder, or licences: "
            "any for this source"
        )
    return kept, [
        {**vars(package), "files": counts[package]}
        for package in sorted(counts, key=lambda one: one.name.lower())
    ]


def permissive(metadata: str) -> tuple[str, bool]:
    """Return the licence that a package's metadata state, and True if it is known to be permissive.

    `License-Expression` decides where it exists. Otherwise the licence classifiers and the `License` field
    must all be permissive, as far as they name a licence at all. A `License` field that holds a licence's
    text is judged by its first line.

    Args:
        metadata: content of a METADATA file.
    """
    fields = HeaderParser().parsestr(metadata)
    expression = fields.get("License-Expression")
    if expression:
        return str(expression), bool(_expression(str(expression)))
    classifiers = [str(one).split(" :: ") for one in fields.get_all("Classifier", [])]
    stated = [parts[-1] for parts in classifiers if parts[0] == "License" and len(parts) > 1]
    field = str(fields.get("License") or "").strip().partition("\n")[0].strip()
    named = len(field) <= LONGEST_NAME
    verdicts = [_name(one) for one in stated] + ([_expression(field)] if named else [])
    said = "; ".join([*stated, *([field] if field and named and field not in stated else [])])
    return said, True in verdicts and False not in verdicts


def _expression(text: str) -> bool | None:
    """Return whether an SPDX expression, or a licence's name, is permissive; None if it says nothing known.

    `AND` needs both sides, `OR` one. Brackets are evaluated from the inside, and an exception (`WITH`), which
    only grants more, is dropped.
    """
    if (verdict := _name(text)) is not None and not re.search(r"\b(AND|OR|WITH)\b", text):
        return verdict
    while (inner := re.search(r"\(([^()]*)\)", text)) is not None:
        text = f"{text[: inner.start()]} {_WORDS[_flat(inner[1])]} {text[inner.end() :]}"
    return _flat(text)


_WORDS = {True: "MIT", False: "proprietary", None: "unknown"}
"""A name that `_name` gives the verdict of."""


def _flat(text: str) -> bool | None:
    """Evaluate an expression without brackets; `AND` binds more tightly than `OR`."""
    either = []
    for part in re.split(r"\bOR\b", text):
        both = [_name(re.split(r"\bWITH\b", one)[0]) for one in re.split(r"\bAND\b", part)]
        either.append(False if False in both else None if None in both else True)
    return True if True in either else None if None in either else False


def _name(text: str) -> bool | None:
    """Return whether one licence is permissive, by its SPDX identifier or usual name; None if unknown."""
    whole = text.strip().lower()
    short = re.sub(r"\s*\([^)]*\)", "", whole).strip()
    if whole in IDS or short in IDS or NAMES.fullmatch(short):
        return True
    return False if OTHERS.search(whole) else None


def _environments(root: Path, files: Sequence[Path]) -> set[Path]:
    """Return the folders at or below `root` that packages are installed in.

    Such a folder has a usual name, whether or not a package in it has metadata; `root` may have any name if
    one has.
    """
    folders = {file.parent for file in files}
    above = {one for folder in folders for one in (folder, *folder.parents) if one.name in INSTALLED}
    below = {one for one in above if one == root or root in one.parents}
    return below | ({root} if root.is_dir() and any(root.glob("*.dist-info/METADATA")) else set())


def _owners(base: Path) -> dict[str, Package]:
    """Return the package of each installed file, by the file's path."""
    owners: dict[str, Package] = {}
    start = f"{base}/"  # joined as text: a large environment lists a hundred thousand files
    for folder in sorted(base.glob("*.dist-info")):
        record = folder / "RECORD"
        try:
            metadata = (folder / "METADATA").read_text(encoding="utf-8", errors="replace")
            lines = record.read_text(encoding="utf-8").splitlines() if record.is_file() else []
        except FileNotFoundError:
            continue  # no metadata: its files belong to no package
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{folder} cannot be read ({error}); reinstall the package") from error
        name, _, version = folder.name.removesuffix(".dist-info").rpartition("-")
        package = Package(name, version, *permissive(metadata))
        for row in csv.reader(lines):
            if row:
                plain = "//" not in row[0] and "./" not in row[0] and row[0][:1] != "/"
                owners[f"{start}{row[0]}" if plain else str(base / row[0])] = package
    return owners

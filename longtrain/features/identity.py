"""Records the target, data and form that a folder of features was made from, and refuses a run of others."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtrain import files
from longtrain.errors import ConfigError, DataError
from longtrain.features.forms import Form
from longtrain.files import read_json

FORMAT = 1
NAME = "features.json"


@dataclass(frozen=True)
class Identity:
    """Provenance of the features in a folder.

    Args:
        target: the target's name.
        weights: the target's `TargetInfo.weights_hash`.
        data: the name of the data.
        rows: hash of the prepared data; empty if unknown.
        form: storage form.
    """

    target: str
    weights: str
    data: str
    rows: str
    form: Form

    def write(self, folder: Path) -> None:
        """Write the provenance into the folder.

        Raises:
            LongtrainError: the disk is full or not writable.
        """
        values = {**vars(self), "form": self.form.to_json()}
        files.write_files(folder, {NAME: files.as_json({"format": FORMAT, **values})})

    def check(self, folder: Path, there: Identity) -> None:
        """Refuse features that were made from something else; `self` is this run's provenance.

        Raises:
            ConfigError: another target, data or form; the message names both.
        """
        pairs = {
            "target": (_named(there.target, there.weights), _named(self.target, self.weights)),
            "data": (_named(there.data, there.rows), _named(self.data, self.rows)),
        }
        same = {"target": there.weights == self.weights, "data": there.rows == self.rows}
        for what, (theirs, mine) in pairs.items():
            if not same[what]:
                raise ConfigError(
                    f"features in {folder} are of {what} {theirs}, and this run's {what} is {mine}; pass "
                    f"features.folder=OTHER, or the {what} that they are of"
                )
        if there.form != self.form:
            raise ConfigError(
                f"features in {folder} have {there.form}, and this run asks for {self.form}; pass "
                "features.folder=OTHER, or the form that they have"
            )


def read(folder: Path) -> Identity | None:
    """Read the provenance of the features in a folder; None if there are none.

    Raises:
        DataError: the file is damaged, or of another version.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        values = read_json(path)
        if values.pop("format") != FORMAT:
            raise ValueError("another version")
        return Identity(**{**values, "form": Form(**values["form"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} cannot be read ({type(error).__name__}: {error}); delete the folder, and fill it again "
            "with features=fill"
        ) from None


def hash_of(value: Any) -> str:
    """Return the sha256 of a JSON value that identifies data; empty for None."""
    return "" if value is None else hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _named(name: str, digest: str) -> str:
    return f"{name} ({digest[:12] or 'no hash'})"

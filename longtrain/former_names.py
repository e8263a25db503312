"""Names that keys had before: what settings are called now, and how files of earlier versions are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED = {
    "row_tokens": "sequence_tokens",
    "val_rows": "val_sequences",
    "rows_per_step": "sequences_per_step",
    "law": "children",
    "recall_rows": "recall_entries",
    "page_rows": "page_entries",
}
"""Former name of a setting -> its name."""

STORED = {**RENAMED, "want": "outputs", "figures": "metrics", "kept_rows": "kept_entries"}
"""Former name of a key in a file that longtrain wrote -> its name."""

STARTS = "start_"
"""Settings whose names begin so decide how a training begins and nothing after; what was trained before a
setting existed lacks it, and is read all the same."""


ADDED = {"level_inputs": False}
"""Settings that were added later -> the value that goes on with what was trained before they existed."""


def now_called(key: str) -> str:
    """For a key's former name `; it is called NEW now`, for any other an empty string."""
    new = RENAMED.get(key.rpartition(".")[2])
    return f"; it is called {new} now" if new else ""


def with_new_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return one mapping of a stored file with its own keys renamed; what is nested in it stays."""
    return {STORED.get(key, key): value for key, value in values.items()}


def with_new_names(values: Any) -> Any:
    """Return values of a stored file with former names replaced; of a dotted key the last part counts."""
    if isinstance(values, Mapping):
        found = {}
        for key, value in values.items():
            group, dot, name = str(key).rpartition(".")
            found[f"{group}{dot}{STORED.get(name, name)}"] = with_new_names(value)
        return found
    return [with_new_names(value) for value in values] if isinstance(values, list) else values

"""Names that keys of stored files had before, under which results of earlier versions are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STORED = {
    "row_tokens": "sequence_tokens",
    "val_rows": "val_sequences",
    "rows_per_step": "sequences_per_step",
    "law": "children",
    "recall_rows": "recall_entries",
    "page_rows": "page_entries",
    "figures": "metrics",
    "kept_rows": "kept_entries",
}
"""Former name of a key in a file that longtrain wrote -> its name."""

STARTS = "start_"
"""Settings whose names begin so decide how a training begins and nothing after; what was trained before a
setting existed lacks it, and is read all the same."""


def with_new_names(values: Any) -> Any:
    """Return values of a stored file with former names replaced; of a dotted key the last part counts."""
    if isinstance(values, Mapping):
        found = {}
        for key, value in values.items():
            group, dot, name = str(key).rpartition(".")
            found[f"{group}{dot}{STORED.get(name, name)}"] = with_new_names(value)
        return found
    return [with_new_names(value) for value in values] if isinstance(values, list) else values

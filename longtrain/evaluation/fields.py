"""Checks the fields of a published row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longtrain.errors import DataError

REMEDY = "correct the row or leave it out"


def check_fields(
    row: Mapping[str, Any], place: str, what: str, fields: Mapping[str, tuple[type, ...]]
) -> None:
    """Refuse a row without a field or with a field of another type.

    Raises:
        DataError: with the row's place.
    """
    for field, types in fields.items():
        if field not in row:
            raise DataError(
                f"{place}: field '{field}' is missing, there are {', '.join(row) or 'none'}; a row of {what} "
                f"has {', '.join(fields)}: {REMEDY}"
            )
        if not isinstance(row[field], types) or (isinstance(row[field], bool) and bool not in types):
            allowed = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
            found = type(row[field]).__name__
            article = "an" if found[0] in "aeiou" else "a"
            raise DataError(f"{place}: field '{field}' is {article} {found}; it must be {allowed}: {REMEDY}")

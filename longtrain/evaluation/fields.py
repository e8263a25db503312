"""Checks the fields of a published row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longtrain.errors import DataError


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
                f"has {', '.join(fields)}"
            )
        if not isinstance(row[field], types) or (isinstance(row[field], bool) and bool not in types):
            allowed = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
            raise DataError(
                f"{place}: field '{field}' is a {type(row[field]).__name__}; it must be {allowed}"
            )

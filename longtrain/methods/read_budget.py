"""Inference settings of methods that select the part of the cache that each step reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from longtrain.cache.entry_sets import ReadBudget
from longtrain.errors import ConfigError
from longtrain.methods.checked import given_keys
from longtrain.settings import read

READ_KEYS = (
    "budget_tokens",
    "budget_ratio",
    *(field.name for field in fields(ReadBudget) if field.name != "rows"),
)
"""Names of the settings; all but the budget are fields of `ReadBudget`."""


def read_budget(method: str, keys: Mapping[str, Any]) -> ReadBudget:
    """Build a `ReadBudget` from a method's inference settings.

    Args:
        method: name of the method, for messages.
        keys: `READ_KEYS`; missing ones and None have the defaults of `ReadBudget`.

    Raises:
        ConfigError: another key, a share of the prompt, or a value that is not allowed.
    """
    given = given_keys(method, keys, READ_KEYS)
    if (ratio := given.pop("budget_ratio", None)) is not None:
        raise ConfigError(
            f"{method} reads sets of one size, and the budget is {ratio} of the prompt; pass "
            "evict.budget_tokens=1024, or suite.budgets=[512,1024]"
        )
    if "budget_tokens" in given:
        given["rows"] = given.pop("budget_tokens")
    return read(ReadBudget, given, "select")

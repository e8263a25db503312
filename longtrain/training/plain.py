"""Converts nested values to JSON and named tensors and back, so that a checkpoint needs no pickle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from longtrain.errors import ConfigError

TENSOR, PAIRS, FLOAT = "__tensor__", "__pairs__", "__float__"
"""Keys that mark values which JSON does not have."""


def pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Convert a nested value to JSON values, moving its tensors to `tensors` under names of their places.

    Tuples become lists.

    Args:
        value: None, flags, numbers, text, tensors, numpy's numbers, and lists, tuples and mappings of them.
        tensors: receives the tensors.
        where: the name of the value.

    Raises:
        ConfigError: it contains something else.
    """
    if isinstance(value, Tensor):
        tensors[where] = value
        return {TENSOR: where}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [pack(item, tensors, f"{where}.{index}") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        packed = [(key, pack(item, tensors, f"{where}.{key}")) for key, item in value.items()]
        plain = all(isinstance(key, str) and key not in (TENSOR, PAIRS, FLOAT) for key, _ in packed)
        return dict(packed) if plain else {PAIRS: [[key, item] for key, item in packed]}
    raise ConfigError(
        f"the state {where} holds a {type(value).__name__}, which a checkpoint cannot hold; "
        "allowed: numbers, text, tensors, and lists and mappings of them; leave that callback out"
    )


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Convert the result of `pack` back, with lists in place of tuples."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return tensors[value[TENSOR]].clone()
    if FLOAT in value:
        return float(value[FLOAT])
    if PAIRS in value:
        return {key: unpack(item, tensors) for key, item in value[PAIRS]}
    return {key: unpack(item, tensors) for key, item in value.items()}

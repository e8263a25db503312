"""Whether an option's value is of the kind that a policy's dataclass says."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from longtrain.errors import ConfigError

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    types.NoneType: "null",
    dict: "a mapping",
}


def checked(value: Any, hint: Any, key: str) -> Any:
    """The value; a whole number where a number belongs becomes one.

    Args:
        value: what was given.
        hint: the annotation of its field.
        key: its full name, for the message.

    Raises:
        ConfigError: it is of another kind.
    """
    if not _is(value, hint):
        shown = {None: "null", True: "true", False: "false"}.get(value) if _is_word(value) else value
        raise ConfigError(f"{key}={shown}; allowed: {_in_words(hint)}")
    return float(value) if hint is float else value


def _is(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_is(value, one) for one in args)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in args)
    if origin is dict:
        return isinstance(value, Mapping)
    if origin is list:
        return isinstance(value, list)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _in_words(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_in_words, args))
    if origin is Literal:
        return ", ".join(map(str, args))
    kind = origin or hint
    return _WORDS.get(kind, f"a {kind.__name__}")

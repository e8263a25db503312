"""Reads typed settings: a dataclass declares keys and allowed values, and pydantic checks them.

Pydantic is used rather than OmegaConf's structured configs, because annotations can then state the whole
rule: ranges, choices, unions, tuples and token counts such as `4k`. Every error is one line with the key, the
value and the allowed values, which are derived from the annotation.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from longtrain.errors import ConfigError, Gathered

T = TypeVar("T")
LONGEST_NAME = 200
"""Largest length of a folder's name in bytes: file systems allow 255, and `.NAME.lock` must fit too."""
AUTO = "auto"
"""Value of a setting that is chosen automatically."""


@dataclass(frozen=True)
class Words:
    """Annotation that describes the allowed values for error messages, if the type alone does not."""

    text: str


class OneOf:
    """Annotation that restricts a value to a set: `Annotated[int, OneOf(4, 8)]`."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Return the pydantic schema of the check."""
        return handler(Annotated[source, AfterValidator(self._known)])

    def _known(self, value: Any) -> Any:
        if value not in self.values:
            raise ValueError("another value")
        return value


def parse_tokens(value: int | str) -> int:
    """Parse a token count: 512, "512", "1k" (1024), "1.5k", "1m".

    Raises:
        ConfigError: not a positive count.
    """
    text = str(value).strip().lower()
    factor = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:], 1)
    try:
        count = float(text.rstrip("km")) * factor
    except ValueError:
        count = 0.0
    if count < 1 or count != int(count):
        raise ConfigError(f"length '{value}' is no token count; allowed: 512, 1k (1024), 1.5k, 128k")
    return int(count)


def _token_count(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError("a flag is no token count")
    try:
        return parse_tokens(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError("an even number")
    return value


def _different(values: Sequence[Any]) -> Sequence[Any]:
    if len(set(map(str, values))) < len(values):
        raise ValueError("a value is repeated")
    return values


def _name(value: str) -> str:
    for part in value.split("/"):
        if not part.strip() or part[0] == "." or len(part.encode()) > LONGEST_NAME or not part.isprintable():
            raise ValueError("no name of a folder below another")
    return value


Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Name = Annotated[
    str,
    AfterValidator(_name),
    Words(
        "a name, or names with / between them, none of which is empty, begins with a dot or has more than "
        f"{LONGEST_NAME} bytes"
    ),
]
"""The name of a subfolder, without path separators or `..`."""
Tokens = Annotated[int, BeforeValidator(_token_count), Words("a token count such as 512, 4k (4096) or 1.5k")]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
"""A token id in a file: strictly an integer; floats and booleans are refused."""
Kernel = Annotated[int, Field(ge=1), AfterValidator(_odd), Words("1 (off), 3, 5, 7, ...")]
"""Width of a max-pool: an odd number."""
Adaptive = Literal[False, "heads", "layers"]
"""How a budget of KV entries is shared: equally, or among the heads of a layer or of all layers."""
Lengths = Annotated[
    tuple[Tokens, ...],
    Field(min_length=1),
    AfterValidator(_different),
    AfterValidator(lambda lengths: tuple(sorted(lengths))),
    Words("one or more different token counts, such as [512, 4k]"),
]
"""Distinct token counts in ascending order."""
Counts = Annotated[
    tuple[Count, ...],
    Field(min_length=1),
    AfterValidator(_different),
    Words("one or more different whole numbers from 1"),
]
OneOrMore = Annotated[
    tuple[Count, ...],
    BeforeValidator(lambda value: (value,) if type(value) is int else value),
    Field(min_length=1),
    AfterValidator(_different),
    Words("a whole number from 1, or several different ones, such as [1, 8, 32]"),
]


def between(low: float, high: float, kind: type = float) -> Any:
    """Return the annotation of a number from `low` to `high`, both included; `kind` may be `int`."""
    return Annotated[kind, Field(ge=low, le=high)]  # type: ignore[valid-type]


def within(least: float, most: float | None = None) -> Any:
    """Return bounds of a number for an annotation such as `Annotated[int, BOUNDS]`.

    Args:
        least: the smallest allowed value.
        most: the largest allowed value; None: no limit.
    """
    return Field(ge=least, le=most)


NOT_EMPTY = Field(min_length=1)
"""Annotation of a list or string that must not be empty."""


def fulfils(test: Callable[[Any], bool]) -> Any:
    """Return an annotation for any other rule; add `Words` that describe it.

    Args:
        test: returns True for allowed values; called with values of the right type.
    """

    def checked(value: Any) -> Any:
        if not test(value):
            raise ValueError("not allowed")
        return value

    return AfterValidator(checked)


def one_of(names: Iterable[str]) -> Any:
    """Return the annotation of a string that must be one of `names`."""
    return Literal[tuple(names)]  # type: ignore[return-value]


def some_of(names: Iterable[str], *, all_if_empty: bool = True) -> Any:
    """Return the annotation of a list of distinct names, which keeps its order.

    Args:
        names: the allowed names.
        all_if_empty: True reads an empty list or null as all names, in their order; False refuses it.
    """
    known = tuple(names)

    def chosen(values: Any) -> tuple[str, ...]:
        if all_if_empty and values in (None, [], ()):
            return known
        if not isinstance(values, list | tuple) or not values:
            raise ValueError("no list of names")
        _different(values)
        if any(value not in known for value in values):
            raise ValueError("an unknown name")
        return tuple(values)

    return Annotated[tuple[str, ...], BeforeValidator(chosen), Words(f"each once of {', '.join(known)}")]


def made_by(make: Callable[[Any], Any]) -> Any:
    """Return an annotation that converts the typed value before it is checked.

    Args:
        make: the typed value, or an already converted one -> the value; raises ConfigError.
    """
    return BeforeValidator(make)


rules_of: Callable[[type], Mapping[str, Any]] = lru_cache(partial(get_type_hints, include_extras=True))
"""Settings dataclass -> the annotation of each of its fields; they are evaluated once."""


def read(kind: type[T], values: Mapping[str, Any], group: str, *, ignore: Iterable[str] = ()) -> T:
    """Build a settings dataclass from the values of a group of keys.

    Args:
        kind: a dataclass whose annotations declare the allowed values; `__post_init__` may compare keys.
        values: key -> value as typed.
        group: prefix of the keys in messages, such as `suite`.
        ignore: keys that are ignored if the dataclass does not have them.

    Raises:
        ConfigError: an unknown or missing key, or a value that is not allowed.
    """
    hints = rules_of(kind)
    fields = [field for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    known = [field.name for field in fields]
    given = {key: value for key, value in values.items() if key in known or key not in ignore}
    if unknown := [key for key in given if key not in known]:
        raise ConfigError(f"unknown key '{group}.{unknown[0]}'; known: {', '.join(known)}")
    for field in fields:
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and field.name not in given:
            raise ConfigError(f"{group}.{field.name} is missing; allowed: {in_words(hints[field.name])}")
    converted, gathered = {}, Gathered()
    for key, value in given.items():
        with gathered.one():
            converted[key] = convert(value, hints[key], f"{group}.{key}")
    gathered.raise_all()
    return kind(**converted)


def check(settings: Any, group: str) -> None:
    """Check and convert the fields of a settings dataclass; called by its `__post_init__`.

    The rules thus hold for settings built in Python as well as for typed ones.

    Args:
        settings: an instance of a dataclass whose annotations declare the allowed values; may be frozen.
        group: prefix of the keys in messages, such as `method`.

    Raises:
        ConfigError: a value is not allowed.
    """
    hints = rules_of(type(settings))
    for field in dataclasses.fields(settings):
        if field.init:
            value = convert(getattr(settings, field.name), hints[field.name], f"{group}.{field.name}")
            object.__setattr__(settings, field.name, value)


def convert(value: Any, kind: Any, key: str, *, strict: bool = False) -> Any:
    """Convert a value to the annotation `kind`: `3` becomes `3.0` for a float, `4k` 4096 for a token count.

    Args:
        value: the value as typed.
        kind: a type or an annotation such as `Count`, `Lengths` or `Literal["a", "b"] | None`.
        key: the full key, for the message.
        strict: convert only integers to floats; strings are not read as numbers.

    Raises:
        ConfigError: the value is not allowed.
    """
    try:
        return _adapter_of(kind).validate_python(value, strict=strict)
    except ValidationError:
        raise wrong(key, value, in_words(kind)) from None
    except PydanticSchemaGenerationError:  # a class unknown to pydantic: nothing to check
        return value


def from_file(kind: Any, values: Any) -> Any:
    """Convert the values of a JSON file to the type `kind`; keys that a dataclass does not have are ignored.

    Args:
        kind: a type or an annotation such as `list[SomeDataclass]`.
        values: the parsed JSON.

    Raises:
        ValueError: a value has another type; the message gives the place of the first one.
    """
    try:
        return _file_adapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


@lru_cache(maxsize=256)
def _file_adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def wrong(key: str, value: Any, allowed: str) -> ConfigError:
    """Build the error of a value that is not allowed for a key."""
    return ConfigError(f"{key}={_shown(value)}; allowed: {allowed}")


def in_words(kind: Any) -> str:
    """Describe the values that an annotation allows."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        said = [note.text for note in args[1:] if isinstance(note, Words)]
        said += [", ".join(map(_shown, note.values)) for note in args[1:] if isinstance(note, OneOf)]
        return said[0] if said else in_words(args[0]) + _bounds(args[1:])
    if origin in (Union, types.UnionType):
        first, *rest = map(in_words, args)
        return first + "".join(f"{',' * (',' in first)} or {one}" for one in rest)
    if origin is Literal:
        return ", ".join(_shown(arg) for arg in args)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return ", ".join(str(one.value) for one in kind)
    if origin in (list, Sequence) or (origin is tuple and args[-1] is Ellipsis):
        return f"a list, each {in_words(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}: " + ", ".join(in_words(arg) for arg in args)
    if origin in (dict, Mapping) or kind in (dict, Mapping):
        return "a mapping"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return names.get(kind, "anything")


def _bounds(notes: Iterable[Any]) -> str:
    """Describe pydantic's constraints, e.g. `, 1 or more`."""
    found: dict[str, Any] = {}
    for note in notes:
        for part in getattr(note, "metadata", None) or [note]:
            found |= {name: getattr(part, name) for name in ("ge", "gt", "le", "lt") if hasattr(part, name)}
    if {"ge", "le"} <= set(found):
        return f" from {found['ge']} to {found['le']}"
    words = {"ge": "{} or more", "gt": "above {}", "le": "up to {}", "lt": "below {}"}
    return "".join(f", {words[name].format(bound)}" for name, bound in found.items())


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _adapter_of(kind: Any) -> TypeAdapter[Any]:
    """Return the validator of an annotation, which is made once if the annotation can be a key."""
    try:
        return _adapter(kind)
    except TypeError:  # it holds a list or a mapping
        return _adapter.__wrapped__(kind)


@lru_cache(maxsize=1024)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Make pydantic's validator of an annotation; numbers pass as strings, booleans never as numbers."""
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    plain = isinstance(base, type) and dataclasses.is_dataclass(base)
    config = None if plain else ConfigDict(coerce_numbers_to_str=True, arbitrary_types_allowed=True)
    return TypeAdapter(_no_flags(kind), config=config)


def _no_flags(kind: Any) -> Any:
    """Return the annotation with all its `int` and `float` types refusing booleans."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in (int, float):
        return Annotated[kind, BeforeValidator(_number)]
    if origin is Literal:
        return Annotated[kind, BeforeValidator(lambda value: _same_type(value, args))]
    if origin is Annotated:
        return Annotated[(_no_flags(args[0]), *args[1:])]  # type: ignore[return-value]
    if origin in (Union, types.UnionType):
        return Union[tuple(_no_flags(arg) for arg in args)]  # noqa: UP007 (a union made at run time)
    if origin in (list, tuple, dict, Mapping, Sequence):
        inner = tuple(arg if arg is Ellipsis else _no_flags(arg) for arg in args)
        return {Mapping: dict, Sequence: list}.get(origin, origin)[inner if len(inner) > 1 else inner[0]]
    return kind


def _same_type(value: Any, allowed: Sequence[Any]) -> Any:
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise ValueError("another value")  # 0 must not pass as False
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a flag is no number")
    return value

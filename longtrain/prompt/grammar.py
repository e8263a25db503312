"""Converts typed words to Hydra's grammar, so that texts, paths and names arrive as they were typed.

Hydra parses a value as a number, a list, a sweep or a function, and refuses anything else: a path with
an `=`, a comma or a letter of another alphabet. All such conversions are in this module.
"""

from __future__ import annotations

import re

TEXTS = ("prompt",)
"""Keys whose value is free text."""
NAMES = (
    "name", "recipe", "artifact", "init", "home", "run_dir", "resume", "prompt_file", "compare",
    "stop", "push", "verify", "trained_by", "target.path", "target.chat_template", "features.folder",
    "features.dump", "rows",
    "data.name", "data.text", "data.conversations", "data.code", "data.books", "data.instruct",
    "suite.data", "suite.text", "suite.home", "suite.haystack", "suite.squad", "suite.hotpotqa",
    "suite.aime24", "suite.documents", "suite.include",
)  # fmt: skip
"""Keys whose value is a name or a path: `nan`, `1e3` and `007` stay text there, and commas are part of it."""
LISTED = ("artifact", "compare", "stop")
"""Keys of `NAMES` that can have several values, as `[A,B]`."""
PLAIN = re.compile(r"[\w/\-+.%*@?|:]+", re.ASCII)
"""A name that Hydra parses unchanged, unless it looks like a number."""
NUMBER = re.compile(r"[+-]?(?:inf|nan|(?=\.?\d)[\d_]*\.?[\d_]*(?:e[+-]?\d[\d_]*)?)|true|false", re.IGNORECASE)
"""A word that Hydra parses as a number or a boolean."""
QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
STRUCTURE = re.compile(r"""[\[{'"].*|\w+\(.*\)""", re.DOTALL)
"""A list, a mapping, a quoted value, or a Hydra function such as `choice(1,2)`."""
READ = re.compile(r"(?:\$\{[^{}]*\}|[\w/\-+.%*@?|:$\\ ,])*", re.ASCII)
"""Unquoted text that Hydra can parse: words, interpolations, and the commas of a sweep."""
KEY = re.compile(r"[\w/\-+.%*@?|$ ,:=()\[\]{}]+", re.ASCII)
"""A key of a mapping that Hydra can parse, some of its characters behind a backslash."""
FLAT = re.compile(r"""\[[^\[\]{}()'"]*\]""")
"""A flat list of words."""
MISSING = "???"
"""OmegaConf's marker for a missing value."""


def in_grammar(word: str, *, sweeps: bool = False) -> str:
    """Convert a word of the command line, `KEY=VALUE`, to Hydra's grammar.

    The value of a free-text key is taken as typed; that of a name too, unless all of it is in quotes, and
    with `${...}` in it resolved. `null` stays null. Other values are parsed by Hydra, except for characters
    that its grammar lacks.

    Args:
        word: as typed.
        sweeps: True if the command is a sweep, in which commas separate names.
    """
    key, equals, value = word.partition("=")
    name = key.lstrip("+")
    if not equals or name[:1] == "~" or value == "null":
        return word
    if name == "job" and "," in value and value[0] != "[":
        return f"job=[{value}]"
    if name in TEXTS:
        return f"{key}={in_quotes(value)}"
    if name not in NAMES:
        return f"{key}={_readable(value)}"
    if name in LISTED and value[:1] == "[" and value[-1:] == "]":
        return f"{key}=[{_each(value[1:-1])}]"
    if sweeps:
        return word if STRUCTURE.fullmatch(value) else f"{key}={_each(value)}"
    return f"{key}={_name(value)}"


def spelled_out(word: str) -> list[str]:
    """Return a word, or the two that `features=engine:FOLDER` stands for."""
    short, _, folder = word.partition("=engine:")
    return ["features=engine", f"features.folder={folder}"] if short == "features" and folder else [word]


def in_list(names: list[str]) -> str:
    """Names as a Hydra list, each exactly as typed."""
    return f"[{','.join(map(in_quotes, names))}]"


def in_quotes(text: str) -> str:
    """A text as a quoted Hydra value."""
    if text == MISSING:
        return _quoted("${oc.decode:\"'???'\"}")
    return _quoted(re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def _quoted(value: str) -> str:
    """A value in quotes, in which `${...}` is still resolved."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", escaped) + "'"


def _name(value: str) -> str:
    if value == MISSING:
        return in_quotes(value)
    if QUOTED.fullmatch(value) or (PLAIN.fullmatch(value) and not NUMBER.fullmatch(value)):
        return value
    return _quoted(value)


def _each(names: str) -> str:
    """Quote each of several names between commas; a quoted name may contain commas."""
    parts = re.findall(rf"\s*({QUOTED.pattern}|[^,]*?)\s*(?:,|\Z)", names, re.DOTALL)
    return ",".join(map(_name, filter(None, parts)))


def _readable(value: str) -> str:
    """A value that Hydra can parse, in quotes if it could not otherwise."""
    if FLAT.fullmatch(value):
        return f"[{','.join(_readable(item.strip()) for item in value[1:-1].split(','))}]"
    if STRUCTURE.fullmatch(value):
        named = value[0] in "[{"
        return re.sub(rf"({QUOTED.pattern})(\s*:)?", _key, value, flags=re.DOTALL) if named else value
    if READ.fullmatch(value):
        return value
    return _quoted(value)


def _key(found: re.Match[str]) -> str:
    """The key of a mapping without its quotes, which Hydra refuses around a key; any other text as it is.

    A key that would not be a text without them, or has characters that Hydra's keys lack, is left to Hydra.
    """
    name = found[1][1:-1]
    if not found[2] or not KEY.fullmatch(name) or NUMBER.fullmatch(name) or name == "null":
        return found[0]
    return re.sub(r"[^\w/\-+.%*@?|$]", r"\\\g<0>", name) + found[2]

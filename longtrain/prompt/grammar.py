"""What is typed, as Hydra's grammar has it: texts, paths and names arrive as they are typed.

Hydra reads a value as a number, a list, a sweep or a function, and refuses what is none of these: a path with
an `=`, a comma or a letter of another alphabet. Here is the one place where words become Hydra's.
"""

from __future__ import annotations

import re

TEXTS = ("prompt",)
"""Keys whose value is any text."""
NAMES = (
    "name", "recipe", "artifact", "init", "home", "run_dir", "resume", "prompt_file", "compare",
    "stop", "push", "verify", "trained_by", "target.path", "target.chat_template", "features.folder",
    "data.name", "data.text", "data.conversations", "data.code", "data.books", "data.instruct",
    "suite.data", "suite.text", "suite.home", "suite.haystack", "suite.squad", "suite.hotpotqa",
    "suite.aime24", "suite.documents", "suite.requests", "suite.include",
)  # fmt: skip
"""Keys whose value is a name or a path: `nan`, `1e3` and `007` are text there, and commas part of it."""
LISTED = ("artifact", "compare", "stop")
"""Keys of `NAMES` that may have several, as `[A,B]`."""
PLAIN = re.compile(r"[\w/\-+.%*@?|:]+", re.ASCII)
"""A name that Hydra reads as it is, unless it takes it for a number."""
NUMBER = re.compile(r"[+-]?(?:inf|nan|(?=\.?\d)[\d_]*\.?[\d_]*(?:e[+-]?\d[\d_]*)?)|true|false", re.IGNORECASE)
"""A word that Hydra takes for a number or a flag."""
QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
STRUCTURE = re.compile(r"""[\[{'"].*|\w+\(.*\)""", re.DOTALL)
"""A list, a mapping, something in quotes, or a function of Hydra's, such as `choice(1,2)`."""
READ = re.compile(r"(?:\$\{[^{}]*\}|[\w/\-+.%*@?|:$\\ ,])*", re.ASCII)
"""What Hydra reads outside of quotes: words, interpolations, and the commas between the values of a sweep."""
FLAT = re.compile(r"""\[[^\[\]{}()'"]*\]""")
"""A list of words."""
MISSING = "???"
"""OmegaConf's mark of a value that is missing."""


def in_grammar(word: str, *, sweeps: bool = False) -> str:
    """A word of the command line, `KEY=VALUE`, as Hydra's grammar has it.

    The value of a text is taken as it is typed; that of a name too, unless all of it is in quotes, and with
    `${...}` in it resolved. `null` is no text. Other values are Hydra's own to read, but for characters that
    its grammar does not know.

    Args:
        word: as typed.
        sweeps: whether the command is a sweep, in which names with commas are several.
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


def in_list(names: list[str]) -> str:
    """Names as a list of Hydra's, each as it is typed."""
    return f"[{','.join(map(in_quotes, names))}]"


def in_quotes(text: str) -> str:
    """A text as a value of Hydra's that stands for just this text."""
    if text == MISSING:
        return _quoted("${oc.decode:\"'???'\"}")
    return _quoted(re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def _quoted(value: str) -> str:
    """A value in quotes; `${...}` in it is still resolved."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", escaped) + "'"


def _name(value: str) -> str:
    if value == MISSING:
        return in_quotes(value)
    if QUOTED.fullmatch(value) or (PLAIN.fullmatch(value) and not NUMBER.fullmatch(value)):
        return value
    return _quoted(value)


def _each(names: str) -> str:
    """Names between commas; one that is in quotes may hold commas."""
    parts = re.findall(rf"\s*({QUOTED.pattern}|[^,]*?)\s*(?:,|\Z)", names, re.DOTALL)
    return ",".join(map(_name, filter(None, parts)))


def _readable(value: str) -> str:
    """A value that Hydra reads by its grammar, in quotes where it could not."""
    if FLAT.fullmatch(value):
        return f"[{','.join(_readable(item.strip()) for item in value[1:-1].split(','))}]"
    if STRUCTURE.fullmatch(value) or READ.fullmatch(value):
        return value
    return _quoted(value)

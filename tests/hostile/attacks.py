"""What is done to a file: bits flip, parts are lost, values change, and other things stand in its place."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Attack = Callable[[Path, random.Random], str]
"""Changes a file, and says what was done; empty: nothing could be."""


def flip(path: Path, rng: random.Random) -> str:
    """One bit is another."""
    content = bytearray(path.read_bytes())
    if not content:
        return ""
    at, bit = rng.randrange(len(content)), rng.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {at}"


def cut(path: Path, rng: random.Random) -> str:
    """The end is missing."""
    content = path.read_bytes()
    if not content:
        return ""
    keep = rng.randrange(len(content))
    path.write_bytes(content[:keep])
    return f"{keep} of {len(content)} bytes are left"


def blank(path: Path, rng: random.Random) -> str:
    """A stretch is zero, as after a crash of the file system."""
    content = bytearray(path.read_bytes())
    if not content:
        return ""
    at = rng.randrange(len(content))
    size = min(len(content) - at, rng.choice((1, 16, 512)))
    content[at : at + size] = bytes(size)
    path.write_bytes(content)
    return f"{size} bytes from {at} are zero"


def append(path: Path, rng: random.Random) -> str:
    """Something follows."""
    more = rng.choice((b"\0", b"\n", b"garbage\n", b"{}\n", b"\xff\xfe"))
    with path.open("ab") as stream:
        stream.write(more)
    return f"{more!r} follows"


def replace(path: Path, rng: random.Random) -> str:
    """Another thing stands in its place."""
    what = rng.choice(("pipe", "device", "folder", "dangling link", "nothing", "empty", "deep", "not UTF-8"))
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "folder":
        path.mkdir()
    elif what == "dangling link":
        path.symlink_to(path.with_name("not-there"))
    elif what != "nothing":
        deep = rng.choice((b"[", b'{"a":')) * 50_000
        path.write_bytes({"empty": b"", "deep": deep, "not UTF-8": b'{"a": "\xff"}\n'}[what])
    return f"{what} in its place"


def edit(path: Path, rng: random.Random) -> str:
    """A value of a JSON file, or of a line of one, is another, or a key is gone."""
    try:
        text = path.read_text()
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        at = rng.randrange(len(lines))
        value = json.loads(lines[at])
    except (ValueError, UnicodeDecodeError):
        return ""
    said = _edit_value(value, rng)
    lines[at] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")
    return said


def _edit_value(value: Any, rng: random.Random) -> str:
    places = list(_places(value))
    if not places:
        return ""
    holder, key = rng.choice(places)
    before = holder[key]
    if isinstance(holder, dict) and rng.random() < 0.25:
        del holder[key]
        return f"key {key} is gone"
    holder[key] = rng.choice(
        [one for one in _others(before) if one != before or type(one) is not type(before)]
    )
    return f"{key}: {str(before)[:40]} -> {str(holder[key])[:40]}"


def _places(value: Any) -> Any:
    """Every (container, key) in a JSON value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _others(value: Any) -> list[Any]:
    """Values to put in a value's place: near ones, of other types, and absurd ones."""
    absurd: list[Any] = [None, [], {}, "", "../../x", -1, 0, 1.5, 10**30, True, [[]], "x" * 5000]
    if isinstance(value, bool):
        return [not value, *absurd]
    if isinstance(value, int):
        return [value + 1, value - 1, value * 2, *absurd]
    if isinstance(value, float):
        return [value * 1.5, -value, *absurd]
    if isinstance(value, str):
        return [value[::-1], value + "x", value.upper(), *absurd]
    if isinstance(value, list):
        return [value[::-1], value[1:], [*value, *value[:1]], *absurd]
    return [{}, *absurd]


ATTACKS: dict[str, Attack] = {
    "flip": flip,
    "cut": cut,
    "blank": blank,
    "append": append,
    "replace": replace,
    "edit": edit,
}

"""Machine text (PTX) that kernels have in place of Triton's own operations, and the layout that it needs.

A tensor of such a text has 16 registers a thread and is flat, [4 k, WARPS, 8 g, 4 t, 4 c]: register 4 k + c
of the thread with lane 4 g + t. Triton gives that layout to a tensor whose elements lie in fours, but it
promises nothing, so `laid_out` looks at what it has compiled.
"""

from __future__ import annotations

import re
import struct
from typing import Any

from longtrain.kernels.devices import give_up

PER_THREAD = 16
"""Registers of a thread that a tensor of a text fills."""

_sound: dict[str, bool] = {}
"""By a compiled kernel's hash, whether its tensors are laid out as its text takes them."""


def operands(outputs: int, inputs: str) -> str:
    """Constraints of a text that has so many fp32 outputs; `inputs` has a letter a tensor."""
    return ",".join(["=f"] * (outputs * PER_THREAD) + [kind for kind in inputs for _ in range(PER_THREAD)])


def tensors(first: int, count: int) -> list[list[str]]:
    """Registers of some of a text's operands."""
    return [[f"${PER_THREAD * (first + x) + i}" for i in range(PER_THREAD)] for x in range(count)]


def float_word(value: float) -> str:
    """An fp32 number as a text has it."""
    return f"0f{struct.pack('>f', value).hex().upper()}"


class MachineText:
    """Lines of a text, and names of its registers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def new(self, kind: str = "b32") -> str:
        """A register of its own."""
        name = f"%v{self.count}"
        self.count += 1
        self.lines.append(f".reg .{kind} {name};")
        return name

    def add(self, line: str) -> None:
        """Append an instruction."""
        self.lines.append(line + ";")

    def made(self, operation: str, *of: str, kind: str = "b32") -> str:
        """The register that an operation's result is in."""
        name = self.new(kind)
        self.add(f"{operation} {name}, {', '.join(of)}")
        return name

    def zeros(self) -> list[str]:
        """Sums of a product, before it."""
        return [self.made("mov.f32", "0f00000000", kind="f32") for _ in range(4)]

    def product(self, sums: list[str], left: list[str], right: list[str], kind: str = "f16") -> None:
        """Add left right to the sums by an m16n8k16 product: 4, 2 and 4 registers of a thread."""
        c, a, b = (", ".join(x) for x in (sums, left, right))
        self.add(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{c}}}, {{{a}}}, {{{b}}}, {{{c}}}"
        )

    def text(self) -> str:
        """The whole text."""
        return "{\n" + "\n".join(self.lines) + "\n}"


def lays_out(ttgir: str, warps: int) -> bool:
    """Whether every tensor of the machine text has four neighbours in a thread, and threads in order."""
    blocked = rf"blocked<{{sizePerThread = \[4\], threadsPerWarp = \[32\], warpsPerCTA = \[{warps}\],"
    register = rf"register = \[\[1\], \[2\], \[{128 * warps}\], \[{256 * warps}\]\]"
    warp = ", ".join(rf"\[{128 << i}\]" for i in range(warps.bit_length() - 1))
    lane = r"lane = \[\[4\], \[8\], \[16\], \[32\], \[64\]\]"
    linear = rf"linear<{{{register}, {lane}, warp = \[{warp}\],"
    meant = re.findall(rf"^(#\w+) = #ttg\.(?:{blocked}|{linear})", ttgir, re.MULTILINE)
    lines = [line for line in ttgir.splitlines() if f"packed_element = {PER_THREAD} " in line]
    found = {name for line in lines for name in re.findall(r"x[if]32, (#\w+)>", line.partition("packed_")[2])}
    return bool(found) and found <= set(meant)


def laid_out(built: Any, warps: int) -> bool:
    """`lays_out` of a compiled kernel, told once a name where it is not so; an interpreted one has none."""
    if built is None or not hasattr(built, "asm"):
        return True
    if built.hash not in _sound:
        _sound[built.hash] = lays_out(built.asm["ttgir"], warps)
        name = built.metadata.name
        if not _sound[built.hash]:
            give_up(name, f"lays tensors out in a way that the fast kernel {name} is not written for")
    return _sound[built.hash]

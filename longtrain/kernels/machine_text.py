"""Inline PTX in kernels, and the register layout that it needs.

An operand tensor of such PTX has 16 registers per thread and is flat, [4 k, WARPS, 8 g, 4 t, 4 c]: register
4 k + c of the thread with lane 4 g + t. Triton gives that layout to a tensor whose elements are grouped by
four, but does not guarantee it, so `laid_out` checks the compiled kernel.
"""

from __future__ import annotations

import re
import struct
from typing import Any

from longtrain.kernels.devices import give_up

PER_THREAD = 16
"""Registers per thread of an operand tensor."""

_sound: dict[str, bool] = {}
"""By a compiled kernel's hash: True if its tensors have the layout that its PTX needs."""


def operands(outputs: int, inputs: str) -> str:
    """Constraints of inline PTX with so many fp32 output tensors; `inputs` has a letter for each tensor."""
    return ",".join(["=f"] * (outputs * PER_THREAD) + [kind for kind in inputs for _ in range(PER_THREAD)])


def tensors(first: int, count: int) -> list[list[str]]:
    """Register names of some operand tensors."""
    return [[f"${PER_THREAD * (first + x) + i}" for i in range(PER_THREAD)] for x in range(count)]


def float_word(value: float) -> str:
    """An fp32 constant in PTX notation."""
    return f"0f{struct.pack('>f', value).hex().upper()}"


class MachineText:
    """Builds PTX line by line and names its registers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def new(self, kind: str = "b32") -> str:
        """Declare a new register."""
        name = f"%v{self.count}"
        self.count += 1
        self.lines.append(f".reg .{kind} {name};")
        return name

    def add(self, line: str) -> None:
        """Append an instruction."""
        self.lines.append(line + ";")

    def made(self, operation: str, *of: str, kind: str = "b32") -> str:
        """Append an operation; returns the register of its result."""
        name = self.new(kind)
        self.add(f"{operation} {name}, {', '.join(of)}")
        return name

    def zeros(self) -> list[str]:
        """Four fp32 registers set to 0, the accumulators of a product."""
        return [self.made("mov.f32", "0f00000000", kind="f32") for _ in range(4)]

    def product(self, sums: list[str], left: list[str], right: list[str], kind: str = "f16") -> None:
        """Append sums += left @ right (m16n8k16) with 4, 4 and 2 registers per thread."""
        c, a, b = (", ".join(x) for x in (sums, left, right))
        self.add(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{c}}}, {{{a}}}, {{{b}}}, {{{c}}}"
        )

    def text(self) -> str:
        """The PTX as one string."""
        return "{\n" + "\n".join(self.lines) + "\n}"


def lays_out(ttgir: str, warps: int) -> bool:
    """True if every operand tensor of inline PTX has the layout above: four neighbours per thread."""
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
    """`lays_out` of a compiled kernel, with one warning per kernel if not; True for interpreted kernels."""
    if built is None or not hasattr(built, "asm"):
        return True
    if built.hash not in _sound:
        _sound[built.hash] = lays_out(built.asm["ttgir"], warps)
        name = built.metadata.name
        if not _sound[built.hash]:
            give_up(name, f"lays tensors out in a way that the fast kernel {name} is not written for")
    return _sound[built.hash]

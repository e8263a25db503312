"""Compiles the Triton kernels for a GPU that need not be there, and reads what the compiler made of them.

Registers, stack, shared memory and the instructions of the inner loop say most of what matters to a kernel's
speed before it is ever run: spills, narrow loads, conversions. The assembler and the disassembler are those
that triton brings.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha1
from pathlib import Path
from typing import Any, TypeAlias

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

HOPPER = 90
"""Compute capability 9.0, as triton writes it."""

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_LABEL = re.compile(r"^\s*(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")

_Places: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Binary:
    """What the compiler made of a kernel.

    Args:
        registers: of a thread.
        stack_bytes: of a thread; spilled registers lie there.
        shared_bytes: of a program.
        instructions: machine instructions in order, without operands (`HMMA.16816.F32`).
        operands: of each of them, the result first.
        loops: of each backward branch, its first and last instruction's positions.
        skips: of each forward branch, its own position and the one that it leads to.
        ttgir: triton's own form of the kernel, with the layout of every tensor.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    instructions: tuple[str, ...]
    operands: tuple[tuple[str, ...], ...]
    loops: _Places
    skips: _Places
    ttgir: str

    def count(self, prefix: str, within: tuple[int, int] | None = None) -> int:
        """Instructions whose name begins so, in all or in a loop."""
        first, last = within or (0, len(self.instructions) - 1)
        return sum(name.startswith(prefix) for name in self.instructions[first : last + 1])

    def loop_of(self, prefix: str) -> tuple[int, int]:
        """The loop with most instructions of that name: the inner loop, if the name is chosen well.

        Raises:
            ValueError: no loop has one.
        """
        best = max(self.loops, key=lambda loop: self.count(prefix, loop), default=(0, -1))
        if not self.count(prefix, best):
            raise ValueError(f"no loop with {prefix} in {Counter(self.instructions).most_common(5)}")
        return best

    def later_rounds(self, prefix: str) -> Binary:
        """The same without what the loop of `loop_of` skips once the kernel in front has been waited for.

        That is what the narrowest branch around a wait in this loop skips; a loop may have no wait.

        Raises:
            ValueError: no such loop, or a wait in it that each round comes to.
        """
        first, last = self.loop_of(prefix)
        waits = [at for at in range(first, last + 1) if self.instructions[at] == "ACQBULK"]
        inside = [(at, to) for at, to in self.skips if first <= at and to <= last + 1]
        skipped: set[int] = set()
        for wait in waits:
            around = [range(at + 1, to) for at, to in inside if at < wait < to]
            if not around:
                raise ValueError(f"no branch around the wait at {wait} in the loop {first} to {last}")
            skipped.update(min(around, key=len))
        kept = [at for at in range(len(self.instructions)) if at not in skipped]
        place = {at: i for i, at in enumerate(kept)}
        return replace(
            self,
            instructions=tuple(self.instructions[at] for at in kept),
            operands=tuple(self.operands[at] for at in kept),
            loops=tuple((place[a], place[b]) for a, b in self.loops if a in place and b in place),
            skips=(),
        )


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    aligned: Sequence[str] = (),
    warps: int = 4,
    stages: int = 3,
    registers: int | None = None,
    capability: int = HOPPER,
    **options: Any,
) -> Binary:
    """Compile a kernel for a GPU that need not be there.

    Args:
        kernel: a `triton.jit` or `gluon.jit` function.
        types: triton's type of each argument (`*bf16`, `fp32`); arguments named nowhere are `i32`.
        constants: values of the constexpr arguments.
        aligned: further arguments that are multiples of 16; pointers are taken to be.
        warps: of a program.
        stages: tiles in flight, where the kernel does not say.
        registers: most of a thread.
        capability: of the GPU.
        options: further options of triton's compiler.
    """
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    even = {i for i, name in enumerate(names) if signature[name].startswith("*") or name in aligned}
    written_in = GluonASTSource if kernel.is_gluon() else ASTSource
    source = written_in(
        fn=kernel,
        signature=signature,
        constexprs=dict(constants),
        attrs={(i,): [["tt.divisibility", 16]] for i in even},
    )
    options |= {"num_warps": warps, "num_stages": stages}
    if registers is not None:
        options["maxnreg"] = registers
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", cubin)
        text = _tool("nvdisasm", "-c", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {usage!r}")
    sizes = int(found[1]), int(found[2]), int(built.metadata.shared)
    return Binary(*sizes, *_read(text), ttgir=built.asm["ttgir"])


def roundings(built: Binary, within: tuple[int, int]) -> Counter[str]:
    """How often a loop has each form of fp32 product that is added to something without being rounded before.

    A form is of which sums and products the operands are made in turn. Names of registers do not count, nor
    which factor or summand comes first; what is loaded, chosen or exchanged is taken as it is. Parts of a
    kernel that compute the same for other rows must have the same forms: where one rounds a product before
    it is added and the other does not, their last bits differ.
    """
    forms: dict[str, str] = {}
    found: Counter[str] = Counter()

    def form(word: str) -> str:
        name = word.strip("-|").removesuffix(".reuse").strip("|")
        return ("-" if word.startswith("-") else "") + forms.get(name, "")

    first, last = within
    for name, (to, *of) in zip(
        built.instructions[first : last + 1], built.operands[first : last + 1], strict=True
    ):
        kind = name.split(".")[0]
        if kind in ("FADD", "FMUL", "FFMA"):
            parts = [form(word) for word in of]
            forms[to] = sha1(repr((kind, sorted(parts[:2]), parts[2:])).encode()).hexdigest()[:12]
            found[forms[to]] += kind == "FFMA"
        elif kind == "FMNMX":  # exact, whatever comes first
            forms[to] = "most"
        elif kind == "MUFU":
            forms[to] = sha1((name + form(of[0])).encode()).hexdigest()[:12]
        elif kind == "MOV" or name.startswith("IMAD.MOV"):
            forms[to] = form(of[-1])
        elif kind in ("STL", "LDL"):  # a spilled register keeps its form
            forms[to] = forms.get(of[0].removesuffix(".reuse"), "")
        elif to[:1] == "R" and to[1:].isdigit():  # a wide load or a product of matrices fills several
            wide = 4 if kind == "HMMA" or name.endswith(".128") else 2 if name.endswith(".64") else 1
            for i in range(wide):
                forms.pop(f"R{int(to[1:]) + i}", None)
    return +found


def read_at_once(built: Binary, within: tuple[int, int], soon: int = 200) -> list[str]:
    """Instructions of a loop that read what one of the `soon` instructions before loads from global memory.

    A load at the end of a round and its use at the start of the next are not seen.
    """
    first, last = within
    loaded: dict[str, int] = {}
    found = []
    for at in range(first, last + 1):
        name, (to, *of) = built.instructions[at], built.operands[at]
        read = {one for word in of for one in re.findall(r"(?<![A-Z])R\d+", word)}
        if any(at - loaded.get(one, at - soon) < soon for one in read):
            found.append(f"{name} {to}, {', '.join(of)}")
        if to[:1] == "R" and to[1:].isdigit():
            for i in range(4 if name.endswith(".128") else 2 if name.endswith(".64") else 1):
                loaded.pop(f"R{int(to[1:]) + i}", None)
                if name.startswith("LDG."):
                    loaded[f"R{int(to[1:]) + i}"] = at
    return found


def _tool(name: str, *arguments: object) -> str:
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    command = [str(program), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _read(text: str) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], _Places, _Places]:
    """Names and operands of all instructions of a disassembly, the loops, and the forward branches."""
    names: list[str] = []
    operands: list[tuple[str, ...]] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(names)
        if found := _INSTRUCTION.search(line):
            if found[1].startswith("BRA") and (target := _TARGET.search(found[2])):
                branches.append((len(names), target[1]))
            names.append(found[1])
            operands.append(tuple(found[2].strip().split(", ")))
    loops = tuple((labels[to], at) for at, to in branches if labels.get(to, at + 1) <= at)
    skips = tuple((at, labels[to]) for at, to in branches if labels.get(to, at) > at)
    return tuple(names), tuple(operands), loops, skips

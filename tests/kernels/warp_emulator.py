"""Runs the machine text of kernels on a CPU, so that interpreted kernels need no other path.

Tensors are flat, [4 k, threads, 4 c], and hold register 4 k + c of a thread, as
`kernels.machine_text` says. A text of one register has tensors of any shape.
"""

import re
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

FRAGMENT = 16


def install(monkeypatch) -> None:
    """Interpreted kernels run their machine text here."""
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", emulated, raising=False)


def emulated(self, text, constraints, values, types, pure, pack):
    """What triton's builder makes of a text: tensors of fp32."""
    if pack == 1:
        (value,) = values
        (found,) = run(text, [np.ascontiguousarray(value.data).reshape(-1).view(np.uint32)], 1)
        whole = TensorHandle(found.reshape(value.data.shape), tl.float32)
        return SimpleNamespace(get_result=lambda _: whole)
    registers = [one for value in values for one in registers_of(value.data)]
    found = run(text, registers, FRAGMENT * len(types))
    flat = [flat_of(found[FRAGMENT * i : FRAGMENT * (i + 1)]) for i in range(len(types))]
    handles = [TensorHandle(x, tl.float32) for x in flat]
    return SimpleNamespace(get_result=handles.__getitem__)


def registers_of(flat: np.ndarray) -> list[np.ndarray]:
    """A tensor's registers, each [threads] of 32 bits."""
    x = flat.reshape(4, -1, 4)
    return [np.ascontiguousarray(x[k, :, c]).view(np.uint32) for k in range(4) for c in range(4)]


def flat_of(registers: list[np.ndarray]) -> np.ndarray:
    return np.stack(registers, 0).reshape(4, 4, -1).transpose(0, 2, 1).reshape(-1)


def run(text: str, inputs: list[np.ndarray], outputs: int) -> list[np.ndarray]:
    """Values of a text's first `outputs` operands, fp32; the inputs are the operands behind them."""
    machine = _Machine(len(inputs[0]))
    for i, value in enumerate(inputs):
        machine.registers[f"${outputs + i}"] = value
    for line in text.strip("{}\n").splitlines():
        machine.step(line.rstrip(";"))
    return [machine.registers[f"${i}"].view(np.float32) for i in range(outputs)]


class _Machine:
    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.registers = {"%laneid": (np.arange(threads) % 32).astype(np.uint32)}
        self.running = np.full(threads, True)
        """Threads whose warp has not jumped ahead."""

    def read(self, name: str) -> np.ndarray:
        if name in self.registers:
            return self.registers[name]
        value = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full(self.threads, value, np.uint32)

    def step(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name.startswith(".reg"):
            return
        if line.endswith(":"):
            self.running = np.full(self.threads, True)
            return
        if name.startswith("@!"):
            self.running = self.running & (self.read(name[2:]) != 0)
            return
        if name.startswith("mma.sync.aligned.m16n8k16.row.col.f32"):
            parts = [part.split(", ") for part in re.findall(r"{([^}]*)}", rest)]
            _, a, b, c = ([self.read(one) for one in part] for part in parts)
            pairs = brain_halves if name.endswith("bf16.bf16.f32") else halves
            for register, value in zip(parts[0], product(a, b, c, pairs), strict=True):
                self.write(register, value)
            return
        to, *of = rest.split(", ")
        self.write(to, OPERATIONS[name](*(self.read(one) for one in of)))

    def write(self, name: str, value: np.ndarray) -> None:
        old = self.registers.get(name, value)
        self.registers[name] = np.where(self.running, value, old)


def halves(x: np.ndarray) -> np.ndarray:
    return x.view(np.float16).reshape(-1, 2).astype(np.float64)


def brain_halves(x: np.ndarray) -> np.ndarray:
    return np.stack((x << 16, x & np.uint32(0xFFFF0000)), -1).view(np.float32).astype(np.float64)


def as_halves(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.astype(np.float16)).view(np.uint32).reshape(-1)


def as_float(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).view(np.uint32)


def single(x: np.ndarray) -> np.ndarray:
    return x.view(np.float32).astype(np.float64)


def shuffled(x, lane, *_):
    warp = np.arange(len(x)) // 32 * 32
    return x[warp + lane]


def product(a, b, c, pairs):
    """m16n8k16 of every warp: fragments as the instruction set's manual has them."""
    warps = len(c[0]) // 32
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    left, right, sums = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8)), np.zeros((warps, 16, 8))
    for i, register in enumerate(a):
        for e in range(2):
            left[:, g + 8 * (i % 2), 2 * t + e + 8 * (i // 2)] = pairs(register)[:, e].reshape(warps, 32)
    for i, register in enumerate(b):
        for e in range(2):
            right[:, 2 * t + e + 8 * i, g] = pairs(register)[:, e].reshape(warps, 32)
    for i, register in enumerate(c):
        sums[:, g + 8 * (i // 2), 2 * t + i % 2] = single(register).reshape(warps, 32)
    sums += left @ right
    return [as_float(sums[:, g + 8 * (i // 2), 2 * t + i % 2].reshape(-1)) for i in range(4)]


def permuted(x, y, chosen):
    """Four of the eight bytes of x and y, as the digits of `chosen` say."""
    both = x.astype(np.uint64) | y.astype(np.uint64) << np.uint64(32)
    byte = [(both >> np.uint64(8 * (int(chosen[0]) >> 4 * i & 7))) & np.uint64(255) for i in range(4)]
    return sum(one << np.uint64(8 * i) for i, one in enumerate(byte)).astype(np.uint32)


TABLES = {0xE4: lambda x, y, z: (x & z) | (y & ~z), 0xEA: lambda x, y, z: (x & y) | z}
"""Operations of three words, by the number that the instruction has for them."""
OPERATIONS = {
    "prmt.b32": permuted,
    "shr.u32": lambda x, n: x >> n,
    "shr.s32": lambda x, n: (x.view(np.int32) >> n.view(np.int32)).view(np.uint32),
    "setp.eq.s32": lambda x, y: (x == y).astype(np.uint32),
    "selp.b32": lambda x, y, chosen: np.where(chosen != 0, x, y),
    "shl.b32": lambda x, n: x << n,
    "and.b32": lambda x, y: x & y,
    "add.u32": lambda x, y: x + y,
    "mov.b32": lambda x: x.copy(),
    "mov.u32": lambda x: x.copy(),
    "mov.f32": lambda x: x.copy(),
    "lop3.b32": lambda x, y, z, kind: TABLES[int(kind[0])](x, y, z),
    "lg2.approx.ftz.f32": lambda x: as_float(np.log2(single(x))),
    "neg.f16x2": lambda x: x ^ np.uint32(0x80008000),
    "mul.rn.f16x2": lambda x, y: as_halves(halves(x) * halves(y)),
    "fma.rn.f16x2": lambda x, y, z: as_halves(halves(x) * halves(y) + halves(z)),
    "add.f32": lambda x, y: as_float(single(x) + single(y)),
    "mul.f32": lambda x, y: as_float(single(x) * single(y)),
    "fma.rn.f32": lambda x, y, z: as_float(single(x) * single(y) + single(z)),
    "cvt.rn.f16x2.f32": lambda high, low: as_halves(np.stack((single(low), single(high)), -1)),
    "shfl.sync.idx.b32": shuffled,
    "setp.ne.f32": lambda x, y: (single(x) != single(y)).astype(np.uint32),
    "setp.ne.or.f32": lambda x, y, also: ((single(x) != single(y)) | (also != 0)).astype(np.uint32),
    "vote.sync.any.pred": lambda x, *_: x.reshape(-1, 32).any(1).repeat(32).astype(np.uint32),
}

"""The operators between a layer's products: Triton (interpreted, or on a GPU) against plain torch."""

from __future__ import annotations

import os
from importlib import import_module

import pytest
import torch

pytest.importorskip("triton")

from longtrain.kernels import fused_layer
from longtrain.kernels.fused_layer import Angles, RowPositions, Slots

CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Two roundings to the dtype."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLACES = [("cpu", torch.float32), ("cpu", torch.float16)] if INTERPRETED else []
PLACES += [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in CLOSE]
WIDE = 4096 if torch.cuda.is_available() else 130


EIGHT_B = {
    "_add_rms_norm_kernel": ({"E": 4096, "WIDTH": 4096, "ADD": True}, {"eps": "fp32"}, 8),
    "_enter_kernel": (
        {"E": 4096, "WIDTH": 4096, "F": 64, "HALF": 64, "PATH": True, "STEPS": True},
        {
            **dict.fromkeys(("id_ptr", "path_ptr", "pos_ptr"), "*i64"),
            "frequency_ptr": "*fp32",
            "eps": "fp32",
            "scaling": "fp32",
            "embed_scale": "fp32",
        },
        8,
    ),
    "_rotate_kernel": (
        {
            "H": 32,
            "G": 8,
            "D": 128,
            "R": 128,
            "HALF": 64,
            "HEADS": 4,
            "NEIGHBOURS": False,
            "NORM": True,
            "WRITE": True,
            "PER_HEAD": False,
            "WRAP": 384,
            "FIXED": 4,
            "COUNT": True,
        },
        {"eps": "fp32", "slot_ptr": "*i64", "count_ptr": "*i64"},
        1,
    ),
    "_swiglu_kernel": ({"size": 14336, "COLUMNS": 1024}, {}, 4),
    "_write_kernel": (
        {
            "G": 8,
            "D": 128,
            "HEADS": 8,
            "WIDTH": 128,
            "PER_HEAD": False,
            "WRAP": 0,
            "FIXED": 0,
            "COUNT": True,
        },
        {"slot_ptr": "*i64", "count_ptr": "*i64"},
        4,
    ),
    "_move_kernel": (
        {"P": 6, "D": 128, "ROWS": 8, "WIDTH": 128, "PER_HEAD": False, "WRAP": 384},
        {"first_ptr": "*i64", "path_ptr": "*i64"},
        1,
    ),
    "_rotary_kernel": (
        {"F": 64, "WIDTH": 64},
        {"pos_ptr": "*i64", "frequency_ptr": "*fp32", "scaling": "fp32"},
        2,
    ),
}
"""Constants of each kernel at the shape of Llama-3.1-8B, types that are not bf16 pointers, warps."""


PER_HEAD = {"PER_HEAD": True, "WRAP": 0, "FIXED": 0, "COUNT": False}
"""After eviction each KV head has its own slots; there is no ring."""


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel cannot be compiled")
@pytest.mark.parametrize(
    ("name", "others"),
    [
        *((name, {}) for name in EIGHT_B),
        *((name, PER_HEAD) for name in ("_rotate_kernel", "_write_kernel", "_move_kernel")),
    ],
)
def test_kernels_compile_for_hopper_without_spills(name, others):
    """Wide loads: 16 bytes a thread wherever the row is long enough."""
    import aot

    from longtrain.kernels.fused_layer import kernel as fused_layer_triton

    constants, types, warps = EIGHT_B[name]
    jit = getattr(fused_layer_triton, name)
    pointers = {arg: "*bf16" for arg in jit.arg_names if arg.endswith("_ptr")}
    constants = {**constants, **{key: others[key] for key in constants.keys() & others}, "CHAINED": True}
    strides = [arg for arg in jit.arg_names if arg[-2:] in ("_n", "_b", "_g", "_s", "_t", "_v")]
    binary = aot.compile_kernel(jit, {**pointers, **types}, constants, aligned=strides, warps=warps)
    # reducing an angle to the first quadrant exactly takes a few words of local memory
    assert binary.stack_bytes == 0 or name in ("_rotary_kernel", "_enter_kernel")
    assert binary.registers <= 128
    assert binary.count("LDG.E") and not binary.count("LDG.E.U8")


def made(device, dtype, *shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng).to(device, dtype)


def reference(monkeypatch, name, *args, **kwargs):
    """The same call in plain torch."""
    with monkeypatch.context() as patch:
        patch.setattr(fused_layer, "kernels_serve", lambda x: False)
        return getattr(fused_layer, name)(*args, **kwargs)


def kernel(monkeypatch, name, *args, **kwargs):
    with monkeypatch.context() as patch:
        patch.setattr(fused_layer, "kernels_serve", lambda x: True)
        return getattr(fused_layer, name)(*args, **kwargs)


def close(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=CLOSE[a.dtype], atol=CLOSE[a.dtype])


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("width", [48, WIDE])
@pytest.mark.parametrize("adds", [False, True])
def test_add_rms_norm(device, dtype, width, adds, monkeypatch):
    x = made(device, dtype, 5, width)
    add = made(device, dtype, 5, 2 * width, seed=1)[:, :width] if adds else None
    weight = made(device, dtype, width, seed=2)
    args = (x, add, weight, 1e-5)
    got, expected = (way(monkeypatch, "add_rms_norm", *args) for way in (kernel, reference))
    close(got, expected)
    assert (got[0] is x) == (not adds)


@pytest.mark.corners
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(
    ("path", "ahead", "steps", "scale"),
    [(False, 0, False, 1.0), (False, 3, False, 1.0), (True, 2, True, 6.9375)],
)
def test_rows_enter(device, dtype, constant, path, ahead, steps, scale, monkeypatch):
    """Embeddings, norm, cos and sin have the bits of the operators that do one of these each."""
    E, D, B, T = 48, 24, 2, 3
    table, weight = made(device, dtype, 30, 2 * E)[:, :E], made(device, dtype, E, seed=2)
    ids = torch.randint(30, (5, B), generator=torch.Generator().manual_seed(0)).to(device).T
    at_BT = torch.tensor([[0, 2, 4], [0, 1, 0]], device=device) if path else None
    angles = Angles(torch.linspace(1.0, 0.01, D // 2, device=device), 1.5)

    def rope(pos):
        cos, sin = fused_layer.rotary(pos.flatten(), angles.frequency_F, angles.scaling, dtype)
        return cos.view(*pos.shape, D), sin.view(*pos.shape, D)

    chosen = ids.gather(1, at_BT) if path else ids[:, :T]
    first = torch.tensor([[700, 1], [9, 1]], device=device)[:, 0]  # a view, as a table's first column is
    pos = first[:, None] + ahead + torch.arange(T, device=device) * steps
    found = []
    for way in (kernel, reference):
        with monkeypatch.context() as patch:
            patch.setattr(fused_layer, "kernels_serve", lambda x, own=way is kernel: own)
            expected_rope = rope(pos)
        entry = made(device, dtype, B * T, 2 * E)
        x, normed, turns = way(
            monkeypatch, "enter_rows", ids if path else ids[:, :T], table, (weight, 1e-5),
            RowPositions.after(first, T, ahead=ahead, steps=steps), angles if constant else rope,
            path_BT=at_BT, normed_NE=entry[:, E:], embed_scale=scale,
        )  # fmt: skip
        expected = way(monkeypatch, "add_rms_norm", scale * table[chosen.flatten()], None, weight, 1e-5)
        assert (
            torch.equal(x, expected[0])
            and torch.equal(normed, expected[1])
            and torch.equal(normed, entry[:, E:])
        )
        for part, expected in zip(turns, expected_rope, strict=True):
            assert torch.equal(part, expected.view(B * T, D)) or not constant
        found.append((x, normed, *turns))
    close(*found)


@pytest.mark.corners
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("heads", "dim"), [((4, 2), 16), ((6, 1), 24), ((5, 5), 128)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("part", "neighbours"), [(1, False), (2, False), (1, True), (2, True)])
def test_rotate_heads(device, dtype, heads, dim, normed, part, neighbours, monkeypatch):
    n, R = sum(heads) + heads[1], dim // part
    qkv = made(device, dtype, 3, n * dim)
    angle = made(device, torch.float32, 3, R // 2, seed=1).repeat(1, 2)
    rope = angle.cos().to(dtype), angle.sin().to(dtype)
    norms = tuple(made(device, dtype, dim, seed=s) for s in (2, 3)) if normed else None
    how = {"norms": norms, "neighbours": neighbours}
    expected = reference(monkeypatch, "rotate_heads", qkv.clone(), rope, heads, **how)
    got = kernel(monkeypatch, "rotate_heads", qkv, rope, heads, **how)
    close(got, expected)
    assert got[2].data_ptr() == qkv.data_ptr() + sum(heads) * dim * qkv.element_size()


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("width", [80, 1500])
def test_swiglu(device, dtype, width, monkeypatch):
    x = made(device, dtype, 3, 2 * width)
    close([kernel(monkeypatch, "swiglu", x)], [reference(monkeypatch, "swiglu", x)])


@pytest.mark.corners
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("rows", "kv_heads", "dim"), [(1, 2, 16), (5, 3, 24)])
@pytest.mark.parametrize(
    ("at", "wrap", "counts", "fixed"),
    [(0, None, None, 0), (2, 7, None, 0), (0, 8, (3, 0), 0), (1, 6, None, 3)],
)
def test_write_rows(device, dtype, rows, kv_heads, dim, at, wrap, counts, fixed, monkeypatch):
    """Exactly those slots of that layer change, in either."""
    new = made(device, dtype, 2, rows, 2 * kv_heads, dim).transpose(1, 2)
    k, v = new[:, :kv_heads], new[:, kv_heads:]
    slots = torch.tensor([[3, 4], [0, 1]], device=device)[:, 0]  # a view, as a table's first column is
    buffers = []
    for way in (kernel, reference):
        held = made(device, dtype, 2, 3, 2, kv_heads, 9, dim, seed=4)
        count = None if counts is None else torch.tensor([counts, (9, 9)], device=device).T[:, 0]
        way(monkeypatch, "write_rows", k, v, Slots(held[0, 1], held[1, 1], slots, at, wrap, count, fixed))
        buffers.append(held)
    assert torch.equal(*buffers)
    expected = made(device, dtype, 2, 3, 2, kv_heads, 9, dim, seed=4)
    for b, first in enumerate((3, 0)):
        for t in range(rows if counts is None else min(rows, counts[b])):
            slot = first + at + t
            if wrap is not None and slot >= fixed:
                slot = fixed + (slot - fixed) % wrap
            expected[0, 1, b, :, slot] = k[b, :, t]
            expected[1, 1, b, :, slot] = v[b, :, t]
    assert torch.equal(buffers[0], expected)


@pytest.mark.corners
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize(("wrap", "fixed"), [(None, 0), (7, 0), (5, 3)])
def test_heads_are_rotated_and_stored_at_once(device, dtype, normed, part, wrap, fixed, monkeypatch):
    """Two sequences of three rows: what lies in the slots is what comes back, and nothing else changes."""
    H, G, D, T = 6, 3, 24, 3
    qkv = made(device, dtype, 2 * T, (H + 2 * G) * D)
    angle = made(device, torch.float32, 2 * T, D // part // 2, seed=1).repeat(1, 2)
    rope = angle.cos().to(dtype), angle.sin().to(dtype)
    norms = tuple(made(device, dtype, D, seed=s) for s in (2, 3)) if normed else None
    how = {"norms": norms, "neighbours": part > 1}
    slot_B = torch.tensor([[5, 6], [1, 2]], device=device)[:, 0]  # a view, as a table's first column is
    counts = (2, 3) if wrap else (3, 3)
    count_B = torch.tensor(counts, device=device) if wrap else None
    found = []
    for way in (kernel, reference):
        held = made(device, dtype, 2, 2, G, 9, D, seed=4)
        into = Slots(held[0], held[1], slot_B, 1, wrap, count_B, fixed)
        got = way(monkeypatch, "rotate_heads", qkv.clone(), rope, (H, G), into=into, **how)
        for b in range(2):
            for t in range(counts[b]):
                slot = into.rows(T)[b, t]
                assert torch.equal(held[0, b, :, slot], got[1][b * T + t])
                assert torch.equal(held[1, b, :, slot], got[2][b * T + t])
                held[:, b, :, slot] = 0
        untouched = made(device, dtype, 2, 2, G, 9, D, seed=4)
        assert (
            torch.equal(held, torch.where(held == 0, 0, untouched))
            and (held == 0).sum() == 2 * sum(counts) * G * D
        )
        found.append(got)
    close(*found)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("wrap", [None, 11])
def test_rows_move_to_the_front(device, dtype, wrap, monkeypatch):
    """A row may be one's source and another's goal; beyond what is accepted a path is zeros."""
    path = torch.tensor([[0, 2, 3, 5, 0], [0, 1, 2, 3, 4]], device=device)
    first = torch.tensor([2, 9 if wrap else 5], device=device)
    found = []
    for way in (kernel, reference):
        held = made(device, dtype, 2, 3, 2, 4, 11, 24, seed=4)
        way(monkeypatch, "move_entries", held[0], held[1], first, path, wrap)
        found.append(held)
    before = made(device, dtype, 2, 3, 2, 4, 11, 24, seed=4)
    for b, count in enumerate((4, 5)):
        for p in range(count):
            goal, source = (int(first[b]) + i for i in (p, int(path[b, p])))
            for held in found:
                assert torch.equal(held[:, :, b, :, goal % 11], before[:, :, b, :, source % 11])
    assert torch.equal(*found)


FIRST_BG = [[3, 30], [17, 9]]
"""Slots of the first new entry of two sequences' heads, in a buffer of 40 that they share."""


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("rotated", [False, True])
def test_heads_may_have_slots_of_their_own(device, dtype, rotated, monkeypatch):
    H, G, D, T = 3, 2, 24, 4
    first = torch.tensor(FIRST_BG, device=device)
    found = []
    for way in (kernel, reference):
        held = made(device, dtype, 2, 40, D, seed=4)
        into = Slots(*(x.expand(2, G, -1, -1) for x in held), first)
        if rotated:
            qkv = made(device, dtype, 2 * T, (H + 2 * G) * D)
            rope = made(device, torch.float32, 2, 2 * T, D, seed=1).to(dtype)
            _, k, v = way(monkeypatch, "rotate_heads", qkv, (rope[0], rope[1]), (H, G), into=into)
            k, v = (x.unflatten(0, (2, T)).transpose(1, 2) for x in (k, v))
        else:
            k, v = made(device, dtype, 2, 2, T, G, D).transpose(2, 3)
            way(monkeypatch, "write_rows", k, v, into)
        expected = made(device, dtype, 2, 40, D, seed=4)
        for b, g in ((0, 0), (0, 1), (1, 0), (1, 1)):
            slots = slice(FIRST_BG[b][g], FIRST_BG[b][g] + T)
            expected[0, slots], expected[1, slots] = k[b, g], v[b, g]
        assert torch.equal(held, expected)
        found.append(held)
    close(*([one] for one in found))


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_rows_move_to_the_front_of_each_head(device, dtype, monkeypatch):
    path = torch.tensor([[0, 2, 3, 5, 0], [0, 1, 3, 4, 6]], device=device)
    first = torch.tensor([FIRST_BG, [[50, 80], [61, 70]]], device=device)
    found = []
    for way in (kernel, reference):
        held = made(device, dtype, 2, 90, 24, seed=4)
        way(monkeypatch, "move_entries", *(x.expand(2, 2, 2, -1, -1) for x in held), first, path, None)
        found.append(held)
    expected = made(device, dtype, 2, 90, 24, seed=4)
    before = expected.clone()
    for at, begin in enumerate(first.flatten().tolist()):
        for p, source in enumerate(path[at // 2 % 2].tolist()):
            expected[:, begin + p] = before[:, begin + source]
    assert torch.equal(found[0], expected) and torch.equal(found[1], expected)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_rotary(device, dtype, monkeypatch):
    """Far positions too: angles of 10^5 radians are reduced as exactly as torch does."""
    pos = torch.tensor([0, 1, 77, 131071], device=device)
    frequency = 500000.0 ** -(torch.arange(6, device=device) / 6)
    got, expected = (way(monkeypatch, "rotary", pos, frequency, 1.25, dtype) for way in (kernel, reference))
    close(got, expected)
    assert got[0].shape == (4, 12) and torch.equal(got[0][:, :6], got[0][:, 6:])


@pytest.mark.skipif(INTERPRETED, reason="an interpreted kernel serves a CPU too")
def test_gradients_go_through_plain_torch():
    x = torch.randn(2, 8, requires_grad=True)
    assert not fused_layer.kernels_serve(x)
    fused_layer.swiglu(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("family", ["glm4", "glm4_moe"])
def test_parts_of_heads_are_rotated_as_transformers_does(family):
    modeling = import_module(f"transformers.models.{family}.modeling_{family}")
    heads, D, R = (4, 2), 16, 8
    qkv = made("cpu", torch.float64, 3, 8 * D)
    angle = made("cpu", torch.float64, 3, R // 2, seed=1).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    q, k, _ = qkv.view(3, 8, D).split((4, 2, 2), 1)
    expected = modeling.apply_rotary_pos_emb(q, k, cos, sin)
    got = fused_layer.rotate_heads(qkv, (cos, sin), heads, neighbours=family == "glm4")
    for mine, theirs in zip(got[:2], expected, strict=True):
        assert torch.equal(mine, theirs) and torch.equal(mine[..., R:], theirs[..., R:])

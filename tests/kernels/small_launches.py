"""Launches every Triton kernel at small and awkward sizes, to be run under NVIDIA's compute-sanitizer:

    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/kernels/small_launches.py

Torch's cache of memory is off, so that every tensor ends where its own allocation ends. Exit 1: a kernel of
`longtrain.kernels` was not launched. `--spoil` reads behind a tensor's end, which the sanitizer must notice.
Names of parts (`trees`, ...) launch those alone, `--slice=I/N` each N-th launch from the I-th on (so that
several processes share the work); with TRITON_INTERPRET=1 that works without a GPU, slowly.
"""

import os

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import TypeAlias

import pytest
import torch
import triton
import triton.language as tl
import warp_emulator
from attention_cases import dense_case, hier_case, mask_named
from entry_move_cases import move_case
from importance_cases import several
from node_choice_cases import SIZES, candidates, moved, rates, tables_on, verdict
from slot_assignment_cases import same_as_torch
from suffix_match_cases import texts_of
from top_entries_cases import KINDS, SINKS, WINDOW, scores_of
from top_entries_cases import K as CHOSEN
from torch import nn

import longtrain.kernels
from longtrain import methods
from longtrain.decoding import captured
from longtrain.decoding.engine import Engine
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts, TreeShape
from longtrain.kernels import hierarchical, importance, tree_attention
from longtrain.kernels.anchored import anchored_attention
from longtrain.kernels.draft_loss import DraftPairs, draft_passes, teacher_of
from longtrain.kernels.entry_moves import Programs, move_entries
from longtrain.kernels.entry_scores import entry_scores
from longtrain.kernels.head_kl import head_kl
from longtrain.kernels.hierarchical.layout import Ring, Split, new_planes
from longtrain.kernels.int4_linear import Int4Linear
from longtrain.kernels.int4_linear.kernel import small_linear
from longtrain.kernels.node_choice import choose, learn
from longtrain.kernels.own_keys import OwnKeys, merge, merge_backward
from longtrain.kernels.suffix_match import longest_match, write
from longtrain.kernels.top_entries import choose_entries
from longtrain.methods.policies.adakv import AdaKV
from longtrain.targets.loading import random_target

Jobs: TypeAlias = Iterator[Callable[[], None]]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PACKAGE = "longtrain.kernels."
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
SMALL = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}


@triton.jit
def spoil_kernel(x_ptr, n):
    """Adds up what lies behind the end, too."""
    tl.store(x_ptr, tl.sum(tl.load(x_ptr + n + 4096 + tl.arange(0, 64))))


def kernels() -> set[str]:
    """Every kernel of the package that this device runs, as MODULE.NAME."""
    found = set()
    for module in pkgutil.walk_packages(longtrain.kernels.__path__, PACKAGE):
        here = importlib.import_module(module.name)
        for name, value in vars(here).items():
            own = getattr(getattr(value, "fn", None), "__module__", None) == here.__name__
            if own and name.endswith("_kernel") and hasattr(type(value), "__getitem__"):
                found.add(f"{module.name}.{name}".removeprefix(PACKAGE))
    return found


@contextmanager
def launches():
    """The kernels that are launched while the block runs."""
    seen: set[str] = set()
    kinds = {type(spoil_kernel)}
    before = {kind: kind.__getitem__ for kind in kinds}

    def look(kind):
        def getitem(kernel, grid):
            seen.add(f"{kernel.fn.__module__}.{kernel.fn.__name__}".removeprefix(PACKAGE))
            return before[kind](kernel, grid)

        return getitem

    for kind in kinds:
        kind.__getitem__ = look(kind)
    try:
        yield seen
    finally:
        for kind, getitem in before.items():
            kind.__getitem__ = getitem


def trees() -> Jobs:
    """Dense attention: lengths up to the very last slot, odd head dims, every mask and tile."""
    cases = (
        (64, 1, (0, 39), 0),
        (128, 5, (130, 259), 3),
        (40, 20, (70, 1), 0),
        (128, 128, (300, 5), 0),
    )
    for D, T, lens, base in cases:
        for name in ("none", "causal", "tree"):
            yield partial(_tree, D, T, lens, base, name)


def _tree(D, T, lens, base, name):
    sizes = {"B": 2, "H": 8, "G": 2, "T": T, "D": D, "S": base + max(lens) + T}
    q, k, v, len_B = dense_case(**sizes, lens=lens, base=base, dtype=DTYPE, device=DEVICE)
    mask, _ = mask_named(name, 2, T, DEVICE)
    for splits in (None, 1, 7):
        tree_attention.tree_attention(q, k, v, len_B, mask, scale=0.1, base=base, splits=splits)


def hierarchies() -> Jobs:
    """Quantised attention: no block, a full plane, rings that wrap; masks take turns."""
    cases = (
        (1, (0, 2), (70, 255)),
        (1, (9, 3), (129, 200)),
        (7, (4, 1), (256, 128)),
        (20, (0, 5), (0, 255)),
        (64, (2, 1), (200, 140)),
    )
    names = cycle(("none", "causal", "tree"))
    for D in (64, 128, 256):
        for case in cases:
            for how in ((Split.FLOOR, 4, 4), (Split.RTN, 8, 4), (Split.FLOOR, 8, 1)):
                yield partial(_hierarchy, D, *case, *how, next(names))


def _hierarchy(D, T, blocks, recent, split, bits, group, name):
    place = {"dtype": DTYPE, "device": DEVICE}
    q, planes, ring, lens = hier_case(
        split=split, B=2, H=2 * group, T=T, D=D, blocks=blocks, recent=recent, **place
    )
    mask, _ = mask_named(name, 2, T, DEVICE)
    hierarchical.hier_attention(q, planes, ring, lens, mask, bits=bits, scale=0.1)


def quantisers() -> Jobs:
    """Prompts whose last rows are no block, and rings whose block wraps."""
    for D in (64, 128, 256):
        for split in Split:
            yield partial(_quantise, D, split)


def _quantise(D, split):
    lead = {"n_layers": 2, "batch": 2, "n_kv_heads": 2}
    planes = new_planes(**lead, blocks=3, head_dim=D, split=split, device=DEVICE)
    k, v = torch.randn(2, 2, 300, 2, D, device=DEVICE, dtype=DTYPE).transpose(2, 3).unbind(0)
    hierarchical.quantise_blocks(k, v, planes.layer(0), torch.tensor([2, 1], device=DEVICE))
    ring = Ring(*torch.randn(2, 2, 2, 2, 384, D, device=DEVICE, dtype=DTYPE).unbind(0))
    due_B = torch.tensor([True, False], device=DEVICE)
    hierarchical.flush_blocks(ring, planes, torch.tensor([2, 1], device=DEVICE), due_B)


def scores() -> Jobs:
    """Importance and its gradients over spans of several lengths."""
    for case in (several(4, 2, 32), several(8, 2, 64, strided=False)):
        yield partial(_score, case)


def _score(case):
    q, own_k, own_v, k, v = case.tensors(DTYPE, DEVICE)
    out, score = importance.suffix_attention(q, own_k, own_v, k, v, case.spans, scale=case.scale)
    (out.float().sum() + score.sum()).backward()
    rows = [x.detach() for x in (q, own_k)]
    lse = importance.suffix_lse(*rows, k, case.spans, scale=case.scale)
    for how in ("mean", "max"):
        importance.importance(rows[0], lse, k, case.spans, scale=case.scale, reduce=how)
    importance.own_importance(*rows, lse, case.spans, scale=case.scale)


def blocks() -> Jobs:
    """Blocks over keys whose last is the last seen, in windows and without; rows that fill no tile."""
    for D, heads, rows in ((64, 7, 7), (128, 4, 5), (40, 1, 4), (256, 2, 37)):
        for window in (None, 9):
            yield partial(_blocks, D, heads, rows, window)


def _blocks(D, heads, rows, window):
    shapes = [(5, rows, 2 * heads, D), *[(5, rows, 2, D)] * 2, *[(139, 2, D)] * 2]
    leaves = [torch.randn(shape, device=DEVICE, dtype=DTYPE).requires_grad_() for shape in shapes]
    q, own_k, own_v, k, v = leaves
    starts, anchors = torch.tensor([0, 0, 0, 50, 50]), torch.tensor([0, 1, 50, 90, 139])
    own, keys = (own_k, own_v), (k, v)
    anchored_attention(q, own, keys, starts, anchors, scale=0.1, window=window).float().sum().backward()


def merges() -> Jobs:
    """Own keys of queries that fill no tile, some of them unseen."""
    for T, D, keys in ((37, 64, 3), (5, 40, 1), (70, 256, 8)):
        yield partial(_merge, T, D, keys)


def _merge(T, D, keys):
    k, v = (torch.randn(keys, T, 2, D, device=DEVICE, dtype=DTYPE) for _ in range(2))
    own = OwnKeys(k, v, torch.rand(keys, T, device=DEVICE) < 0.6)
    q, out, grad, dq = (torch.randn(T, 6, D, device=DEVICE, dtype=DTYPE) for _ in range(4))
    out, lse = merge(q, out, torch.randn(T, 6, device=DEVICE), own, scale=0.1)
    merge_backward(grad, q, out, lse, own, dq, scale=0.1)


def moves() -> Jobs:
    """Rows at both ends of both blocks, either of them in pages or on the host."""
    for paged in ("", "goal", "source"):
        yield partial(_move, paged)


def _move(paged):
    goal, source, lists, pages = move_case(paged=paged, device=DEVICE)
    if not (paged or INTERPRETED):
        source = source.cpu().contiguous().pin_memory()
    move_entries(goal, source, lists, **pages, programs=Programs(1))


def choices() -> Jobs:
    """Rows of scores that fill no chunk, texts of every length; scores of keys whose last row is the last."""
    for kind in KINDS:
        yield partial(_choice, kind)
    for sets, keys, heads, dim in ((4, 2, 2, 64), (2, 2, 3, 40)):
        yield partial(_entry_scores, sets, keys, heads, dim)


def _choice(kind):
    scores = scores_of(kind, 3, 2, 2500).to(DEVICE)
    len_B = torch.tensor([2500, CHOSEN + 1, 7], device=DEVICE)
    out = torch.zeros(3, 2, CHOSEN, dtype=torch.int64, device=DEVICE)
    choose_entries(scores, len_B, out, sinks=SINKS, window=WINDOW, due_B=len_B > 0)


def _entry_scores(sets, keys, heads, dim):
    q = torch.randn(2, sets, heads, dim, device=DEVICE, dtype=DTYPE)
    k = torch.randn(2, 1300, keys, dim, device=DEVICE, dtype=DTYPE)
    entry_scores(q, k, torch.tensor([1300, 5], device=DEVICE), groups=2, scale=0.1)


def changes() -> Jobs:
    """Sets of rows chosen one after another, in slots that fill no block."""
    yield partial(same_as_torch, DEVICE, steps=3)


def matches() -> Jobs:
    """Texts that end, and go on, anywhere in their ring buffers, of one block and of several."""
    for slots in (64, 4096):
        yield partial(_match, slots)


def _match(slots):
    tokens_BC, last_B = texts_of(slots)
    tokens_BC, last_B = tokens_BC.to(DEVICE), last_B.to(DEVICE)
    *_, copy_BK = longest_match(tokens_BC, last_B, 40, 5)
    write(tokens_BC, copy_BK, last_B + 1, last_B % 6)


def joined() -> Jobs:
    """Trees and copies that fill no block, and the tables that they are chosen by."""
    for case in SIZES:
        yield partial(_joined, *case)


def _joined(nodes, copies, keep):
    some, tables = moved(candidates(3, nodes, copies, 0), DEVICE), tables_on(rates(3, 0), DEVICE)
    tokens, parents, *_ = choose(some, tables, keep)
    path_BP, n_B, next_B = verdict(tokens.cpu(), parents.cpu(), copies + 1, 0)
    learn(some, tables, tokens, path_BP.to(DEVICE), n_B.to(DEVICE), next_B.to(DEVICE))


def laws() -> Jobs:
    """Laws over vocabularies that fill no chunk, with the gradient and without it."""
    for rows, vocab in ((3, 320), (2, 4099)):
        yield partial(_law, rows, vocab)
        yield partial(_draft_loss, rows, vocab, "lk_hybrid")
        yield partial(_draft_loss, rows, vocab, "ce_tv")


def _law(rows, vocab):
    student, teacher = torch.randn(2, rows, vocab, device=DEVICE, dtype=DTYPE)
    weight_R = torch.rand(rows, device=DEVICE)
    for gradient in (False, True):
        head_kl(student.clone(), teacher.clone(), weight_R, gradient=gradient)


def _draft_loss(rows, vocab, objective):
    """The last row of each pass has no position; ce_tv is over the whole vocabulary."""
    logit_JBV = torch.randn(2, rows, vocab, device=DEVICE, dtype=DTYPE)
    ids_K = None if objective == "ce_tv" else torch.arange(0, vocab, 3, device=DEVICE)
    teacher = teacher_of(torch.randn(rows, vocab, device=DEVICE, dtype=DTYPE), ids_K)
    weight_JB = torch.rand(2, rows, device=DEVICE)
    row_JB = torch.arange(rows, device=DEVICE).expand(2, -1).contiguous()
    row_JB[:, -1] = -1
    label_JB = torch.full_like(row_JB, vocab - 1)
    value_JB, accept_JB = torch.empty_like(weight_JB), torch.empty_like(weight_JB)
    pairs = DraftPairs(row_JB, weight_JB, value_JB, row_JB > 0, label_JB, accept_JB)
    mine = logit_JBV if ids_K is None else logit_JBV[..., ids_K].contiguous()
    draft_passes(mine, teacher, ids_K, pairs, objective=objective, gradient=True, kl_decay=3.0, ce_share=0.1)


def linears() -> Jobs:
    """4-bit weights: inputs that end within a unit, tiles that are not full, gates, long lines and many."""
    if INTERPRETED:
        warp_emulator.install(pytest.MonkeyPatch())
    for rows in (1, 3, 8, 16):
        for features, inputs, group, gated in (
            (8, 96, 32, False),
            (100, 192, 64, False),
            (40, 448, 64, True),
            (24, 2304, 128, True),
            (16, 14336, 128, False),
            (24, 17408, 128, False),
        ):
            yield partial(_linear, rows, features, inputs, group, gated)
    yield partial(_linear, 4, 16392, 2048, 128, False)


def _linear(rows, features, inputs, group, gated):
    source = nn.Linear(inputs, features * (1 + gated), bias=False, device=DEVICE).requires_grad_(False)
    layer = Int4Linear(source, group)
    x = torch.randn(rows, inputs, device=DEVICE).bfloat16()
    add = None if gated else torch.randn(rows, features, device=DEVICE, dtype=DTYPE)
    small_linear(x, layer.codes, layer.table, add, features=features, gated=gated)


def texts() -> Jobs:
    """Decoding from static buffers, without graphs (they need torch's cache): what a layer is made of."""
    for name, shape in (
        (None, ()),
        ("longspec", (3, 2)),
        ("quantspec", (1, 1, 1)),
    ):
        for fused in (True, False):
            yield partial(_text, name, TreeShape(shape), fused)
            if name != "quantspec":
                yield partial(_text, name, TreeShape(shape), fused, evicts=True)


def _text(name, shape, fused, *, evicts=False):
    target = random_target(SMALL, dtype=DTYPE).to(DEVICE)
    target = target.fuse() if fused else target.unfuse()
    parts = None
    if name is not None:
        spec = methods.get(name)
        config = spec.config()
        module = spec.build(config, target.info)
        module = module.to(DEVICE, DTYPE) if module is not None else None
        parts = spec.attach(module, target, config, {})
    if evicts:
        evictor = AdaKV(Budget(64), over="snapkv", across="layers")
        parts = replace(parts or Parts(), evictor=evictor)
    captured.has_graphs = lambda device: False
    target.rope(torch.arange(5, device=DEVICE)[None])
    for prompts in ([[7] * 254], [[5] * 300, [9] * 20]):
        engine = Engine(target, parts, capture=True)
        engine.generate(prompts, max_new_tokens=6, shape=shape, ignore_eos=True)


PARTS = (
    trees,
    hierarchies,
    quantisers,
    scores,
    blocks,
    merges,
    moves,
    choices,
    changes,
    matches,
    joined,
    laws,
    linears,
)
PARTS += (texts,)


def main(words: list[str]) -> int:
    """Launch them all; 1 where a kernel was left out."""
    if "--spoil" in words:
        x = torch.zeros(64, device=DEVICE)
        spoil_kernel[(1,)](x, 64)
        torch.cuda.synchronize()
        return 0
    torch.manual_seed(0)
    first, step = next((word[8:].split("/") for word in words if word.startswith("--slice=")), ("0", "1"))
    names = [word for word in words if not word.startswith("--")] or [part.__name__ for part in PARTS]
    jobs = [job for part in PARTS if part.__name__ in names for job in part()]
    with launches() as seen:
        for job in jobs[int(first) :: int(step)]:
            job()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
    sys.stdout.write(f"launched: {', '.join(sorted(kernels() & seen))}\n")
    if words or not (missed := kernels() - seen):
        return 0
    sys.stdout.write(f"never launched: {', '.join(sorted(missed))}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

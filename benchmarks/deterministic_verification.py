"""Bitwise equality and time of verification: 1 token against T, batch 1 against B, with two exact variants.

usage: PYTHONPATH=. python benchmarks/deterministic_verification.py MODEL_FOLDER [OUT.json] [--quick]

Variants (patched here, the package is not changed):
  as_is    the package: its own kernels up to 16 rows (batch x tokens of a step), torch's products beyond
  wide     the package's linear kernel widened to 64 rows; attention keeps its splits up to 64 rows
  padded   batches of 4 or more: each linear product has its rows padded to 64, in plain decoding too, so that
           torch uses one kernel for 1 and for T tokens; attention as in `wide`
Metrics: texts equal to plain decoding's with the same variant (look-up chains of 4), bitwise equal logits of
steps of T tokens against single tokens and of batch B against batch 1, median ms per cycle, ratios.
"""

# mypy: ignore-errors
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import linear as torch_linear

from longtrain import methods
from longtrain.assets import asset_dir
from longtrain.decoding.captured import CaptureBuffers, can_capture
from longtrain.decoding.engine import CHAIN, Engine
from longtrain.decoding.prefill import prefill
from longtrain.decoding.roles import Parts
from longtrain.targets import fused as fused_module
from longtrain.targets import model as model_module
from longtrain.targets.loading import load_target
from longtrain.targets.step import OutputRequest, TokenBatch

CUDA = torch.cuda.is_available()
QUICK = "--quick" in sys.argv
ARGS = [a for a in sys.argv[1:] if not a.startswith("--")]
MOST = 64
BATCHES = (1, 4, 12)
STEPS = (2, 5)
PROMPT, NEW, REPEATS = (60, 12, 1) if QUICK else (1000, 96, 3)


def padded(x, weight, bias=None):
    rows = x.reshape(-1, x.shape[-1])
    n = rows.shape[0]
    if n >= MOST:
        return torch_linear(x, weight, bias)
    whole = torch.zeros(MOST, rows.shape[1], dtype=x.dtype, device=x.device)
    whole[:n] = rows
    return torch_linear(whole, weight, bias)[:n].view(*x.shape[:-1], weight.shape[0])


@contextlib.contextmanager
def variant(name, batch):
    undo = []

    def patch(where, key, value):
        undo.append((where, key, getattr(where, key)))
        setattr(where, key, value)

    try:
        if name != "as_is" and CUDA:
            from longtrain.kernels.tree_attention import launch as attention

            patch(attention, "FEW_ROWS", MOST)
        if name == "wide" and CUDA:
            import triton

            import longtrain.kernels.small_linear as small
            from longtrain.kernels.small_linear import kernel

            patch(small, "MAX_ROWS", MOST)

            def launch(x_NK, weight_FK, out_NF, add_NF, tile, *, gated):
                (N, K), F = x_NK.shape, out_NF.shape[1]
                chained = kernel.chaining(x_NK.device)
                add = out_NF if add_NF is None else kernel.dense_rows(add_NF)
                reach = triton.cdiv(K, tile.slices * tile.step) * tile.step
                rows = 8 if N <= 8 else triton.next_power_of_2(N)
                each = (tile.slices * rows + (2 if gated else 1) * tile.slices * tile.outputs) * tile.step * 2
                stages = max(2, min(tile.stages, 220_000 // each))
                with kernel.launched_on(x_NK):
                    kernel.linear_kernel[(triton.cdiv(F, tile.outputs),)](
                        x_NK,
                        weight_FK,
                        add,
                        out_NF,
                        N,
                        F,
                        K,
                        x_NK.stride(0),
                        weight_FK.stride(0),
                        add.stride(0),
                        out_NF.stride(0),
                        OUTPUTS=tile.outputs,
                        SLICES=tile.slices,
                        ROWS=rows,
                        STEP=tile.step,
                        EVEN=reach * tile.slices == K,
                        GATED=gated,
                        ADD=add_NF is not None,
                        STAGES=stages,
                        LATE=tile.late,
                        num_warps=tile.warps if rows <= 32 else 8,
                        **chained,
                    )
                return out_NF

            patch(kernel, "_launch", launch)
        if name == "padded" and batch >= 4:
            for where in (fused_module, model_module):
                patch(where, "serves", lambda x, w: False)
                patch(where, "linear", padded)
        yield
    finally:
        for where, key, value in reversed(undo):
            setattr(where, key, value)


def read_cache(target, prompts, room):
    stage = CaptureBuffers(target)
    with torch.no_grad():
        read = prefill(
            target, stage.new_cache if CUDA else target.new_cache, prompts, max_new_tokens=room, nodes=room
        )
        cache = stage.take_in(read.cache, room=2 * room) if CUDA and can_capture(read.cache) else read.cache
    return stage, cache  # the capture buffers must outlive the cache


@torch.no_grad()
def steps(target, prompts, texts, count):
    _stage, cache = read_cache(target, prompts, len(texts[0]))
    found = []
    for first in range(0, len(texts[0]), count):
        ids = torch.tensor([t[first : first + count] for t in texts], device=target.device)
        pos = cache.len_B[:, None] + torch.arange(ids.shape[1], device=target.device)
        step = target.forward(TokenBatch(pos, ids), cache, outputs=OutputRequest("all"))
        found.append(step.logits_BTV.clone())
        cache.commit(None, torch.full_like(cache.len_B, ids.shape[1]))
    return torch.cat(found, 1).float()


def bits(target, prompts, texts):
    """Return the share of tokens with bitwise the logits of single-token steps, and top-2 gap changes."""
    n = 20
    texts = [t[:n] for t in texts]
    alone = steps(target, prompts, texts, 1)
    top = alone.topk(2, -1).indices
    gap = alone.gather(-1, top)
    out = {}
    for count in STEPS:
        some = steps(target, prompts, texts, count)
        moved = some.gather(-1, top)
        out[f"T{count}"] = {
            "rows_equal": float((some == alone).all(-1).double().mean()),
            "gap_moves": float(((moved[..., 0] - moved[..., 1]) - (gap[..., 0] - gap[..., 1])).abs().max()),
            "same_argmax": float((some.argmax(-1) == alone.argmax(-1)).double().mean()),
        }
    if len(prompts) > 1:
        one = steps(target, prompts[:1], texts[:1], 1)
        out["batch1_rows_equal"] = float((one[0] == alone[0]).all(-1).double().mean())
    return out


def spec_parts(target):
    spec = methods.get("prompt_lookup")
    config = spec.config(ngram=3)
    return spec.attach(spec.build(config, target.info), target, config, {})


def decode(target, parts, prompts, shape):
    """Return the texts and the median ms per cycle."""
    engine, times, texts = Engine(target, parts), [], None
    for again in range(1 + REPEATS):
        made = engine.generate(prompts, max_new_tokens=NEW, ignore_eos=True, shape=shape)
        cycles = made.stats.target_forwards - 1
        if again:
            times.append(1e3 * made.stats.decode_s / max(1, cycles))
        texts = made.tokens
    return texts, statistics.median(times)


def main():
    device = "cuda" if CUDA else "cpu"
    target = load_target(ARGS[0], dtype="bfloat16", device=device)
    if target.fused is None:
        target.fuse()
    book = sorted((asset_dir("bundled") / "text" / "heldout").iterdir())[0].read_text()
    ids = target.require_tokenizer()(book[5000:400_000]).input_ids
    prompts = [ids[i * PROMPT : i * PROMPT + PROMPT - 7 * (i % 5)] for i in range(max(BATCHES))]
    parts, out, started = spec_parts(target), {}, time.time()
    for batch in BATCHES:
        some = prompts[:batch]
        for name in ("as_is", "wide", "padded"):
            try:
                with variant(name, batch):
                    plain, plain_ms = decode(target, Parts(), some, None)
                    drafted, drafted_ms = decode(target, parts, some, CHAIN)
                    row = {
                        "rows_of_a_step": batch * CHAIN.n_nodes,
                        "texts_equal": f"{sum(a == b for a, b in zip(plain, drafted, strict=True))}/{batch}",
                        "plain_ms": plain_ms,
                        "drafted_ms": drafted_ms,
                        "bits": bits(target, some, plain),
                    }
                    base = out.get(f"B{batch} as_is")
                    if base:
                        row["plain_over_as_is"] = plain_ms / base["plain_ms"]
                        row["drafted_over_as_is"] = drafted_ms / base["drafted_ms"]
            except Exception as error:  # a variant that cannot be launched is a result
                row = {"failed": f"{type(error).__name__}: {error}"[:300]}
            out[f"B{batch} {name}"] = row
            print(f"{time.time() - started:.0f}s", f"B{batch} {name}", json.dumps(row), flush=True)
    about = {
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "model": ARGS[0],
        "torch": torch.__version__,
        "prompt_tokens": PROMPT,
        "new_tokens": NEW,
    }
    if len(ARGS) > 1:
        with Path(ARGS[1]).open("w") as file:
            json.dump({**about, "cells": out}, file, indent=1)


main()

"""Time to first token by arithmetic: what prefill and each way of choosing cache rows must multiply and move.

Every phase takes t = max(F / (0.7 peak FLOP/s), M / (0.9 peak bytes/s)), bf16, batch 1, one GPU; phases add.
Tensor operations alone: no launches, no top-k, no gather, so a measurement lies above.

Source: LookaheadKV Appendix B (the phases); the shares of peak are its 70% and 90%.
Shapes: S prompt tokens, M lookahead tokens, C kept rows, H query heads, G KV heads, D head dim, E hidden dim,
V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longtrain.costs.hardware import Gpu
from longtrain.costs.model import ITEM, Sizes, Work, decode, prefill, score


def adapter(size: Sizes, n_lookahead: int, rank: int) -> int:
    """Weights of LookaheadKV's module: soft tokens, and LoRA wherever the scores depend on it."""
    sizes = {name: rank * (a + b) for name, (a, b) in size.linears.items()}
    dead = sizes["o"] + sizes["gate"] + sizes["up"] + sizes["down"]
    return n_lookahead * size.hidden_size + size.n_layers * sum(sizes.values()) - dead


def lookahead_rows(size: Sizes, tokens: int, *, n_lookahead: int, rank: int) -> Work:
    """The lookahead tokens' own forward, as rows of the prefill's products: nothing more is read."""
    linear = 2 * n_lookahead * (size.weights + adapter(size, n_lookahead, rank))
    return Work(linear + 4 * size.width * n_lookahead * tokens, 0.0)


def second_pass(size: Sizes, tokens: int, *, n_lookahead: int, rank: int) -> Work:
    """The lookahead tokens' own forward as a pass of its own: weights and cache are read once more."""
    rows = lookahead_rows(size, tokens, n_lookahead=n_lookahead, rank=rank)
    return rows + Work(0.0, ITEM * size.weights + size.kv_bytes(tokens))


@dataclass(frozen=True)
class Setup:
    """The setting of the table.

    Args:
        size: the target.
        draft: SpecKV's draft.
        budget: C.
        window: SnapKV's rows, and LAQ's and SpecKV's tokens ahead.
        n_lookahead: M.
        rank: of the LoRA.
    """

    size: Sizes
    draft: Sizes
    budget: int = 128
    window: int = 32
    n_lookahead: int = 32
    rank: int = 8


def row(setup: Setup, tokens: int, gpu: Gpu, *, causal: bool = True) -> dict[str, Any]:
    """One line of the table: milliseconds and TFLOP of prefill, and what each method adds to its time.

    LookaheadKV comes four ways: its rows inside the prefill's products or as a second pass, and the scores'
    weights written out or fused away.
    """
    size, window = setup.size, setup.window
    base = prefill(size, tokens, causal=causal)
    base_ms = base.ms(gpu)
    how = {"n_lookahead": setup.n_lookahead, "rank": setup.rank}
    inside_ms = (base + lookahead_rows(size, tokens, **how)).ms(gpu) - base_ms
    apart_ms = second_pass(size, tokens, **how).ms(gpu)
    seen = score(size, setup.n_lookahead, tokens)
    fused = score(size, setup.n_lookahead, tokens, fused=True)
    snap = score(size, window, tokens)
    pseudo = decode(size, window, setup.budget)
    laq = [snap, pseudo, snap]
    longer = prefill(size, tokens + window, causal=causal)
    spec = [prefill(setup.draft, tokens, causal=causal), decode(setup.draft, window, tokens), longer]
    spec.append(score(size, 2 * window + 1, tokens))
    tera = 1e-12
    return {
        "gpu": gpu.name,
        "prompt_tokens": tokens,
        "attention": "causal" if causal else "full",
        "forward_tflop": base.flops * tera,
        "forward_ms": base_ms,
        "lookaheadkv_ms": inside_ms + seen.ms(gpu),
        "lookaheadkv_fused_ms": inside_ms + fused.ms(gpu),
        "lookaheadkv_second_pass_ms": apart_ms + seen.ms(gpu),
        "lookaheadkv_second_pass_fused_ms": apart_ms + fused.ms(gpu),
        "snapkv_ms": snap.ms(gpu),
        "speckv_ms": sum(part.ms(gpu) for part in spec) - base_ms,
        "speckv_tflop": sum(part.flops for part in spec) * tera,
        "laq_ms": sum(part.ms(gpu) for part in laq),
        "laq_tflop": (base.flops + sum(part.flops for part in laq)) * tera,
        "laq_decode_gb": pseudo.bytes * 1e-9,
    }


def table(setup: Setup, lengths: Sequence[int], gpus: Sequence[Gpu]) -> list[dict[str, Any]]:
    """Lines for every GPU, kind of attention count and length."""
    return [
        row(setup, tokens, gpu, causal=causal)
        for gpu in gpus
        for causal in (True, False)
        for tokens in lengths
    ]

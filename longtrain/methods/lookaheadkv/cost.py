"""What LookaheadKV costs: a training step of its lookahead rows, and what they add to the first token.

Source: LookaheadKV Appendix B (the phases of the first token).
Shapes: S prompt tokens, M lookahead tokens.
"""

from __future__ import annotations

from longtrain.costs.hardware import Gpu
from longtrain.costs.method import MethodCost, PromptShape
from longtrain.costs.model import ITEM, Sizes, Work, score
from longtrain.costs.training import PackedRow, StepCost, kv_bytes_per_token
from longtrain.methods.lookaheadkv.config import Config

COMPARED, KL_BYTES = 2**23, 36
"""Scores that the objective compares at once, and bytes of each that the KL takes for it."""

KERNELS = 250
"""Small kernels of a layer's rows, forward and backward; measured: 64 ms for the 32 layers of the 8B shape
beyond what the arithmetic says (recipes/results/eviction_cost.json)."""


def training(config: Config, size: Sizes, row: PackedRow, trained: int, itemsize: int) -> StepCost:
    """Forward and backward of the lookahead rows behind each document, and the scores of both sides.

    They follow the target's pass layer by layer, so both are there at once: K and V of all layers but the
    last, which backward reads, the true scores and the gradient of the predicted ones, and of each row its
    residual stream and norms (4 E), MLP (4 I), queries and output (2 HD) and own K and V (2 GD). The KL's
    working memory comes in a layer's attention, when the pass has none of its three wide tensors.
    Weights are frozen: 2 operations a weight and row forward, 2 backward. Attention reads all of a document:
    products with K and V forward, five backward, one for the scores; the response's scores take two.
    """
    rows, heads, kv = config.n_lookahead, size.n_heads * size.head_dim, size.n_kv_heads * size.head_dim
    passed = max(1, size.n_layers - 1) / size.n_layers
    scores = 2 * size.n_layers * size.n_heads * 4
    width = 4 * size.hidden_size + 4 * size.intermediate_size + 2 * heads + 2 * kv
    compared = min(size.n_layers * size.n_heads * row.tokens, max(COMPARED, size.n_heads * row.tokens))
    spare = 3 * size.intermediate_size * row.tokens * itemsize
    attention = 2 * size.n_layers * heads * row.attended * (8 * rows + 2 * row.response_tokens)
    inputs = int(row.tokens * (kv_bytes_per_token(size, itemsize=itemsize) + scores) * passed)
    module = row.documents * rows * size.n_layers * width * itemsize
    return StepCost(
        inputs=inputs,
        module=module + max(0, KL_BYTES * compared - spare),
        flops=row.documents * (4 * size.weights * rows + attention),
        chunk=row.tokens,
        backward=module,
        attention_flops=row.documents * attention,
        moved=4 * itemsize * size.weights + 3 * inputs,
        beside_pass=True,
        kernels=KERNELS * size.n_layers,
    )


def adapter(config: Config, size: Sizes) -> int:
    """Weights of soft tokens, and of LoRA on all linears that the scores depend on."""
    weights = {name: config.lora_rank * (a + b) for name, (a, b) in size.linears.items()}
    dead = weights["o"] + weights["gate"] + weights["up"] + weights["down"]
    return config.n_lookahead * size.hidden_size + size.n_layers * sum(weights.values()) - dead


def lookahead_rows(config: Config, prompt: PromptShape) -> Work:
    """The lookahead tokens' own forward, as rows of the prefill's products: nothing more is read."""
    size = prompt.size
    linear = 2 * config.n_lookahead * (size.weights + adapter(config, size))
    return Work(linear + 4 * size.width * config.n_lookahead * prompt.tokens, 0.0)


def second_pass(config: Config, prompt: PromptShape) -> Work:
    """The lookahead tokens' own forward as a pass of its own: weights and cache are read once more."""
    again = ITEM * prompt.size.weights + prompt.size.kv_bytes(prompt.tokens)
    return lookahead_rows(config, prompt) + Work(0.0, again)


def first_token(config: Config, prompt: PromptShape, gpu: Gpu) -> dict[str, float]:
    """Milliseconds with the rows inside the prefill's products or as a second pass of their own.

    `fused`: the attention weights of the observing rows are never written out.
    """
    base = prompt.prefill
    inside_ms = (base + lookahead_rows(config, prompt)).ms(gpu) - base.ms(gpu)
    apart_ms = second_pass(config, prompt).ms(gpu)
    seen_ms, fused_ms = (
        score(prompt.size, config.n_lookahead, prompt.tokens, fused=fused).ms(gpu) for fused in (False, True)
    )
    return {
        "ms": inside_ms + seen_ms,
        "fused_ms": inside_ms + fused_ms,
        "second_pass_ms": apart_ms + seen_ms,
        "second_pass_fused_ms": apart_ms + fused_ms,
    }


COST = MethodCost(
    training=training,
    first_token=first_token,
    as_built="second_pass_fused_ms",
    note="LookaheadKV's paper measured, at 8K on an H100 over a forward of about 187 ms: LookaheadKV + 11 "
    "ms, SnapKV + 20, SpecKV + 121, LAQ + 509 (Fig. 2). Our rows are a second pass without written weights.",
    response_tokens=512,
    suite="eviction",
)

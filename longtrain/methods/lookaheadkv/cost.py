"""Estimates the cost of LookaheadKV: a training step, and the lookahead tokens' share of the first token.

Source: LookaheadKV Appendix B (the phases of the first token).

Shapes: S prompt tokens, M lookahead tokens.
"""

from __future__ import annotations

from longtrain.costs.hardware import Gpu
from longtrain.costs.method import MethodCost, PromptShape
from longtrain.costs.model import ITEM, Sizes, Work, score
from longtrain.costs.training import PackedSequence, StepCost, kv_bytes_per_token
from longtrain.methods.lookaheadkv.config import Config

COMPARED, KL_BYTES = 2**23, 36
"""Scores that the objective compares at once, and bytes of each that the KL needs for it."""

KERNELS = 250
"""Number of small kernels per layer on the lookahead tokens, forward and backward.

Measured: 64 ms for the 32 layers of the 8B shape beyond the arithmetic (recipes/results/eviction_cost.json).
"""


def training(config: Config, size: Sizes, row: PackedSequence, trained: int, itemsize: int) -> StepCost:
    """Estimate forward and backward of the lookahead tokens of each document, and both sides' scores.

    They follow the target's forward layer by layer, so both are in memory at once: K and V of all layers but
    the last, which backward reads, the true scores and the gradient of the predicted ones, and of each
    lookahead token its residual stream and norms (4 E), MLP (4 I), queries and output (2 HD) and own K and V
    (2 GD). The KL's working memory is needed in a layer's attention, when none of the forward's three widest
    tensors exists. Weights are frozen: 2 operations per weight and token forward, 2 backward. Attention reads
    the whole document: products with K and V forward, five backward, one for the scores; the response's
    scores take two.
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
        flops=row.documents * (4 * size.used * rows + attention),
        chunk=row.tokens,
        backward=module,
        attention_flops=row.documents * attention,
        moved=4 * itemsize * size.weights + 3 * inputs,
        beside_pass=True,
        kernels=KERNELS * size.n_layers,
    )


def adapter(config: Config, size: Sizes) -> int:
    """Return the number of weights of the embeddings and of LoRA on the linears that scores depend on."""
    weights = {name: config.lora_rank * (a + b) for name, (a, b) in size.linears.items()}
    dead = weights["o"] + weights["gate"] + weights["up"] + weights["down"]
    return config.n_lookahead * size.hidden_size + size.n_layers * sum(weights.values()) - dead


def lookahead_tokens_of(config: Config, prompt: PromptShape) -> Work:
    """Return the work of the lookahead tokens as part of the prefill's products: no further reads."""
    size = prompt.size
    linear = 2 * config.n_lookahead * (size.used + adapter(config, size))
    return Work(linear + 4 * size.width * config.n_lookahead * prompt.tokens, 0.0)


def second_pass(config: Config, prompt: PromptShape) -> Work:
    """Return the work of the lookahead tokens as a separate pass: weights and cache are read once more."""
    again = ITEM * prompt.size.weights + prompt.size.kv_bytes(prompt.tokens)
    return lookahead_tokens_of(config, prompt) + Work(0.0, again)


def first_token(config: Config, prompt: PromptShape, gpu: Gpu) -> dict[str, float]:
    """Return milliseconds with the tokens inside the prefill's products, or as a separate pass.

    `fused`: the attention weights of the observing queries are never written to memory.
    """
    base = prompt.prefill
    inside_ms = (base + lookahead_tokens_of(config, prompt)).ms(gpu) - base.ms(gpu)
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
    suite="training",
)

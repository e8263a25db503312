"""What a training step of EAGLE-3 takes beside the target's pass: arithmetic of its three phases.

The counts follow `objective`, `chunked`, `losses.draft` and `kernels.attention.own_keys_flash`; none has been
compared with a measurement yet.
Shapes: T tokens of a packed row, E hidden dim, H query heads, G KV heads, D head dim, I inner dim of the MLP,
J depths, n levels of the target, V tokens of the target's vocabulary, K of the draft's.
"""

from __future__ import annotations

from longtrain.costs.model import Sizes
from longtrain.costs.training import LOGITS_BYTES, PackedRow, StepCost
from longtrain.methods.eagle3.config import Config, draft_vocab, layers_of

TEACHER_BYTES, PASS_BYTES, DRAFT_BYTES = 14, 2, 28
"""Bytes a logit that a block of teacher rows holds at once: of the teacher, of all passes, and of the one
pass that is turned into a gradient."""

TEACHER_MOVED, DRAFT_MOVED = 30, 100
"""Bytes a logit of the teacher, and of a pass, that is read and written in all."""


def training(config: Config, size: Sizes, row: PackedRow, trained: int, itemsize: int) -> StepCost:
    """Keys and values of all rows without a gradient, the chunks, and keys and values once more.

    Saved for backward of a row and depth, in numbers of 16 bits: four norms with their inputs in fp32 and
    what the last two give (10 E), the attention's input (2 E), the MLP (4 I), queries and outputs (2 HD), own
    K and V (2 GD) and log-sums (2 H); of a row once, the levels (n E, three times that with a norm before
    `fc`).
    """
    E, heads = size.hidden_size, config.n_heads or size.n_heads
    dim, inner = config.head_dim or size.head_dim, config.intermediate_size or size.intermediate_size
    wide, kv = heads * dim, (config.n_kv_heads or size.n_kv_heads) * dim
    J, n = config.depths, len(layers_of(config, size.n_layers))
    V, K = size.vocab_size, draft_vocab(config, size.vocab_size)
    T, chunk = row.tokens, min(config.chunk_tokens or row.tokens, row.tokens)
    chunks = -(-T // chunk)
    document = min(row.doc_tokens, T)
    seen = min(2 * config.window, document) if config.window else document
    levels = (3 if config.fc_norm or config.norm_before_fc else 1) * n * E
    each = 12 * E + 4 * inner + 2 * wide + 2 * kv + 2 * heads
    sinks = 2 * config.sinks * kv
    activations = chunk * (J * each + levels + sinks) * itemsize
    shared = 2 * kv * T * (2 * itemsize + 4)  # K and V, what a chunk leaves on them, and its sum in fp32
    block = min(chunk, max(16, LOGITS_BYTES // (8 * V)))
    trains = config.head == "trained"
    head = K * E * (itemsize + (12 if trains else 0))  # in 16 bits; its gradient, a copy and a product
    logits = block * (TEACHER_BYTES * V + (PASS_BYTES * J + DRAFT_BYTES) * K)
    grads = J * chunk * E * itemsize
    own = 6 * chunk * wide * 4  # the own keys' part of the attention's gradient, in fp32
    back = chunk * (2 * inner + E) * itemsize + 2 * E * inner * itemsize + own
    fc = n * E * E
    layer = 2 * E * (wide + 2 * kv) + wide * E + 3 * E * inner
    linear = 6 * (J * layer + 2 * fc + 4 * E * kv) + (6 if trains else 4) * J * K * E + 2 * V * E
    attention = J * 7 * wide * T * seen
    moved = T * (J * (4 * each * itemsize + DRAFT_MOVED * K) + TEACHER_MOVED * V) + 20 * trained * chunks
    return StepCost(
        inputs=T * ((n + 1) * E * itemsize + 8),
        module=shared + activations + grads + max(head + logits, 2 * 4 * K * E * trains + back),
        flops=linear * T + attention,
        chunk=chunk,
        backward=activations + back,
        attention_flops=attention,
        moved=moved,
        chunked=bool(config.chunk_tokens),
        hidden=(n + 1) * E,
    )

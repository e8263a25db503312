"""Estimates the memory, operations and traffic of an EAGLE-3 training step beyond the target's forward.

The formulas follow the three phases of `objective`, and `chunked`, `losses.draft` and
`kernels.attention.own_keys_flash`; they have not been compared with measurements yet.

Shapes: T tokens of a packed sequence, E hidden dim, H query heads, G KV heads, D head dim, I inner dim of the
MLP, J depths, n layers of the target that are read, V tokens of the target's vocabulary, K of the draft's.
"""

from __future__ import annotations

from longtrain.costs.model import Sizes
from longtrain.costs.training import PackedSequence, StepCost
from longtrain.methods.eagle3.config import Config, draft_vocab, layers_of

LOSS_BYTES = 2**30
"""Bytes of the logits of a block of tokens, as in `losses.draft`: the teacher's over its vocabulary and over
the draft's, and those of all depths."""

TEACHER_MOVED, DRAFT_MOVED = 3, 8
"""Number of times that a logit of the teacher, and of a depth, is read or written."""


def training(config: Config, size: Sizes, row: PackedSequence, trained: int, itemsize: int) -> StepCost:
    """Estimate a step: keys and values of all tokens without a graph, the chunks, then keys and values again.

    Saved for backward per token and depth, in 16-bit numbers: four norms with their inputs in fp32 and the
    outputs of the last two (10 E), the attention's input (2 E), the MLP (4 I), queries and outputs (2 HD),
    own K and V (2 GD) and log-sums (2 H); per token once, the target's hidden states (n E, three times that
    with a norm before `fc`).
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
    numbers = V + (J + 1) * K
    block = min(chunk, max(16, LOSS_BYTES // (numbers * itemsize)))
    trains = config.head == "trained"
    head = K * E * (itemsize + (12 if trains else 0))  # in 16 bits; its gradient, a copy and a product
    logits = block * numbers * itemsize
    grads = 2 * J * chunk * E * itemsize  # and the hidden states that they belong to, side by side
    own = 6 * chunk * wide * 4  # the own keys' part of the attention's gradient, in fp32
    back = chunk * (2 * inner + E) * itemsize + 2 * E * inner * itemsize + own
    fc = n * E * E
    layer = 2 * E * (wide + 2 * kv) + wide * E + 3 * E * inner
    linear = 6 * (J * layer + 2 * fc + 4 * E * kv) + (6 if trains else 4) * J * K * E + 2 * V * E
    attention = J * 7 * wide * T * seen
    logits_moved = (J * DRAFT_MOVED * K + TEACHER_MOVED * V) * itemsize
    moved = T * (J * 4 * each * itemsize + logits_moved) + 20 * trained * chunks
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

"""Memory and work of one packed sequence in the target's pass and in the module's training step.

The byte counts follow the code line by line (`targets.model.packed`, `chunked`, `losses`, the methods'
objectives) and are within 1% of the measured LongSpec steps at 8B shape, 8K to 128K
(recipes/results/draft_memory.json). The rest of a rank's memory is in `costs.ranks`.
Shapes: T tokens of a packed sequence, E hidden dim, H query heads, G KV heads, D head dim, I inner dim of the
MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

from longtrain.costs.model import Sizes

LOGITS_BYTES = 2**29
"""`losses` processes as many tokens at once as keep student and teacher logits in fp32 within these bytes."""

KL_BYTES, KL_MOVED = 28, 16
"""Bytes per logit that the KL loss holds at once, and bytes per logit that it reads and writes in total: both
sides' logits are written once and read twice (`kernels.head_kl`), the gradient is written and read."""

CE_BYTES, CE_MOVED = 8, 16
"""The same for the cross-entropy, whose kernel works in place."""


EXPERT_NUMBERS = 2**28
"""Most elements of the inputs that are copied for the experts of a layer at once (`targets.experts`)."""


@dataclass(frozen=True)
class PackedSequence:
    """One micro-batch.

    Args:
        tokens: length of the packed sequence.
        doc_tokens: longest piece of a document in it.
        response_tokens: tokens of each document's response, if it has one.
        usual_tokens: average length of its documents; None: `doc_tokens`.
    """

    tokens: int
    doc_tokens: int
    response_tokens: int = 0
    usual_tokens: float | None = None

    @property
    def documents(self) -> int:
        """Number of documents in the sequence."""
        return max(1, int(self.tokens / (self.usual_tokens or self.doc_tokens) + 1e-6))

    @property
    def attended(self) -> int:
        """Average length of the documents, which attention reads."""
        return min(self.doc_tokens, self.tokens // self.documents)


@dataclass(frozen=True)
class StepCost:
    """Memory and arithmetic of a module's step on one packed sequence, without the target's pass.

    Args:
        inputs: bytes of the step's inputs for the whole sequence, allocated from the pass to the step's end.
        module: peak bytes of activations and working memory in the forward.
        flops: floating-point operations, forward and backward.
        chunk: tokens whose activations exist at once.
        backward: peak bytes of activations and their gradients in the backward.
        attention_flops: the part of `flops` that is attention.
        moved: bytes read and written by everything except matrix products and attention.
        chunked: True if gradients are accumulated in fp32 before backward begins (`longtrain.chunked`).
        beside_pass: True if the step's memory is allocated during the target's pass, not after it.
        again: bytes allocated while the target reads the sequence again in the same step; 0: it does not.
        kernels: kernels that the host launches one by one without overlap.
        kv: numbers of K and V read per token; 0, with `hidden` 0: features are not stored.
        hidden: numbers of the LM head's input read per token.
    """

    inputs: int
    module: int
    flops: int
    chunk: int
    backward: int = 0
    attention_flops: int = 0
    moved: int = 0
    chunked: bool = False
    beside_pass: bool = False
    again: int = 0
    kernels: int = 0
    kv: int = 0
    hidden: int = 0


def target_parameters(size: Sizes, *, tied: bool) -> int:
    """Number of the target's weights: embeddings, layers and LM head, without norms."""
    return size.head * (1 if tied else 2) + size.weights


def kv_bytes_per_token(size: Sizes, *, itemsize: int) -> int:
    """Bytes of a token's K and V in all layers."""
    return 2 * size.n_layers * size.n_kv_heads * size.head_dim * itemsize


def target_pass_bytes(size: Sizes, row: PackedSequence, *, itemsize: int) -> int:
    """Peak bytes of activations of the target's no-grad pass.

    In a layer's MLP these exist: the embeddings (held by the caller), the layer's input, the residual stream
    and its norm, the three wide tensors of the gate, the layer's K and V, and cos and sin of all tokens. In
    its attention: the queries and three copies during rotation, but no wide tensors.
    """
    heads, kv = size.n_heads * size.head_dim, 2 * size.n_kv_heads * size.head_dim
    mlp = 4 * size.hidden_size + 3 * size.intermediate_size
    attention = 3 * size.hidden_size + 4 * heads
    held = row.tokens * ((max(mlp, attention) + kv + 2 * size.head_dim) * itemsize + 8)
    if size.experts is None:
        return held
    # a token is copied for each of its experts: inputs, outputs, these weighted, and in the tokens' order
    copied = min(row.tokens * size.experts.per_token * size.hidden_size, EXPERT_NUMBERS)
    return max(held, held - 3 * size.intermediate_size * row.tokens * itemsize + 4 * copied * itemsize)


def target_flops(size: Sizes, row: PackedSequence) -> int:
    """Operations of the target's forward over a sequence: 2 per weight and token, and causal attention."""
    return 2 * size.used * row.tokens + target_attention_flops(size, row)


def target_attention_flops(size: Sizes, row: PackedSequence) -> int:
    """Operations of attention within `target_flops`."""
    return 2 * size.width * row.tokens * row.attended


def head_bytes(size: Sizes, rows: int, *, kl: bool) -> int:
    """Working memory of the LM-head loss over `rows` tokens, which it processes in blocks."""
    block = min(rows, max(16, LOGITS_BYTES // (8 * size.vocab_size)))
    return block * size.vocab_size * (KL_BYTES if kl else CE_BYTES)


def draft_step(
    size: Sizes,
    row: PackedSequence,
    *,
    trained: int,
    itemsize: int,
    kl: bool = True,
    chunk_tokens: int = 0,
    window: int | None = None,
    guard: bool = False,
) -> StepCost:
    """Cost of a training step of a one-layer draft that reads one target layer's K and V, chunk by chunk.

    Saved for backward, per token in 16-bit numbers: the embedding, three norms with their inputs in fp32 and
    three residuals (11 E), the MLP (4 I), queries, their rotation and outputs of two attentions (5 HD), own K
    and V (2 GD) and two log-sum-exps per head.

    Args:
        size: the target.
        row: the packed sequence.
        trained: number of the draft's weights.
        itemsize: bytes of a number.
        kl: True if hidden states are read too, for a loss against the target's distribution.
        chunk_tokens: tokens whose activations exist at once; 0: all.
        window: tokens that the draft's own attention sees; None: the whole document.
        guard: True if the target reads some sequences again while the draft's inputs are allocated.
    """
    heads, kv = size.n_heads * size.head_dim, size.n_kv_heads * size.head_dim
    chunk = min(chunk_tokens or row.tokens, row.tokens)
    document = min(row.doc_tokens, row.tokens)
    halo = min(window or document, row.tokens - chunk)
    saved = 11 * size.hidden_size + 4 * size.intermediate_size + 5 * heads + 2 * kv + 4 * size.n_heads
    joined = 2 * kv * row.tokens if row.documents > 1 else 0  # K and V of a chunk's documents, concatenated
    activations = ((chunk + halo) * saved + joined) * itemsize
    back = (
        chunk * (2 * size.intermediate_size + size.hidden_size)
        + 2 * size.hidden_size * size.intermediate_size
    )
    hidden = size.hidden_size if kl else 0
    inputs = row.tokens * ((2 * kv + hidden) * itemsize + 8)
    seen = row.attended
    attention = 7 * heads * row.tokens * (seen + 2 * min(window or seen, seen))
    chunks = -(-row.tokens // chunk)
    return StepCost(
        inputs=inputs,
        module=activations + 2 * chunk * size.hidden_size * itemsize + head_bytes(size, chunk, kl=kl),
        flops=6 * (trained + size.head) * row.tokens + attention,
        chunk=chunk,
        backward=activations + back * itemsize,
        attention_flops=attention,
        moved=row.tokens * (size.vocab_size * (KL_MOVED if kl else CE_MOVED) + 4 * saved * itemsize)
        + 20 * trained * chunks,
        chunked=bool(chunk_tokens),
        again=inputs + row.tokens * size.hidden_size * itemsize if guard else 0,
        kv=2 * kv,
        hidden=hidden,
    )

"""Arithmetic of one packed row: what the target's pass and the module's step allocate, multiply and move.

The byte counts follow the code line by line (`targets.model.packed`, `chunked`, `losses`, the methods' own
objectives) and lie within 1% of what they were checked against: a LongSpec step at 8B shape, 8K to 128K
(recipes/results/draft_memory.json). What a rank holds besides is in `costs.ranks`.
Shapes: T tokens of a packed row, E hidden dim, H query heads, G KV heads, D head dim, I inner dim of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

from longtrain.costs.model import Sizes

LOGITS_BYTES = 2**29
"""`losses` takes as many rows at once as have logits of the student and the teacher in fp32 within this."""

KL_BYTES, KL_MOVED = 28, 88
"""Bytes a logit of a block that the KL holds at once, and bytes a logit that it reads and writes in all."""

CE_BYTES, CE_MOVED = 8, 16
"""The same of the cross-entropy, whose kernel works in place."""


@dataclass(frozen=True)
class PackedRow:
    """One micro-batch.

    Args:
        tokens: length of the packed row.
        doc_tokens: longest piece of a document in it.
        response_tokens: tokens of each document's response, where it has one.
        usual_tokens: length of its documents on average; None: each is as long as it may be.
    """

    tokens: int
    doc_tokens: int
    response_tokens: int = 0
    usual_tokens: float | None = None

    @property
    def documents(self) -> int:
        """Documents in the row."""
        return max(1, int(self.tokens / (self.usual_tokens or self.doc_tokens) + 1e-6))

    @property
    def attended(self) -> int:
        """Tokens of the documents that attention reads, on average."""
        return min(self.doc_tokens, self.tokens // self.documents)


@dataclass(frozen=True)
class StepCost:
    """What a module's step of a packed row takes, beside the target's pass and the weights.

    Args:
        inputs: bytes that the step reads of the whole row; they stay from the pass to the end of the step.
        module: most bytes of activations and working memory that exist at once on the way forward.
        flops: floating-point operations, forward and backward.
        chunk: rows whose activations exist at once.
        backward: most bytes of activations and their gradients on the way back.
        attention_flops: the part of `flops` that is attention.
        moved: bytes that everything but products and attention reads and writes.
        chunked: whether gradients are summed up in fp32 before backward begins (`longtrain.chunked`).
        beside_pass: whether the step's memory grows while the target's pass runs, and not after it.
        again: bytes that are there while the target reads the row once more in the same step; 0: it does not.
        kernels: kernels that the host launches one by one and that nothing runs beside.
        kv: numbers of K and V that are read a token; 0 of both: features are not stored.
        hidden: numbers of the LM head's input that are read a token.
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
    """Weights of the target: embeddings, layers and LM head; norms are left out."""
    return size.head * (1 if tied else 2) + size.weights


def kv_bytes_per_token(size: Sizes, *, itemsize: int) -> int:
    """K and V of all layers."""
    return 2 * size.n_layers * size.n_kv_heads * size.head_dim * itemsize


def target_pass_bytes(size: Sizes, row: PackedRow, *, itemsize: int) -> int:
    """Most activations of the target's no-grad pass.

    In a layer's MLP these are there: the embeddings (their caller keeps them), the layer's input, the
    residual stream and its norm, the three wide tensors of the gate, and K and V of the layer; cos and sin of
    all rows. In its attention the queries, three copies of them while they are rotated, and no wide tensors.
    """
    heads, kv = size.n_heads * size.head_dim, 2 * size.n_kv_heads * size.head_dim
    mlp = 4 * size.hidden_size + 3 * size.intermediate_size
    attention = 3 * size.hidden_size + 4 * heads
    return row.tokens * ((max(mlp, attention) + kv + 2 * size.head_dim) * itemsize + 8)


def target_flops(size: Sizes, row: PackedRow) -> int:
    """The target's forward over a row: 2 a weight and token, and causal attention (half of the square)."""
    return 2 * size.weights * row.tokens + target_attention_flops(size, row)


def target_attention_flops(size: Sizes, row: PackedRow) -> int:
    """The part of `target_flops` that is attention."""
    return 2 * size.width * row.tokens * row.attended


def head_bytes(size: Sizes, rows: int, *, kl: bool) -> int:
    """Working memory of the LM-head loss over so many rows, of which it takes a block at once."""
    block = min(rows, max(16, LOGITS_BYTES // (8 * size.vocab_size)))
    return block * size.vocab_size * (KL_BYTES if kl else CE_BYTES)


def draft_step(
    size: Sizes,
    row: PackedRow,
    *,
    trained: int,
    itemsize: int,
    kl: bool = True,
    chunk_tokens: int = 0,
    window: int | None = None,
    guard: bool = False,
) -> StepCost:
    """A step of a draft layer that reads one layer's K and V, in chunks of rows that are computed one by one.

    Saved for backward, a row and in 16 bits: the embedding, three norms with their inputs in fp32 and three
    residuals (11 E), the MLP (4 I), queries, their rotation and outputs of two attentions (5 HD), own K and V
    (2 GD) and two log-sums a head.

    Args:
        size: the target.
        row: what is read.
        trained: weights of the draft.
        itemsize: bytes of a number.
        kl: whether hidden states are read too, for a loss against the target's distribution.
        chunk_tokens: rows whose activations exist at once; 0: all.
        window: tokens that the draft's own attention sees; None: the whole document.
        guard: whether the target reads some rows once more while the draft's inputs are there.
    """
    heads, kv = size.n_heads * size.head_dim, size.n_kv_heads * size.head_dim
    chunk = min(chunk_tokens or row.tokens, row.tokens)
    document = min(row.doc_tokens, row.tokens)
    halo = min(window or document, row.tokens - chunk)
    saved = 11 * size.hidden_size + 4 * size.intermediate_size + 5 * heads + 2 * kv + 4 * size.n_heads
    joined = 2 * kv * row.tokens if row.documents > 1 else 0  # K and V of a chunk's documents, side by side
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

"""Arithmetic of a training run: parameters, bytes and floating-point operations, from shapes alone.

These are estimates of what the code allocates and multiplies, not measurements: `longtrain bench
suite=draft_memory` measures.
Shapes: T tokens of a packed row, E hidden dim, V vocabulary, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from longtrain.costs.model import Sizes

HEAD_BLOCK_BYTES = 2**31
"""Working memory of the LM-head loss: logits of one block of rows, student and teacher, and their softmax."""

STATE_BYTES = 4 + 4 + 8 + 4 + 2
"""A trained weight: itself, gradient, two Adam moments, the chunks' gradient sum (fp32) and its bf16 copy."""


@dataclass(frozen=True)
class PackedRow:
    """One micro-batch.

    Args:
        tokens: length of the packed row.
        doc_tokens: length of its documents.
        chunk_tokens: rows of the draft's step whose activations exist at once; 0: all.
    """

    tokens: int
    doc_tokens: int
    chunk_tokens: int

    @property
    def chunk(self) -> int:
        """Rows at once."""
        return min(self.chunk_tokens or self.tokens, self.tokens)


def target_parameters(size: Sizes, *, tied: bool) -> int:
    """Weights of the target: embeddings, layers and LM head; norms are left out."""
    return size.head * (1 if tied else 2) + size.weights


def kv_bytes_per_token(size: Sizes, *, itemsize: int) -> int:
    """K and V of all layers."""
    return 2 * size.n_layers * size.n_kv_heads * size.head_dim * itemsize


def input_bytes(size: Sizes, row: PackedRow, *, itemsize: int, hidden: bool) -> int:
    """What the draft reads of the whole row: K and V of one layer, and hidden states for a KL loss."""
    width = 2 * size.n_kv_heads * size.head_dim + (size.hidden_size if hidden else 0)
    return row.tokens * (width * itemsize + 8)


def target_pass_bytes(size: Sizes, row: PackedRow, *, itemsize: int) -> int:
    """Most activations of the target's no-grad pass: the residual stream and the MLP's three wide tensors."""
    width = 3 * size.hidden_size + 3 * size.intermediate_size
    return row.tokens * width * itemsize


def draft_chunk_bytes(size: Sizes, row: PackedRow, *, itemsize: int) -> int:
    """Activations that one chunk of the draft keeps for its backward, gradients of the widest included."""
    heads = size.n_heads * size.head_dim
    width = 14 * size.hidden_size + 6 * heads + 6 * size.intermediate_size
    return row.chunk * width * itemsize + HEAD_BLOCK_BYTES


def target_flops(size: Sizes, row: PackedRow) -> int:
    """The target's forward over a row: 2 a weight and token, and causal attention (half of the square)."""
    heads = size.n_heads * size.head_dim
    linear = 2 * size.weights * row.tokens
    return linear + 2 * size.n_layers * heads * row.tokens * row.doc_tokens


def draft_flops(size: Sizes, row: PackedRow, *, trained: int, window: int) -> int:
    """The draft's forward and backward over a row, its two attentions and the LM-head loss included."""
    heads = size.n_heads * size.head_dim
    linear = 6 * trained * row.tokens
    cross = 3 * 2 * heads * row.tokens * row.doc_tokens
    own = 3 * 4 * heads * row.tokens * min(window, row.doc_tokens)
    head = 6 * size.hidden_size * size.vocab_size * row.tokens
    return linear + cross + own + head


def suffix_input_bytes(size: Sizes, row: PackedRow, *, itemsize: int) -> int:
    """What rows behind prompts read of a packed row: K and V of all layers, scores and their gradient."""
    scores = 2 * size.n_layers * size.n_heads * 4
    return row.tokens * (kv_bytes_per_token(size, itemsize=itemsize) + scores)


def suffix_bytes(size: Sizes, row: PackedRow, *, rows: int, itemsize: int) -> int:
    """Activations that `rows` rows behind each document keep in all layers for their backward."""
    width = 4 * size.hidden_size + 3 * size.n_heads * size.head_dim + 3 * size.intermediate_size
    return _documents(row) * rows * size.n_layers * width * itemsize


def suffix_flops(size: Sizes, row: PackedRow, *, rows: int, response: int) -> int:
    """Forward and backward of `rows` rows behind each document, and the scores of both sides.

    Weights are frozen: 2 a weight and row forward, 2 backward. Attention reads all of a document: products
    with K and V forward, five backward, one for the scores; the response's scores take two.
    """
    heads = size.n_heads * size.head_dim
    linear = 4 * size.weights * rows
    attention = 2 * size.n_layers * heads * row.doc_tokens * (8 * rows + 2 * response)
    return _documents(row) * (linear + attention)


def _documents(row: PackedRow) -> int:
    """Documents in a packed row, each as long as they may be."""
    return max(1, row.tokens // row.doc_tokens)

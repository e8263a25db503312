"""Arithmetic of a training run: parameters, bytes and floating-point operations, from shapes alone.

Estimates of what the code allocates and multiplies, not measurements: `longtrain bench suite=draft_memory`
measures. Shapes: T tokens of a packed row, E hidden dim, V vocabulary, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longtrain.targets.info import TargetInfo

HEAD_BLOCK_BYTES = 2**31
"""Working memory of the LM-head loss: logits of one block of rows, student and teacher, and their softmax."""

STATE_BYTES = 4 + 4 + 8 + 4 + 2
"""A trained weight: itself, gradient, two Adam moments, the chunks' gradient sum (fp32) and its bf16 copy."""


@dataclass(frozen=True)
class Row:
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


def target_parameters(info: TargetInfo, *, tied: bool) -> int:
    """Weights of the target: embeddings, layers, LM head."""
    return info.vocab_size * info.hidden_size * (1 if tied else 2) + info.n_layers * layer_parameters(info)


def layer_parameters(info: TargetInfo) -> int:
    """Weights of one decoder layer (norms left out)."""
    heads = 2 * info.n_heads + 2 * info.n_kv_heads
    return info.hidden_size * (heads * info.head_dim + 3 * info.intermediate_size)


def kv_bytes_per_token(info: TargetInfo, *, itemsize: int) -> int:
    """K and V of all layers."""
    return 2 * info.n_layers * info.n_kv_heads * info.head_dim * itemsize


def input_bytes(info: TargetInfo, row: Row, *, itemsize: int, hidden: bool) -> int:
    """What the draft reads of the whole row: K and V of one layer, and hidden states for a KL loss."""
    width = 2 * info.n_kv_heads * info.head_dim + (info.hidden_size if hidden else 0)
    return row.tokens * (width * itemsize + 8)


def target_pass_bytes(info: TargetInfo, row: Row, *, itemsize: int) -> int:
    """Most activations of the target's no-grad pass: the residual stream and the MLP's three wide tensors."""
    width = 3 * info.hidden_size + 3 * info.intermediate_size
    return row.tokens * width * itemsize


def draft_chunk_bytes(info: TargetInfo, row: Row, *, itemsize: int) -> int:
    """Activations that one chunk of the draft keeps for its backward, gradients of the widest included."""
    heads = info.n_heads * info.head_dim
    width = 14 * info.hidden_size + 6 * heads + 6 * info.intermediate_size
    return row.chunk * width * itemsize + HEAD_BLOCK_BYTES


def target_flops(info: TargetInfo, row: Row) -> int:
    """The target's forward over a row: 2 a weight and token, and causal attention (half of the square)."""
    heads = info.n_heads * info.head_dim
    linear = 2 * info.n_layers * layer_parameters(info) * row.tokens
    return linear + 2 * info.n_layers * heads * row.tokens * row.doc_tokens


def draft_flops(info: TargetInfo, row: Row, *, trained: int, window: int) -> int:
    """The draft's forward and backward over a row, its two attentions and the LM-head loss included."""
    heads = info.n_heads * info.head_dim
    linear = 6 * trained * row.tokens
    cross = 3 * 2 * heads * row.tokens * row.doc_tokens
    own = 3 * 4 * heads * row.tokens * min(window, row.doc_tokens)
    head = 6 * info.hidden_size * info.vocab_size * row.tokens
    return linear + cross + own + head


def suffix_input_bytes(info: TargetInfo, row: Row, *, itemsize: int) -> int:
    """What rows behind prompts read of a packed row: K and V of all layers, scores and their gradient."""
    scores = 2 * info.n_layers * info.n_heads * 4
    return row.tokens * (kv_bytes_per_token(info, itemsize=itemsize) + scores)


def suffix_bytes(info: TargetInfo, row: Row, *, rows: int, itemsize: int) -> int:
    """Activations that `rows` rows behind each document keep in all layers for their backward."""
    width = 4 * info.hidden_size + 3 * info.n_heads * info.head_dim + 3 * info.intermediate_size
    return _documents(row) * rows * info.n_layers * width * itemsize


def suffix_flops(info: TargetInfo, row: Row, *, rows: int, response: int) -> int:
    """Forward and backward of `rows` rows behind each document, and the scores of both sides.

    Weights are frozen: 2 a weight and row forward, 2 backward. Attention reads all of a document: products
    with K and V forward, five backward, one for the scores; the response's scores take two.
    """
    heads = info.n_heads * info.head_dim
    linear = 4 * info.n_layers * layer_parameters(info) * rows
    attention = 2 * info.n_layers * heads * row.doc_tokens * (8 * rows + 2 * response)
    return _documents(row) * (linear + attention)


def _documents(row: Row) -> int:
    """Documents in a packed row, each as long as they may be."""
    return max(1, row.tokens // row.doc_tokens)

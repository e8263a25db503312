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
        response_tokens: tokens of each document's response, where it has one.
    """

    tokens: int
    doc_tokens: int
    response_tokens: int = 0

    @property
    def documents(self) -> int:
        """Documents in the row, each as long as they may be."""
        return max(1, self.tokens // self.doc_tokens)


@dataclass(frozen=True)
class StepCost:
    """What a module's step of a packed row takes, beside the target's pass and the weights.

    Args:
        inputs: bytes of what the step reads of the whole row.
        module: most bytes of activations that exist at once.
        flops: floating-point operations, forward and backward.
        chunk: rows whose activations exist at once.
    """

    inputs: int
    module: int
    flops: int
    chunk: int


def target_parameters(size: Sizes, *, tied: bool) -> int:
    """Weights of the target: embeddings, layers and LM head; norms are left out."""
    return size.head * (1 if tied else 2) + size.weights


def kv_bytes_per_token(size: Sizes, *, itemsize: int) -> int:
    """K and V of all layers."""
    return 2 * size.n_layers * size.n_kv_heads * size.head_dim * itemsize


def target_pass_bytes(size: Sizes, row: PackedRow, *, itemsize: int) -> int:
    """Most activations of the target's no-grad pass: the residual stream and the MLP's three wide tensors."""
    width = 3 * size.hidden_size + 3 * size.intermediate_size
    return row.tokens * width * itemsize


def target_flops(size: Sizes, row: PackedRow) -> int:
    """The target's forward over a row: 2 a weight and token, and causal attention (half of the square)."""
    heads = size.n_heads * size.head_dim
    linear = 2 * size.weights * row.tokens
    return linear + 2 * size.n_layers * heads * row.tokens * row.doc_tokens


def draft_step(
    size: Sizes,
    row: PackedRow,
    *,
    trained: int,
    itemsize: int,
    hidden: bool = True,
    chunk_tokens: int = 0,
    window: int | None = None,
) -> StepCost:
    """A step of a draft that reads one layer's K and V, in chunks of rows that are computed one by one.

    Args:
        size: the target.
        row: what is read.
        trained: weights of the draft.
        itemsize: bytes of a number.
        hidden: whether hidden states are read too, for a loss against the target's distribution.
        chunk_tokens: rows whose activations exist at once; 0: all.
        window: tokens that the draft's own attention sees; None: the whole document.
    """
    heads = size.n_heads * size.head_dim
    kv = 2 * size.n_kv_heads * size.head_dim
    read = kv + (size.hidden_size if hidden else 0)
    chunk = min(chunk_tokens or row.tokens, row.tokens)
    width = 14 * size.hidden_size + 6 * heads + 6 * size.intermediate_size
    linear = 6 * trained * row.tokens
    cross = 3 * 2 * heads * row.tokens * row.doc_tokens
    own = 3 * 4 * heads * row.tokens * min(window or row.doc_tokens, row.doc_tokens)
    head = 6 * size.head * row.tokens
    return StepCost(
        inputs=row.tokens * (read * itemsize + 8),
        module=chunk * width * itemsize + HEAD_BLOCK_BYTES,
        flops=linear + cross + own + head,
        chunk=chunk,
    )

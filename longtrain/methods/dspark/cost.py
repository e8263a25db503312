"""Estimates the memory, operations and traffic of a DSpark training step and of its decoding cycle.

The formulas follow the phases of `objective`, `chunked`, `loss` and `kernels.anchored`; they have
not been compared with measurements yet.

Shapes: T tokens of a packed sequence, E hidden dim, I inner dim of the MLP, n layers of the target that are
read, L layers of the draft, F rank of the Markov head or the selector, V tokens of the target's vocabulary, K
of the draft's.
"""

from __future__ import annotations

from typing import NamedTuple

from longtrain.costs.cycle import Forward
from longtrain.costs.method import CycleCost
from longtrain.costs.model import Sizes
from longtrain.costs.roofline import Width
from longtrain.costs.training import PackedSequence, StepCost
from longtrain.methods.dspark.config import Config, draft_vocab, layers_of

LOSS_BYTES = 2**30
"""Bytes of the logits of a block of slots, as in `losses.blocks`: the target's over its vocabulary and over
the draft's, and the draft's."""

TEACHER_MOVED, DRAFT_MOVED = 3, 14
"""Number of times that a logit is read or written: of the target, for each token that slots predict; and of a
slot, 8 as in EAGLE-3, 4 for the Markov head and 2 for the target's logits of the slot's token."""


def _widths(config: Config, size: Sizes) -> tuple[int, int, int]:
    """Return the sizes of queries, of keys and of the MLP."""
    dim = config.head_dim or size.head_dim
    heads, groups = config.n_heads or size.n_heads, config.n_kv_heads or size.n_kv_heads
    return heads * dim, groups * dim, config.intermediate_size or size.intermediate_size


class DraftWeights(NamedTuple):
    """Numbers of weights.

    Args:
        layer: of one layer, with its convolutions.
        fc: of `fc`.
        embedding: of tables of which a token reads one row, the Markov head's or both of the selector.
        markov: of the matrix that is read whole for a slot, the Markov head's or the selector's.
        head: of the draft's own LM head; 0: the target's.
        learned: of the table of drafted tokens, whose gradient the loss sums up.
    """

    layer: int
    fc: int
    embedding: int
    markov: int
    head: int
    learned: int


def draft_weights(config: Config, size: Sizes) -> DraftWeights:
    """Return the numbers of a draft's weights."""
    E, (wide, kv, inner) = size.hidden_size, _widths(config, size)
    fc = len(layers_of(config, size.n_layers)) * E * E
    rank, drafted = 0 if config.heads == "none" else config.markov_rank, draft_vocab(config, size.vocab_size)
    head = E * drafted if config.draft_vocab_size else 0
    layer = E * (2 * wide + 2 * kv + 3 * inner + 2 * _kernels(config, E))
    embedding, markov = rank * size.vocab_size, rank * drafted
    if config.candidates:
        embedding, markov = 2 * embedding, rank * E
    return DraftWeights(layer, fc, embedding, markov, head, rank * drafted)


def _kernels(config: Config, E: int) -> int:
    """Return the numbers of both kernels of a row in one sublayer's convolutions."""
    return 2 * config.conv_taps * (E // config.conv_group)


def training(config: Config, size: Sizes, row: PackedSequence, trained: int, itemsize: int) -> StepCost:
    """Estimate a step: keys and values of all tokens without a graph, the blocks, keys and values again.

    Saved for backward per row of a block and layer, in 16-bit numbers: two norms with inputs in fp32 and
    outputs (6 E), the MLP (4 I), queries and their rotation and outputs (5 HD), own K and V (3 GD), and for
    each tap of the four convolutions a kernel and a row (8 E); per token of a chunk once the states that are
    read, and the keys before norm and rotation.

    Note: every token is counted as a label, and slots predict as many different tokens as they can.
    """
    E, (wide, kv, inner) = size.hidden_size, _widths(config, size)
    layer, fc, _, markov, head, learned = draft_weights(config, size)
    K = draft_vocab(config, size.vocab_size)
    L, V, n = config.n_layers, size.vocab_size, len(layers_of(config, size.n_layers))
    T, chunk = row.tokens, min(config.chunk_tokens or row.tokens, row.tokens)
    rows = T * config.rows // config.anchor_every
    slots = T * config.block_size // config.anchor_every
    at_once = min(chunk, rows) if config.chunk_tokens else rows
    each = L * (6 * E + 4 * inner + 5 * wide + 3 * kv + 8 * config.conv_taps * E + 2 * _kernels(config, E))
    # K and V, what a chunk leaves on them, and its sum in fp32; one layer's part of it in fp32 in a backward
    own, last = sum(config.own_layers), 0 if all(config.own_layers) else 2 * kv
    shared = 2 * own * kv * T * (2 * itemsize + 4) + 2 * kv * T * 4
    joined = (2 if config.level_inputs else 1) * n * E
    activations = max(at_once * each, chunk * (joined + 2 * E + 4 * own * kv)) * itemsize
    numbers = V + 2 * K
    block = min(at_once, max(16, LOSS_BYTES // (numbers * itemsize)))
    # both matrices in 16 bits, their gradients and a product
    loss = block * numbers * itemsize + (2 * 4 + itemsize) * (learned + head)
    chunks = -(-rows // max(at_once, 1))
    document = row.attended
    seen = sum(min(2 * window, document) if window else document for window in config.layer_windows)
    attention = 7 * wide * rows * seen
    predicted = min(slots, T)
    logits = 2 * V * E * predicted + (4 * K * E + 2 * head + 6 * markov) * slots
    linear = 6 * L * layer * rows + 8 * (fc + 2 * own * E * kv) * T + logits
    logits_moved = (TEACHER_MOVED * V * predicted + DRAFT_MOVED * K * slots) * itemsize
    moved = rows * 4 * each * itemsize + logits_moved + 20 * trained * chunks
    return StepCost(
        inputs=T * (((n + 1) * E + last) * itemsize + 8),
        module=shared + activations + loss,
        flops=linear + attention,
        chunk=chunk,
        backward=activations + at_once * (2 * inner + E) * itemsize,
        attention_flops=attention,
        moved=moved,
        chunked=bool(config.chunk_tokens),
        kv=last,
        hidden=(n + 1) * E,
    )


def cycle(config: Config, size: Sizes, widths: tuple[int, ...], itemsize: int) -> CycleCost:
    """Estimate a cycle: one pass of all layers over a block; Markov head or selector per level; the target.

    Note: attention is counted with the target's number of heads, even if the draft has another, and with
        every token where only some layers have a window.
    """
    width = Width(8 * itemsize, 8 * itemsize)
    layer, fc, embedding, markov, head, _ = draft_weights(config, size)
    counted = config.n_layers * size.layer + (size.head if head else 0)  # what they read of the target
    windows = config.layer_windows
    seen = None if None in windows else max(one for one in windows if one is not None)
    more = config.n_layers * layer + fc + len(widths) * markov + head - counted
    draft = Forward(width, rows=config.rows, layers=config.n_layers, more_weights=more, seen=seen)
    row = 2 * itemsize * _widths(config, size)[1]

    def cache_bytes(batch: int, tokens: int) -> float:
        own = [one for one, owned in zip(windows, config.own_layers, strict=True) if owned]
        held = sum(tokens if one is None else min(one, tokens) for one in own)
        return float(batch * (size.kv_bytes(tokens) * itemsize / 2 + held * row))

    return CycleCost(
        title="DSpark",
        alone=Forward(width),
        draft=(draft,),
        verify=Forward(width, rows=1 + sum(widths)),
        weight_bytes=float(itemsize * (config.n_layers * layer + fc + embedding + markov + head)),
        cache_bytes=cache_bytes,
    )

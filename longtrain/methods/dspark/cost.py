"""Estimates the memory, operations and traffic of a DSpark training step and of its decoding cycle.

The formulas follow the phases of `objective`, `chunked`, `loss` and `kernels.anchored`; they have
not been compared with measurements yet.

Shapes: T tokens of a packed sequence, E hidden dim, I inner dim of the MLP, n layers of the target that are
read, L layers of the draft, F rank of the Markov head, V vocabulary.
"""

from __future__ import annotations

from longtrain.costs.cycle import Forward
from longtrain.costs.method import CycleCost
from longtrain.costs.model import Sizes
from longtrain.costs.roofline import Width
from longtrain.costs.training import PackedSequence, StepCost
from longtrain.methods.dspark.config import Config, layers_of

LOSS_BYTES = 2**30
"""Bytes of the logits of a block of slots, the draft's and the target's, as in `losses.blocks`."""

MOVED = 14
"""Number of times that a pair of logits, the draft's and the target's, is read or written."""


def _widths(config: Config, size: Sizes) -> tuple[int, int, int]:
    """Return the sizes of queries, of keys and of the MLP."""
    dim = config.head_dim or size.head_dim
    heads, groups = config.n_heads or size.n_heads, config.n_kv_heads or size.n_kv_heads
    return heads * dim, groups * dim, config.intermediate_size or size.intermediate_size


def draft_weights(config: Config, size: Sizes) -> tuple[int, int, int]:
    """Return the weights of one layer, of `fc`, and of one of the Markov head's two matrices."""
    E, (wide, kv, inner) = size.hidden_size, _widths(config, size)
    fc = len(layers_of(config, size.n_layers)) * E * E
    markov = 0 if config.heads == "none" else config.markov_rank * size.vocab_size
    return E * (2 * wide + 2 * kv + 3 * inner), fc, markov


def training(config: Config, size: Sizes, row: PackedSequence, trained: int, itemsize: int) -> StepCost:
    """Estimate a step: keys and values of all tokens without a graph, the blocks, keys and values again.

    Saved for backward per row of a block and layer, in 16-bit numbers: two norms with inputs in fp32 and
    outputs (6 E), the MLP (4 I), queries and their rotation and outputs (5 HD), own K and V (3 GD); per token
    of a chunk once the states that are read, and the keys before norm and rotation.

    Note: every token is counted as a label.
    """
    E, (wide, kv, inner) = size.hidden_size, _widths(config, size)
    layer, fc, markov = draft_weights(config, size)
    L, V, n = config.n_layers, size.vocab_size, len(layers_of(config, size.n_layers))
    T, chunk = row.tokens, min(config.chunk_tokens or row.tokens, row.tokens)
    rows = T * config.rows // config.anchor_every
    slots = T * config.block_size // config.anchor_every
    at_once = min(chunk, rows) if config.chunk_tokens else rows
    each = L * (6 * E + 4 * inner + 5 * wide + 3 * kv)
    # K and V, what a chunk leaves on them, and its sum in fp32; one layer's part of it in fp32 in a backward
    own, last = sum(config.own_layers), 0 if all(config.own_layers) else 2 * kv
    shared = 2 * own * kv * T * (2 * itemsize + 4) + 2 * kv * T * 4
    joined = (2 if config.level_inputs else 1) * n * E
    activations = max(at_once * each, chunk * (joined + 2 * E + 4 * own * kv)) * itemsize
    block = min(at_once, max(16, LOSS_BYTES // (2 * V * itemsize)))
    loss = 2 * block * V * itemsize + (2 * 4 + itemsize) * markov
    chunks = -(-rows // max(at_once, 1))
    document = row.attended
    seen = sum(min(2 * window, document) if window else document for window in config.layer_windows)
    attention = 7 * wide * rows * seen
    linear = 6 * L * layer * rows + 8 * (fc + 2 * own * E * kv) * T + (6 * V * E + 6 * markov) * slots
    moved = rows * 4 * each * itemsize + slots * V * itemsize * MOVED + 20 * trained * chunks
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
    """Estimate a cycle: one pass of all layers over a block; the Markov head per level; then the target.

    Note: attention is counted with the target's number of heads, even if the draft has another, and with
        every token where only some layers have a window.
    """
    width = Width(8 * itemsize, 8 * itemsize)
    layer, fc, markov = draft_weights(config, size)
    counted = config.n_layers * size.layer
    windows = config.layer_windows
    seen = None if None in windows else max(one for one in windows if one is not None)
    more = config.n_layers * layer + fc + len(widths) * markov - counted
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
        weight_bytes=float(itemsize * (config.n_layers * layer + fc + 2 * markov)),
        cache_bytes=cache_bytes,
    )

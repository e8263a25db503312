"""Estimates the memory and operations of an indexer's training step beyond the target's forward.

The formulas follow `methods.set_objective` and `chunked`; they have not been compared with measurements yet.
"""

from __future__ import annotations

from longtrain.costs.model import Sizes
from longtrain.costs.training import PackedSequence, StepCost
from longtrain.methods.indexer.config import Config
from longtrain.methods.set_learning import BLOCK_BYTES, BLOCKS, KEY_ROWS


def training(config: Config, size: Sizes, row: PackedSequence, trained: int, itemsize: int) -> StepCost:
    """Estimate a step: index keys of all tokens without a graph, blocks of queries, and the keys again.

    The target's keys of all layers stay in memory. A block of queries is compared with every key of its
    document, in each layer with the target's dimensions and with the index's.
    """
    heads, kv_heads = size.n_layers * size.n_heads, size.n_layers * size.n_kv_heads
    rows, T, D, dims = config.queries * row.documents, row.tokens, size.head_dim, config.dims
    block = min(BLOCK_BYTES, 4 * heads * row.attended * config.queries)
    made = min(KEY_ROWS, T) * kv_heads * (D + 3 * dims) * itemsize
    compared = 2 * row.attended * heads * (3 * dims + D)
    return StepCost(
        inputs=T * kv_heads * D * itemsize,
        module=T * kv_heads * dims * (itemsize + 4) + BLOCKS * block + made,
        flops=2 * D * dims * (4 * kv_heads * T + 3 * heads * rows) + rows * compared,
        chunk=min(KEY_ROWS, T),
        backward=made,
        attention_flops=rows * compared,
        moved=rows * 4 * row.attended * (BLOCKS + 3) * heads,
        chunked=True,
    )

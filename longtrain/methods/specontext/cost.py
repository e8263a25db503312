"""Estimates the cost of a retrieval head: a training step beyond the target's forward, and a decoding step.

The formulas follow `objective`, `chunked` and `runtime`; those of training have not been compared with
measurements yet.

Shapes: T tokens of a packed sequence, R queries of a document, L layers, E hidden dim, H query heads, G KV
heads, D head dim, n hidden states that the head reads.
"""

from __future__ import annotations

from longtrain.cache.entry_sets import ReadBudget
from longtrain.costs.cycle import Forward
from longtrain.costs.method import CycleCost
from longtrain.costs.model import Sizes
from longtrain.costs.roofline import Width
from longtrain.costs.training import PackedSequence, StepCost
from longtrain.methods.set_learning import BLOCK_BYTES, BLOCKS, KEY_ROWS
from longtrain.methods.specontext.config import EMBEDDING, SHIFTED, Config, hidden_of


def training(config: Config, size: Sizes, row: PackedSequence, trained: int, itemsize: int) -> StepCost:
    """Estimate a step: keys of all tokens without a graph, blocks of queries, and the keys again.

    Of the target, its keys of all layers and the hidden states that the head reads stay in memory. A block of
    queries is compared with every key of its document, by the head and by every layer of the target.
    """
    E, T = size.hidden_size, row.tokens
    n = len(hidden_of(config, size.n_layers))
    heads, dim = config.n_heads or size.n_heads, config.head_dim or size.head_dim
    keys = (config.n_kv_heads or size.n_kv_heads) * dim * (1 if config.share_keys else config.sets)
    wide = (config.conv if config.variant == EMBEDDING else 2) * E
    rows = config.queries * row.documents
    kept = T * ((size.n_layers * size.n_kv_heads * size.head_dim + n * E) * itemsize + 8)
    scored = config.sets * heads * row.attended
    block = min(BLOCK_BYTES, 4 * scored * config.queries)
    made = min(KEY_ROWS, T) * (3 * n * E + 4 * wide + 4 * config.mlp + 3 * keys) * itemsize
    fc = n * E * E
    size_of_entry = E if config.variant == EMBEDDING else 2 * E
    fc += 3 * size_of_entry * config.mlp
    projected = 2 * (fc + size_of_entry * keys)
    asked = 2 * (fc + 2 * E * config.sets * heads * dim)
    compared = 2 * row.attended * dim * (3 * config.sets * heads + size.n_layers * size.n_heads)
    return StepCost(
        inputs=kept,
        module=T * keys * (itemsize + 4) + BLOCKS * block + made,
        flops=4 * projected * T + rows * (3 * asked + compared),
        chunk=min(KEY_ROWS, T),
        backward=made,
        attention_flops=rows * compared,
        moved=rows * 4 * row.attended * (BLOCKS * config.sets * heads + 3 * size.n_layers * size.n_heads),
        chunked=True,
    )


def cycle(config: Config, size: Sizes, widths: tuple[int, ...], itemsize: int) -> CycleCost:
    """Estimate a decoding step: the head's scores of all tokens, and the target over the entries it selects.

    The head drafts nothing itself. The selection is not included: three launches that read scores.
    """
    E, width = size.hidden_size, Width(8 * itemsize, 8 * itemsize)
    heads, dim = config.n_heads or size.n_heads, config.head_dim or size.head_dim
    keys = (config.n_kv_heads or size.n_kv_heads) * dim * (1 if config.share_keys else config.sets)
    wide = E if config.variant == EMBEDDING else 2 * E
    fc = len(hidden_of(config, size.n_layers)) * E * E if config.variant == SHIFTED else 0
    weights = fc + wide * (config.sets * heads * dim + keys) + 3 * wide * config.mlp
    # without a layer and the LM head, which `Forward` counts in any case
    score = Forward(width, layers=0, more_weights=weights - size.head, more_keys=keys)
    alone = Forward(width, seen=ReadBudget.rows)

    def cache_bytes(batch: int, tokens: int) -> float:
        return batch * (size.kv_bytes(tokens) * itemsize / 2 + tokens * keys * itemsize)

    return CycleCost(
        title="SpeContext",
        alone=alone,
        draft=(),
        verify=alone,
        weight_bytes=float(itemsize * weights),
        cache_bytes=cache_bytes,
        before=(score,),
    )

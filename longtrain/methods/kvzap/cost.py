"""What KVzap costs: a training step with the repetition that gives labels, and its products in the prefill.

Shapes: S prompt tokens, T tokens of a packed row, L layers, E hidden dim, G KV heads.
"""

from __future__ import annotations

from longtrain.costs.hardware import Gpu
from longtrain.costs.method import MethodCost, PromptShape
from longtrain.costs.model import ITEM, Sizes, Work
from longtrain.costs.training import PackedRow, StepCost, kv_bytes_per_token
from longtrain.methods.kvzap.config import Config
from longtrain.methods.repetition import LONGEST_REQUEST

SCORE_BYTES = 32
"""Bytes of a token, layer and KV head: foretold and true score, its gradient, and what the error takes."""


def weights(config: Config, size: Sizes) -> int:
    """Trained numbers."""
    E, G, inner = size.hidden_size, size.n_kv_heads, config.hidden_dim
    layer = E * inner + inner + inner * G + G if inner else E * G + G
    return size.n_layers * layer


def training(config: Config, size: Sizes, row: PackedRow, trained: int, itemsize: int) -> StepCost:
    """Forward and backward of the module over all tokens, and the target's pass over their repetition.

    Backward keeps what each layer's attention reads and the MLP's inner rows (once in the target's type and
    twice in fp32). The cache holds the contexts, and room for a chunk and its request. A repeated row attends
    to its whole context and to what was repeated before it; two more products with the chunk's keys give the
    scores. Two operations a weight forward and two backward: nothing flows on into the target.
    """
    chunk = min(config.chunk, row.attended)
    room = 1 + (min(config.chunk, row.doc_tokens) + LONGEST_REQUEST) / row.doc_tokens
    inputs = int(row.tokens * kv_bytes_per_token(size, itemsize=itemsize) * room)
    inner = config.hidden_dim * (itemsize + 8)
    saved = size.n_layers * (size.hidden_size * itemsize + inner + size.n_kv_heads * SCORE_BYTES)
    attention = 4 * size.width * row.tokens * (row.attended + chunk // 2 + chunk + chunk // 2)
    return StepCost(
        inputs=inputs,
        module=row.tokens * saved,
        flops=(4 * trained + 2 * size.weights) * row.tokens + attention,
        chunk=row.tokens,
        backward=row.tokens * saved,
        attention_flops=attention,
        moved=2 * row.tokens * saved + 2 * inputs + 2 * itemsize * size.weights,
        beside_pass=True,
        again=inputs + row.tokens * saved,
    )


def first_token(config: Config, prompt: PromptShape, gpu: Gpu) -> dict[str, float]:
    """Milliseconds of the module's products inside the prefill, with no other pass."""
    count, base = weights(config, prompt.size), prompt.prefill
    own = Work(2 * count * prompt.tokens, ITEM * count)
    return {"ms": (base + own).ms(gpu) - base.ms(gpu)}


COST = MethodCost(
    training=training,
    first_token=first_token,
    note="KVzap's paper: the MLP adds about 1% of a layer's products, the linear layer 0.02% (8B).",
    suite="eviction",
    response_tokens=1,
)

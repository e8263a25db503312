"""Estimates the cost of KVzap: a training step with the repetition that gives labels, and the prefill.

Shapes: S prompt tokens, T tokens of a packed sequence, L layers, E hidden dim, G KV heads.
"""

from __future__ import annotations

from longtrain.costs.hardware import Gpu
from longtrain.costs.method import MethodCost, PromptShape
from longtrain.costs.model import ITEM, Sizes, Work
from longtrain.costs.training import PackedSequence, StepCost, kv_bytes_per_token
from longtrain.methods.kvzap.config import Config
from longtrain.methods.repetition import LONGEST_REQUEST

SCORE_BYTES = 32
"""Bytes per token, layer and KV head: predicted and true score, the gradient, and the error's temporaries."""


def weights(config: Config, size: Sizes) -> int:
    """Return the number of trained weights."""
    E, G, inner = size.hidden_size, size.n_kv_heads, config.hidden_dim
    layer = E * inner + inner + inner * G + G if inner else E * G + G
    return size.n_layers * layer


def training(config: Config, size: Sizes, row: PackedSequence, trained: int, itemsize: int) -> StepCost:
    """Estimate forward and backward of the module over all tokens, and the target's repetition of them.

    Backward stores each layer's attention input and the MLP's inner activations (once in the target's dtype
    and twice in fp32). The cache has room for the contexts, a chunk and its request. A repeated token attends
    to its whole context and to what was repeated before it; two more products with the chunk's keys give the
    scores. Two operations per weight forward and two backward: no gradient flows into the target.
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
        flops=(4 * trained + 2 * size.used) * row.tokens + attention,
        chunk=row.tokens,
        backward=row.tokens * saved,
        attention_flops=attention,
        moved=2 * row.tokens * saved + 2 * inputs + 2 * itemsize * size.weights,
        beside_pass=True,
        again=inputs + row.tokens * saved,
    )


def first_token(config: Config, prompt: PromptShape, gpu: Gpu) -> dict[str, float]:
    """Return the milliseconds that the module's products add to the prefill; there is no extra pass."""
    count, base = weights(config, prompt.size), prompt.prefill
    own = Work(2 * count * prompt.tokens, ITEM * count)
    return {"ms": (base + own).ms(gpu) - base.ms(gpu)}


COST = MethodCost(
    training=training,
    first_token=first_token,
    note="KVzap's paper: the MLP adds about 1% of a layer's products, the linear layer 0.02% (8B).",
    suite="training",
    response_tokens=1,
)

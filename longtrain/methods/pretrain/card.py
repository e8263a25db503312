"""Writes the model card of a target that was trained here."""

from __future__ import annotations

from longtrain.methods.pretrain.config import Config

TEMPLATE = """---
{licence}pipeline_tag: text-generation
tags: [longtrain, llama]
---
# {name}

A Llama of {parameters:.1f}M parameters: {layers} layers, hidden {hidden}, {heads} query and {kv} KV heads of
size {head_dim}, MLP {mlp}, vocabulary {vocab} (byte-level BPE, digits apart), RoPE base {rope:.0f}, context
{context} tokens, tied embeddings. It was trained from scratch with longtrain, to be a target that uses its
context.

Weights are int8 rows with one fp32 scale each in `weights.int8.safetensors`; the expanded bf16 weights are
the reference, and `target.path=FOLDER` or `load_target("FOLDER")` expands them. Chat:
`<|user|>question<|assistant|>answer<|end|>`. To measure it: `longtrain eval suite=needle target.path=FOLDER`.
"""


def card(config: Config, *, name: str, licence: str | None = None) -> str:
    """Return the card as Markdown; export adds the run's command, data and results.

    Args:
        config: the model's shape.
        name: name of the target.
        licence: licence of the target; None: not stated.
    """
    kv, q = config.n_kv_heads * config.head_dim, config.n_heads * config.head_dim
    layer = 2 * config.hidden_size * (q + kv) + 3 * config.hidden_size * config.intermediate_size
    parameters = config.vocab_size * config.hidden_size + config.n_layers * layer
    return TEMPLATE.format(
        licence=f"license: {licence}\n" if licence else "",
        name=name,
        parameters=parameters / 1e6,
        layers=config.n_layers,
        hidden=config.hidden_size,
        heads=config.n_heads,
        kv=config.n_kv_heads,
        head_dim=config.head_dim,
        mlp=config.intermediate_size,
        vocab=config.vocab_size,
        rope=config.rope_base,
        context=config.max_positions,
    )

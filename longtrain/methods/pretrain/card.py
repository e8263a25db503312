"""The model card of a reference target: what it is, how it was trained, what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longtrain.methods.pretrain.config import Config
from longtrain.provenance import typed_command

TEMPLATE = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
tags: [longtrain, llama]
---
# {name}: a small Llama that uses its context

{parameters:.1f}M parameters: {layers} layers, hidden {hidden}, {heads} query and {kv} KV heads of size
{head_dim}, MLP {mlp}, vocabulary {vocab} (byte-level BPE, digits apart), RoPE base {rope:.0f}, context
{context} tokens, tied embeddings. It reads, continues and quotes prose and code and finds facts in its
context; it knows nothing of the world. It is the reference target of longtrain's tests and examples, and
not meant for anything else.

Weights are int8 rows with one fp32 scale each in `weights.int8.safetensors`; the expanded bf16 weights are
the reference, and `load_target("tiny")` expands them. Chat:
`<|user|>question<|assistant|>answer<|end|>`.

## Training

{training}

| data | licence |
|---|---|
| novels (texts of github.com/computationalstylistics/100_english_novels) | public domain in the US |
| Python: NVIDIA Model-Optimizer, NeMo Automodel, LLaMA-Factory | Apache-2.0 |
| GSM8K (train) | MIT |
| GPTeacher code and roleplay instructions, written by GPT-4 | MIT |
| LLaMA-Factory's Alpaca sample | Apache-2.0 |
| needles, variable chains, tables, quoting and copying, written into that text | ours |

{held_out}
## Measured

{measured}
"""


def card(
    config: Config, facts: Mapping[str, Any], *, scores: Mapping[str, Any] | None, name: str = "tiny"
) -> str:
    """The card as markdown.

    Args:
        config: the model's shape.
        facts: facts of the run; `argv` or `command`, `step`, `tokens`, `seconds`, `hardware` and `held_out`
            are shown if there.
        scores: `needle` (`protocol` and a list of `cells`), `prose` and `code` (bits per byte); None: not
            measured yet.
        name: the name of the target.
    """
    kv, q = config.n_kv_heads * config.head_dim, config.n_heads * config.head_dim
    layer = 2 * config.hidden_size * (q + kv) + 3 * config.hidden_size * config.intermediate_size
    parameters = config.vocab_size * config.hidden_size + config.n_layers * layer
    held_out = facts.get("held_out")
    return TEMPLATE.format(
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
        training=_training(facts),
        held_out=f"Never read in training: {', '.join(held_out)}.\n" if held_out else "",
        measured=_measured(scores)
        if scores
        else "Not measured yet: `longtrain eval suite=needle target.path=FOLDER`.",
    )


def _training(facts: Mapping[str, Any]) -> str:
    command = facts.get("command") or (typed_command(facts["argv"]) if facts.get("argv") else "")
    lines = [f"```\n{command}\n```"] if command else []
    shown = {"step": "optimizer steps", "tokens": "tokens", "seconds": "seconds", "hardware": "hardware"}
    figures = [f"{label}: {facts[key]}" for key, label in shown.items() if facts.get(key) is not None]
    return "\n".join([*lines, "; ".join(figures)]).strip() or "No record of the run."


def _measured(scores: Mapping[str, Any]) -> str:
    cells = scores["needle"]["cells"]
    prompts = scores["needle"]["protocol"]["prompts"]
    rows = [
        f"| {cell['length']} | {cell['needles']} | {_share(cell, 'value')} | {_share(cell, 'low')} | "
        f"{cell['ran']} | {sum(cell['dropped'].values())} |"
        for cell in cells
    ]
    lines = [
        f"Free-running greedy generation on the expanded int8 weights, {prompts} prompts a cell: seven-digit "
        "values of different keys hidden in held-out novels, one asked for; right if the numbers in the "
        "answer are that value.",
        "",
        "| prompt tokens | needles | exact match | lower Wilson bound (95%) | prompts | dropped |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]
    for key, label in (("prose", "held-out novels"), ("code", "held-out Python")):
        if key in scores:
            value = scores[key]
            lines.append(
                f"- bits per byte on {label}: {value['bits_per_byte']:.3f} "
                f"({value['bytes']} bytes, window {value['window']})"
            )
    return "\n".join(lines)


def _share(cell: Mapping[str, Any], key: str) -> str:
    value = cell["exact"][key]
    return "–" if value is None else f"{value:.3f}"

"""Estimates the memory traffic of an EAGLE-3 decoding cycle: the draft at each level, then the target."""

from __future__ import annotations

from dataclasses import replace

from longtrain.costs.cycle import Forward
from longtrain.costs.method import CycleCost
from longtrain.costs.model import Sizes
from longtrain.costs.roofline import Width
from longtrain.methods.eagle3.config import Config, draft_vocab, layers_of


def draft_weights(config: Config, size: Sizes) -> tuple[int, int]:
    """Return the number of weights read at every level (layer and LM head), and per accepted token (`fc`)."""
    E, heads = size.hidden_size, config.n_heads or size.n_heads
    dim, groups = config.head_dim or size.head_dim, config.n_kv_heads or size.n_kv_heads
    attention = 2 * E * (heads + 2 * groups) * dim + heads * dim * E
    mlp = 3 * E * (config.intermediate_size or size.intermediate_size)
    head = E * draft_vocab(config, size.vocab_size)
    return attention + mlp + head, len(layers_of(config, size.n_layers)) * E * E


def cycle(config: Config, size: Sizes, widths: tuple[int, ...], itemsize: int) -> CycleCost:
    """Estimate a cycle: per level one layer over all positions or a window; then the target over all nodes.

    Note: attention is counted with the target's number of heads, even if the draft has another.
    """
    width = Width(8 * itemsize, 8 * itemsize)
    level, fc = draft_weights(config, size)
    counted = size.layer + size.head  # weights that one layer of the target reads
    seen = config.window + config.sinks if config.window else None
    one = Forward(width, layers=1, more_weights=level - counted, seen=seen)
    draft = [replace(one, rows=rows) for rows in (1, *widths[:-1])]
    draft[0] = replace(draft[0], more_weights=draft[0].more_weights + fc)
    row = 2 * itemsize * (config.n_kv_heads or size.n_kv_heads) * (config.head_dim or size.head_dim)

    def cache_bytes(batch: int, tokens: int) -> float:
        held = tokens if seen is None else min(seen, tokens)
        whole = size.kv_bytes(tokens) * itemsize / 2
        return float(batch * (whole + held * row))

    return CycleCost(
        title="EAGLE-3",
        alone=Forward(width),
        draft=tuple(draft),
        verify=Forward(width, rows=1 + sum(widths)),
        weight_bytes=float(itemsize * (level + fc)),
        cache_bytes=cache_bytes,
    )

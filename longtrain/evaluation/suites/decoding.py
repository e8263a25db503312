"""How a run decodes, beside how a benchmark does."""

from __future__ import annotations

from longtrain.decoding.sampling import Sampling


def not_greedy(sampling: Sampling) -> list[str]:
    """The note of a run that samples; nothing for greedy decoding, whatever top_p and top_k say then."""
    return [] if sampling.greedy else [f"sampled ({described(sampling)}), not greedy"]


def described(sampling: Sampling) -> str:
    """`temperature 0.6, top_p 0.95, top_k 20`: what is not off."""
    parts = [f"temperature {sampling.temperature:g}", *narrowed(sampling)]
    return ", ".join(parts)


def narrowed(sampling: Sampling) -> list[str]:
    """`top_p 0.95` and `top_k 20`, those that are not off."""
    parts = []
    if sampling.top_p < 1:
        parts.append(f"top_p {sampling.top_p:g}")
    if sampling.top_k:
        parts.append(f"top_k {sampling.top_k}")
    return parts

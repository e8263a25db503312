"""What a training run leaves on the disk: checkpoints, prepared data and stored features."""

from __future__ import annotations

from longtrain.costs.model import Sizes
from longtrain.costs.training import StepCost

GENERATIONS = 3
"""Checkpoints on the disk at most: the last, the one before, and the one that is being written."""


def checkpoint_bytes(trained: int) -> int:
    """One checkpoint: the trained weights in fp32 and Adam's two moments."""
    return 12 * trained


def data_bytes(tokens: int, vocab_size: int) -> int:
    """Prepared data: an id of 2 or 4 bytes and a mark for labels, a token."""
    return tokens * ((2 if vocab_size <= 1 << 16 else 4) + 1)


def feature_bytes(step: StepCost, size: Sizes, *, form: str, top_k: int) -> int:
    """Stored features of a token.

    Args:
        step: says what is read of a token.
        size: the target.
        form: bf16, or int8 with a scale in bf16 for each head and for the hidden state.
        top_k: likeliest tokens that stand for the hidden state (an id in as many bytes as the vocabulary
            needs, and a log-probability in fp16); 0: the hidden state itself.
    """
    each, scale = (2, 0) if form == "bf16" else (1, 2)
    found = step.kv * each + step.kv // size.head_dim * scale
    if step.hidden and top_k:
        return found + top_k * (max(1, (size.vocab_size - 1).bit_length() + 7 >> 3) + 2)
    return found + (step.hidden * each + scale if step.hidden else 0)

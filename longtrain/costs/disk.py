"""Disk space of a training run: checkpoints, prepared data and stored features."""

from __future__ import annotations

from longtrain.costs.model import Sizes
from longtrain.costs.training import StepCost

GENERATIONS = 3
"""Largest number of checkpoints on the disk: the last two, and the one being written."""


def checkpoint_bytes(trained: int, moments: int) -> int:
    """Return the bytes of a checkpoint: the trained weights and the optimizer's moments, in fp32."""
    return 4 * (trained + moments)


def data_bytes(tokens: int, vocab_size: int) -> int:
    """Return the bytes of prepared data: per token an id of 2 or 4 bytes and a byte of the label mask."""
    return tokens * ((2 if vocab_size <= 1 << 16 else 4) + 1)


def feature_bytes(step: StepCost, size: Sizes, *, form: str, top_k: int) -> int:
    """Return the bytes of a token's stored features.

    Args:
        step: the training step's cost, with the sizes read per token.
        size: the target.
        form: bf16, or int8 with a scale in bf16 for each head and for the hidden state.
        top_k: number of most likely tokens stored instead of the hidden state (each an id in as few bytes as
            the vocabulary allows, and a log-probability in fp16); 0: the hidden state itself.
    """
    each, scale = (2, 0) if form == "bf16" else (1, 2)
    found = step.kv * each + step.kv // size.head_dim * scale
    if step.hidden and top_k:
        return found + top_k * (max(1, (size.vocab_size - 1).bit_length() + 7 >> 3) + 2)
    return found + (step.hidden * each + scale if step.hidden else 0)

"""What losses on a language-model head share: results, labels, operands and the size of a block of rows.

Shapes: T rows (tokens), E hidden dim, V vocabulary, K tokens of a law.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longtrain.errors import ConfigError

IGNORE = -100
"""Label of a row that is not supervised."""

_BLOCK_BYTES = {"cuda": 2**29, "cpu": 2**25}


class HeadLoss(NamedTuple):
    """A loss summed over rows, and where student and teacher agree.

    Args:
        total: scalar with a gradient, nats, fp32 (fp64 stays fp64).
        hit_T: bool, no gradient; the student's argmax is the teacher's. False on rows that do not count.
    """

    total: Tensor
    hit_T: Tensor


class TopLaw(NamedTuple):
    """A teacher's law of each row's next token, kept as its likeliest tokens; the rest is one lump.

    Args:
        ids_TK: tokens, likeliest first, int64.
        logp_TK: their log probabilities, nats, fp32.
    """

    ids_TK: Tensor
    logp_TK: Tensor


def scaled(grad: Tensor | None, by: Tensor) -> Tensor | None:
    """A stored gradient times the incoming one."""
    return None if grad is None else grad * by.to(grad.dtype)


def plain(like: Tensor) -> torch.autocast:
    """Autocast off: operands are already in the type they are meant to be multiplied in."""
    return torch.autocast(like.device.type, enabled=False)


def operands(hidden_TE: Tensor, head_VE: Tensor) -> tuple[Tensor, Tensor]:
    """Both operands of the head's product in one type: autocast's where it is on, else the head's."""
    kind = hidden_TE.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head_VE.dtype
    return hidden_TE.to(dtype), head_VE.to(dtype)


def block_rows_of(head_VE: Tensor) -> int:
    """Rows whose two fp32 logits (student and teacher) fit the device's budget."""
    budget = _BLOCK_BYTES.get(head_VE.device.type, _BLOCK_BYTES["cpu"])
    return max(16, budget // (8 * head_VE.shape[0]))


def check_rows(hidden_TE: Tensor, head_VE: Tensor, rows_T: Tensor) -> None:
    """Refuse hidden states, a head and rows that do not fit.

    Raises: ConfigError.
    """
    if hidden_TE.shape[-1] != head_VE.shape[-1] or hidden_TE.shape[:1] != rows_T.shape:
        raise ConfigError(
            f"head loss: hidden {tuple(hidden_TE.shape)}, head {tuple(head_VE.shape)} and rows "
            f"{tuple(rows_T.shape)} do not fit; need [T, E], [V, E] and [T]"
        )

"""Results, labels, operands and block size shared by all losses on a language-model head.

Shapes: T tokens, E hidden dim, V vocabulary, K most likely tokens of a distribution.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longtrain.kernels.devices import kernels_serve

IGNORE = -100
"""Label of a token that is not trained on."""

_BLOCK_BYTES = {"cuda": 2**29, "cpu": 2**25}
_KERNEL_BYTES = 2**30
"""Bytes of the logits of a block where kernels read them in their own dtype."""


class HeadLoss(NamedTuple):
    """A loss summed over tokens, and the tokens at which student and teacher agree.

    Args:
        total: scalar with a gradient, nats, fp32 (fp64 stays fp64).
        hit_T: bool, no gradient; True if the student's argmax is the teacher's. False for tokens of weight 0.
    """

    total: Tensor
    hit_T: Tensor


class TopTokens(NamedTuple):
    """A teacher's next-token distribution, truncated to its most likely tokens; the rest counts as one token.

    Args:
        ids_TK: token ids, most likely first, int64.
        logp_TK: their log probabilities, nats, fp32.
    """

    ids_TK: Tensor
    logp_TK: Tensor


def scaled(grad: Tensor | None, by: Tensor) -> Tensor | None:
    """A stored gradient times the incoming one; None if there is none."""
    return None if grad is None else grad * by.to(grad.dtype)


def plain(like: Tensor) -> torch.autocast:
    """Context without autocast: operands already have the dtype in which they are to be multiplied."""
    return torch.autocast(like.device.type, enabled=False)


def operands(hidden_TE: Tensor, head_VE: Tensor) -> tuple[Tensor, Tensor]:
    """Both operands of the head's product in one dtype: autocast's if it is on, else the head's."""
    kind = hidden_TE.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head_VE.dtype
    return hidden_TE.to(dtype), head_VE.to(dtype)


def block_rows_of(head_VE: Tensor) -> int:
    """Number of tokens whose two fp32 logits (student and teacher) fit the device's budget."""
    budget = _BLOCK_BYTES.get(head_VE.device.type, _BLOCK_BYTES["cpu"])
    return max(16, budget // (8 * head_VE.shape[0]))


def kernel_rows_of(head_VE: Tensor, numbers: int, rows: int) -> int:
    """Number of rows of a block of a draft's loss: as many as fit the budget, in blocks of about equal size.

    Args:
        head_VE: the teacher's head.
        numbers: logits of a row, the teacher's and the draft's, where kernels run.
        rows: number of all rows.
    """
    if not kernels_serve(head_VE):
        return block_rows_of(head_VE)
    most = max(16, _KERNEL_BYTES // (numbers * head_VE.element_size()))
    blocks = max(1, -(-rows // most))
    return max(1, -(-rows // blocks))

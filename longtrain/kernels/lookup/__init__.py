"""Where the end of a text stood before, and what followed it there: drafts without a model.

A text is a ring of C slots, a power of two: position p lies in slot p mod C, at place W - 1 + p mod C of the
buffer, so that the W tokens up to each slot are a view; -1 where there is no token.
Triton where `kernels.devices` says so; plain torch, written here, everywhere else. The results are the same
numbers either way.
Shapes: B batch, W tokens that are compared, X = W - 1 + C, T new tokens, N = 1 + drafted tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longtrain.kernels.devices import runs_on

NONE = -1
"""What a slot without a token holds."""


def extend(ring_BX: Tensor, ngram: int, root_B: Tensor, last_B: Tensor, count: int) -> Tensor:
    """Append a token to each text, and copy what followed the text's end where it stood before.

    The most of its last W tokens count, and the latest of such places. A copy that reaches the end goes on
    with what was copied; where not even the last token occurred before, that token is repeated. A match does
    not reach over the ring's seam; where its newest token meets its oldest, one may be taken for longer.

    Args:
        ring_BX: the texts, int32; the token is written.
        ngram: W.
        root_B: the token, int64.
        last_B: its position, int64.
        count: tokens that are copied.

    Returns: tokens_BN, the token and the copy, int64.
    """
    if runs_on(ring_BX.device):
        from longtrain.kernels.lookup import kernel

        return kernel.extend(ring_BX, ngram, root_B, last_B, count)
    slots, last_B1 = ring_BX.shape[1] - ngram + 1, last_B[:, None]
    put(ring_BX, ngram, root_B[:, None], last_B, torch.ones_like(last_B))
    slot_B1, slot_C = last_B1 % slots, torch.arange(slots, device=last_B.device)
    end_BW = ring_BX.gather(1, slot_B1 + torch.arange(ngram, device=last_B.device))
    end_BW = end_BW.where(end_BW != NONE, NONE - 1)  # what is not there is nowhere else either
    equal_BCW = ring_BX.unfold(1, ngram, 1) == end_BW[:, None]
    matched_BC = equal_BCW.flip(-1).cumprod(-1).sum(-1).scatter(1, slot_B1, 0)  # not the end itself
    best_B = (matched_BC * slots - (slot_B1 - slot_C) % slots).amax(1).clamp(min=0)
    back_B1 = (-best_B % slots).clamp(min=1)[:, None]
    pos_BT = last_B1 - back_B1 + 1 + torch.arange(count, device=last_B.device) % back_B1
    copy_BT = ring_BX.gather(1, pos_BT % slots + (ngram - 1)).long()
    return torch.cat((root_B[:, None], copy_BT), 1)


def put(ring_BX: Tensor, ngram: int, tokens_BT: Tensor, first_B: Tensor, n_B: Tensor) -> None:
    """Write the first `n_B` of some tokens from position `first_B` on, and that there is none behind them.

    Args:
        ring_BX: the texts, int32; written.
        ngram: W.
        tokens_BT: tokens, int64, of any strides; no more than slots.
        first_B: position of the first, int64.
        n_B: how many there are, int64.
    """
    if runs_on(ring_BX.device):
        from longtrain.kernels.lookup import kernel

        kernel.put(ring_BX, ngram, tokens_BT, first_B, n_B)
        return
    step_T = torch.arange(tokens_BT.shape[1], device=first_B.device)
    at_BT = (first_B[:, None] + step_T) % (ring_BX.shape[1] - ngram + 1) + (ngram - 1)
    ring_BX.scatter_(1, at_BT, tokens_BT.where(step_T < n_B[:, None], NONE).to(ring_BX.dtype))

"""Triton kernel of `kernels.suffix_match`, and its launch. Shapes: as there."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtrain.kernels.devices import launched_on

_PLACES = 1024
"""Places of a program."""


@triton.jit
def _scores_kernel(token_ptr, last_ptr, out_ptr, slots, MOST: tl.constexpr, PLACES: tl.constexpr):
    """The best score of some places of one text: `slots` times the tokens that agree, minus the way back."""
    b, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    text = token_ptr + b * slots
    last = (tl.load(last_ptr + b) & (slots - 1)).to(tl.int32)
    place = chunk * PLACES + tl.arange(0, PLACES)
    back = (last - place) & (slots - 1)
    agrees = (place < slots) & (back != 0)
    length = tl.zeros((PLACES,), tl.int32)
    compared = 0
    going = 1
    while going > 0:
        end = tl.load(text + ((last - compared) & (slots - 1)))
        token = tl.load(text + ((place - compared) & (slots - 1)), mask=agrees, other=-1)
        agrees = agrees & (token == end) & (token >= 0) & (compared + back < slots)
        length += agrees.to(tl.int32)
        compared += 1
        going = tl.max(agrees.to(tl.int32), 0)
        if compared >= MOST:
            going = 0
    score = tl.where((place < slots) & (back != 0), length * slots - back, -slots)
    tl.store(out_ptr + b * tl.num_programs(1) + chunk, tl.max(score, 0))


def best_scores(tokens_BC: Tensor, last_B: Tensor, most: int) -> Tensor:
    """The best score of each block of places, int32 [B, blocks]."""
    B, slots = tokens_BC.shape
    places = min(_PLACES, slots)
    blocks = triton.cdiv(slots, places)
    out = torch.empty((B, blocks), dtype=torch.int32, device=tokens_BC.device)
    with launched_on(tokens_BC):
        _scores_kernel[(B, blocks)](
            tokens_BC, last_B.contiguous(), out, slots, MOST=most, PLACES=places, num_warps=4
        )
    return out

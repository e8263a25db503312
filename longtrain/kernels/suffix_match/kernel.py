"""Triton kernels of `kernels.suffix_match`, and their launches. Shapes: as there."""

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


@triton.jit(do_not_specialize=["blocks", "K"])
def _copy_kernel(
    token_ptr, last_ptr, score_ptr, length_ptr, back_ptr, copy_ptr, slots, blocks, K,
    BLOCKS: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Length and distance of the best score of one text, and the tokens that follow."""
    b = tl.program_id(0).to(tl.int64)
    block, step = tl.arange(0, BLOCKS), tl.arange(0, COPIES)
    score = tl.load(score_ptr + b * blocks + block, mask=block < blocks, other=-slots)
    best = tl.max(score, 0)
    length, back = (best + slots) // slots, -best & (slots - 1)
    last = (tl.load(last_ptr + b) & (slots - 1)).to(tl.int32)
    place = (last - back + 1 + step % back) & (slots - 1)
    token = tl.load(token_ptr + b * slots + place, mask=step < K, other=0)
    tl.store(copy_ptr + b * K + step, token.to(tl.int64), mask=step < K)
    tl.store(length_ptr + b, length.to(tl.int64))
    tl.store(back_ptr + b, back.to(tl.int64))


@triton.jit(do_not_specialize=["new_b", "new_t", "T"])
def _write_kernel(
    token_ptr, new_ptr, first_ptr, n_ptr, slots, new_b, new_t, T,
    WIDTH: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Write the new tokens of one text."""
    b = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, WIDTH)
    token = tl.load(new_ptr + b * new_b + step * new_t, mask=step < T, other=-1)
    if CUT:
        token = tl.where(step < tl.load(n_ptr + b), token, -1)
    place = (tl.load(first_ptr + b) + step) & (slots - 1)
    tl.store(token_ptr + b * slots + place, token.to(tl.int32), mask=step < T)


def longest_match(tokens_BC: Tensor, last_B: Tensor, most: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.suffix_match.longest_match`."""
    B, slots = tokens_BC.shape
    places = min(_PLACES, slots)
    blocks = triton.cdiv(slots, places)
    last_B = last_B.contiguous()
    score_BY = torch.empty((B, blocks), dtype=torch.int32, device=tokens_BC.device)
    copy_BK = torch.empty((B, count), dtype=torch.int64, device=tokens_BC.device)
    length_B, back_B = copy_BK.new_empty((2, B)).unbind(0)
    with launched_on(tokens_BC):
        _scores_kernel[(B, blocks)](tokens_BC, last_B, score_BY, slots, MOST=most, PLACES=places, num_warps=4)
        _copy_kernel[(B,)](
            tokens_BC, last_B, score_BY, length_B, back_B, copy_BK, slots, blocks, count,
            BLOCKS=triton.next_power_of_2(blocks), COPIES=triton.next_power_of_2(count), num_warps=1,
        )  # fmt: skip
    return length_B, back_B, copy_BK


def write(tokens_BC: Tensor, new_BT: Tensor, first_B: Tensor, n_B: Tensor | None) -> None:
    """See `kernels.suffix_match.write`."""
    B, T = new_BT.shape
    first_B = first_B.contiguous()
    with launched_on(tokens_BC):
        _write_kernel[(B,)](
            tokens_BC, new_BT, first_B, first_B if n_B is None else n_B.contiguous(), tokens_BC.shape[1],
            *new_BT.stride(), T, WIDTH=triton.next_power_of_2(T), CUT=n_B is not None, num_warps=1,
        )  # fmt: skip

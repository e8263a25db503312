"""The lookahead rows of several prompts as one batch, and who sees what.

Shapes: P prompts, M lookahead tokens, N = P * M rows, E hidden dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.kernels.importance import Span

if TYPE_CHECKING:
    from longtrain.methods.lookaheadkv.modules import LookaheadKV


def lookahead_rows(
    module: LookaheadKV, keys: Sequence[tuple[int, int]], seqs: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[Span]]:
    """Inputs, positions and spans for `SuffixRun`.

    Args:
        module: the lookahead tokens.
        keys: start and stop of each prompt in its sequence.
        seqs: the sequence of each.
        dtype: the type to compute in.

    Returns:
        embeds_NE; pos_N on the host, going on where each prompt ends; spans.
    """
    M, hidden = module.lookahead_embeddings.shape
    embeds_NE = module.lookahead_embeddings.to(dtype)[None].expand(len(keys), M, hidden).reshape(-1, hidden)
    pos_N = torch.cat([torch.arange(stop - start, stop - start + M) for start, stop in keys])
    rows = [(first, first + M) for first in range(0, len(keys) * M, M)]
    spans = [Span(row, seq, key) for row, seq, key in zip(rows, seqs, keys, strict=True)]
    return embeds_NE, pos_N, spans

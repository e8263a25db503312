"""A chain drafted by a language model, one token after the other.

Shapes: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longtrain.decoding.roles import Law, TokenTree, TreeShape
from longtrain.decoding.sampling import Coins, Sampling, probs
from longtrain.decoding.tree import chain
from longtrain.errors import ConfigError
from longtrain.kernels.greedy import argmax_rows


def check_chain(shape: TreeShape, who: str) -> None:
    """Refuse a shape that is no chain.

    Raises:
        ConfigError: it is none.
    """
    if any(width != 1 for width in shape.widths):
        raise ConfigError(
            f"{who} drafts chains, and shape {list(shape.widths)} is none; pass widths of 1, e.g. "
            "[1, 1, 1, 1]"
        )


def rollout(
    step: Callable[[Tensor, Tensor], Tensor],
    root_B: Tensor,
    pos_B: Tensor,
    shape: TreeShape,
    sampling: Sampling,
    coins: Coins,
) -> TokenTree:
    """Below the root the argmax of each step's logits, or a token drawn from their law.

    Args:
        step: (position_B, token_B) -> logits_BV of the next token; it keeps what it needs of the token.
        root_B: last token of each text.
        pos_B: its position.
        shape: a chain (`check_chain`), and how children are chosen.
        sampling: processors of the law.
        coins: source of randomness, keyed by the position of the token that is drawn.
    """
    tokens, laws = [root_B], []
    for at_B in pos_B + torch.arange(shape.depth, device=pos_B.device)[:, None]:
        logits_BV = step(at_B, tokens[-1])
        if shape.law is Law.POINT:
            tokens.append(argmax_rows(logits_BV))
            continue
        laws.append(probs(logits_BV, sampling))
        tokens.append(coins.draw(laws[-1], at_B + 1, "draft"))
    q_BNV = torch.stack([*laws, torch.zeros_like(laws[0])], 1) if laws else None
    return chain(torch.stack(tokens, 1), law=shape.law, q_BNV=q_BNV)

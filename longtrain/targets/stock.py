"""Decodes with Hugging Face's own loop over a target's weights, the baseline that speed is compared with.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING

import torch
from torch import nn

from longtrain.targets.attention import NAME

if TYPE_CHECKING:
    from longtrain.targets.model import Target


@dataclass(frozen=True)
class Stock:
    """Result of the baseline loop.

    Args:
        tokens: new tokens of each prompt.
        prefill_s: wall time up to the first of them.
        decode_s: wall time of the others.
    """

    tokens: list[list[int]]
    prefill_s: float
    decode_s: float


def cache_keyword(model: nn.Module) -> str:
    """Return the name that this version of transformers gives a cache, in arguments and outputs of a forward.

    Older versions use `past_key_values`, newer ones `cache`, and warn of the older name.
    """
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


@torch.no_grad()
def decode_stock(target: Target, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> Stock:
    """Decode greedily with the model's own forward, SDPA attention and growing cache, as `generate` does.

    The host reads each token before it launches the next step, since it must know whether the text has ended.

    Args:
        target: its model is used while this runs; the weights are the same whether it is fused or not.
        prompts: token ids of equal length.
        max_new_tokens: new tokens of each; no token id ends a text.
    """
    model = target.model
    key = cache_keyword(model)
    # transformers computes sinks in eager attention only
    model.set_attn_implementation("eager" if target.family.sinks else "sdpa")
    try:
        started_s = time.perf_counter()
        ids_BT = torch.tensor([list(prompt) for prompt in prompts], device=target.device)
        out = model(ids_BT, use_cache=True, logits_to_keep=1)
        columns = [out.logits[:, -1].argmax(-1)]
        texts = [columns[-1].tolist()]
        prefilled_s = time.perf_counter()
        for _ in range(max_new_tokens - 1):
            out = model(columns[-1][:, None], **{key: getattr(out, key)}, use_cache=True)
            columns.append(out.logits[:, -1].argmax(-1))
            texts.append(columns[-1].tolist())
        done_s = time.perf_counter()
    finally:
        model.set_attn_implementation(NAME)
    return Stock(
        [list(row) for row in zip(*texts, strict=True)], prefilled_s - started_s, done_s - prefilled_s
    )

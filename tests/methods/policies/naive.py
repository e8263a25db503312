"""Attention written out in full: plain Hugging Face eager models in fp64, sorting and pooling in Python.

Nothing here comes from longtrain but the target's weights, so policies can be held against it.

Shapes: L layers, H query heads, G KV heads, T rows and keys, S prompt tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from longtrain.targets.loading import random_target
from longtrain.targets.model import Target
from longtrain.targets.shapes import SHAPES


def micro(shape: str = "llama_micro", *, seed: int = 0, **changes: Any) -> Target:
    """A random target in fp64 whose attention is far from uniform."""
    target = random_target({**SHAPES[shape], **changes}, seed=seed, dtype=torch.float64)
    with torch.no_grad():
        for layer in target.model.model.layers:
            layer.self_attn.q_proj.weight.mul_(3.0)
    return target


@contextmanager
def _softmax_keeps_fp64() -> Iterator[None]:
    """Eager attention rounds its softmax to fp32; here it must not."""
    real = torch.nn.functional.softmax
    torch.nn.functional.softmax = lambda x, dim, dtype=None: real(x, dim=dim)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.functional.softmax = real


class Eager:
    """The same weights in a model that keeps whole attention matrices."""

    def __init__(self, target: Target) -> None:
        config = type(target.model.config)(**target.model.config.to_dict())
        self.model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float64
        )
        self.model.load_state_dict(target.model.state_dict())
        self.eos = set(target.info.eos_ids)

    @torch.no_grad()
    def attention(self, ids: Sequence[int]) -> Tensor:
        """Causal attention of one sequence: A_LHTT, softmax over everything a row sees."""
        with _softmax_keeps_fp64():
            out = self.model(torch.tensor([list(ids)]), output_attentions=True, use_cache=False)
        return torch.stack([layer[0] for layer in out.attentions])

    @torch.no_grad()
    def answer(self, prompt: Sequence[int], n_tokens: int) -> list[int]:
        """The greedy continuation, one whole forward a token; an end id comes last."""
        tokens: list[int] = []
        while len(tokens) < n_tokens:
            with _softmax_keeps_fp64():
                logits = self.model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
            if tokens[-1] in self.eos:
                break
        return tokens


def group_mean(s_LHS: Tensor, n_kv_heads: int) -> Tensor:
    """Mean of the query heads of each KV head: s_LGS."""
    return torch.stack([part.mean(1) for part in s_LHS.chunk(n_kv_heads, 1)], 1)


def pooled(row: Sequence[float], kernel: int) -> list[float]:
    """Maximum of a window that is cut off at both ends."""
    half = kernel // 2
    return [max(row[max(0, i - half) : i + half + 1]) for i in range(len(row))]


def best(row: Sequence[float], count: int) -> list[int]:
    """Places of the `count` largest, ascending; of equals the first."""
    return sorted(sorted(range(len(row)), key=lambda i: (-row[i], i))[:count])


def top_with_window(
    s_LGS: Tensor, length: int, counts: Callable[[int], int], window: int, kernel: int
) -> list[list[list[int]]]:
    """Kept rows of each layer and KV head: the best of [0, length - window), then the window."""
    kept = []
    for layer, s_GS in enumerate(s_LGS.tolist()):
        tail = list(range(length - window, length))
        count = counts(layer)
        kept.append([best(pooled(s[: length - window], kernel), count) + tail for s in s_GS])
    return kept


class Evicted(Eager):
    """The same weights, where rows after the prompt see only the prompt rows that were kept, head by head."""

    def __init__(self, target: Target, kept: Sequence[Sequence[Sequence[int]]], n_prompt: int) -> None:
        super().__init__(target)
        self.kept, self.n_prompt = kept, n_prompt
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}
        AttentionInterface.register("naive_evicted", self._attend)
        self.model.set_attn_implementation("naive_evicted")

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
    ) -> tuple[Tensor, None]:
        layer, T, groups = module.layer_idx, query.shape[2], query.shape[1] // key.shape[1]
        self.seen[layer] = (query[0], key[0])
        visible = torch.ones(query.shape[1], T, T).tril().bool()
        for head in range(query.shape[1]):
            gone = sorted(set(range(self.n_prompt)) - set(self.kept[layer][head // groups]))
            visible[head, self.n_prompt :, gone] = False
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        logits = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
        out = logits.masked_fill(~visible, -torch.inf).softmax(-1) @ value
        return out.transpose(1, 2), None

    def looks(self, ids: Sequence[int]) -> Tensor:
        """Full causal attention A_LHTT of the queries that arose under eviction."""
        with torch.no_grad():
            self.model(torch.tensor([list(ids)]), use_cache=False)
        layers = []
        for query, key in self.seen.values():
            key = key.repeat_interleave(len(query) // len(key), 0)
            logits = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
            later = torch.ones_like(logits[0]).triu(1).bool()
            layers.append(logits.masked_fill(later, -torch.inf).softmax(-1))
        return torch.stack(layers)

"""Tests if a token's result in a decoding step depends on the number of tokens in the step.

If results are bitwise equal, greedy speculation reproduces plain decoding exactly. If not, products of
different shapes round differently, and texts may diverge where two tokens have nearly the same score.

Shapes: B batch (1), T tokens, E hidden dim, H query heads, G KV heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.cycles import random_heads
from longtrain.bench.suites import Bench, Context, HeldOutWanted, Row
from longtrain.cache.base import Causal, KVCache
from longtrain.decoding.captured import CaptureBuffers, can_capture
from longtrain.decoding.prefill import prefill
from longtrain.decoding.roles import Parts
from longtrain.errors import ConfigError
from longtrain.kernels.hierarchical.layout import BLOCK, Split
from longtrain.settings import Counts, Lengths
from longtrain.systems import parse
from longtrain.targets.step import OutputRequest, TokenBatch

if TYPE_CHECKING:
    from longtrain.targets.model import Target

STEP_TOKENS = 24
"""Number of tokens that are read one by one and in larger steps."""
COLUMNS = {
    "cache": "cache",
    "prompt tokens": "context_tokens",
    "rows": "rows",
    "attention equal": "attention_equal",
    "layers equal": "layers_equal",
    "first that differs": "first_layer",
    "hidden difference": "hidden_difference",
    "logit difference": "logit_difference",
    "logit spacing": "logit_spacing",
    "same argmax": "same_argmax",
}


@dataclass(frozen=True)
class RowsSettings:
    """The keys of `suite=rows`.

    Args:
        lengths: prompt lengths, rounded down to one more than whole blocks of the quantised cache.
        row_counts: tokens of the steps that are compared with single-token steps.
        split: how the quantised cache's codes are split into the two 4-bit planes.
        text: held-out text, a file or folder; None: the bundled text.
        kinds: text kinds to use; empty: all.
    """

    lengths: Lengths
    row_counts: Counts = (2,)
    split: Split = Split.FLOOR
    text: str | None = None
    kinds: tuple[str, ...] | None = ()


def run(settings: RowsSettings, context: Context) -> Iterator[Row]:
    """Yield a row for each length, cache (quantised and plain) and number of tokens.

    Raises:
        ConfigError: the target has no tokenizer.
        DataError: there is too little text.
    """
    assert context.load_target is not None and context.held_out is not None
    target = context.load_target(None)
    entry = parse({"cache": {"name": "int8", "split": settings.split.value}})
    (quantised,) = context.systems(target, entry)
    for length in settings.lengths:
        whole = max(length // BLOCK, 1) * BLOCK + 1  # then no block is quantised soon
        wanted = HeldOutWanted(whole, STEP_TOKENS, settings.text, settings.kinds or (), context.seed)
        ids = context.held_out(target, wanted)
        prompt, text = ids[:-STEP_TOKENS], ids[-STEP_TOKENS:]
        for cache, parts in (("quantised", quantised.parts), ("plain", Parts())):
            for row in measure(target, parts, prompt, text, counts=settings.row_counts):
                yield {"section": "rows", "cache": cache, "context_tokens": len(prompt), **row}


@torch.no_grad()
def measure(
    target: Target, parts: Parts, prompt: Sequence[int], text: Sequence[int], *, counts: Sequence[int]
) -> list[dict[str, Any]]:
    """Read the same text after a prompt in steps of several tokens and one by one, and compare.

    Args:
        target: the frozen model.
        parts: their cache stores the prompt; a draft is not used.
        prompt: token ids.
        text: the tokens after it; the cache must not quantise a block within it.
        counts: tokens of a step.

    Returns:
        For each count: `attention_equal`, True if the first layer's attention is equal for equal inputs;
        `layers_equal`, the number of layers with equal output; `first_layer`, the first layer with another
        output (None: all are equal); `hidden_difference`, the largest difference of the final hidden states
        relative to their largest magnitude; `logits_equal` and `logit_difference`; `logit_spacing`, the
        distance of neighbouring numbers of the target's dtype at the largest logits; `same_argmax`, the share
        of tokens with the same argmax.

    Raises:
        ConfigError: the cache would quantise a block within the text.
    """

    def cache() -> KVCache:
        return _cache(target, parts, prompt, len(text))

    alone = _steps(target, cache(), text, 1)
    return [
        {
            "rows": count,
            "attention_equal": _attention_equal(target, cache, count),
            **_compare(_steps(target, cache(), text, count), alone),
            "logit_spacing": _spacing(alone[-1]),
        }
        for count in counts
    ]


def _cache(target: Target, parts: Parts, prompt: Sequence[int], room: int) -> KVCache:
    """Return a cache with the prompt, as used by decoding."""
    stage = CaptureBuffers(target)
    read = prefill(
        target,
        parts.cache or (target.plain_cache if parts.evictor else stage.new_cache),
        [list(prompt)],
        max_new_tokens=room,
        nodes=room,
        evictor=parts.evictor,
    )
    read_cache = stage.take_in(read.cache, room=2 * room) if can_capture(read.cache) else read.cache
    most_B = read_cache.commit_limit()
    if most_B is not None and int(most_B.min()) < room:
        raise ConfigError(
            f"{room} tokens after a prompt of {len(prompt)} on a cache that quantises after "
            f"{int(most_B.min())}; pass fewer, or a prompt a little above a multiple of 128 tokens"
        )
    return read_cache


def _steps(target: Target, cache: KVCache, text: Sequence[int], count: int) -> list[Tensor]:
    """Return every layer's output [T, E] and, last, the logits [T, V], in steps of `count` tokens."""
    layers = (*range(target.info.n_layers), -1)
    found: list[list[Tensor]] = []
    for first in range(0, len(text), count):
        ids = torch.tensor([list(text[first : first + count])], device=target.device)
        pos_BT = cache.len_B[:, None] + torch.arange(ids.shape[1], device=target.device)
        step = target.forward(TokenBatch(pos_BT, ids), cache, outputs=OutputRequest("all", hidden=layers))
        assert step.logits_BTV is not None
        found.append([*(step.hidden[layer][0].clone() for layer in layers), step.logits_BTV[0].clone()])
        cache.commit(None, torch.full_like(cache.len_B, ids.shape[1]))
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def _compare(some: Sequence[Tensor], alone: Sequence[Tensor]) -> dict[str, Any]:
    *layers, final, logits = zip(some, alone, strict=True)
    same = [torch.equal(a, b) for a, b in layers]
    return {
        "layers_equal": sum(same),
        "first_layer": None if all(same) else same.index(False),
        "hidden_difference": _largest(*final) / float(final[1].abs().max()),
        "logits_equal": torch.equal(*logits),
        "logit_difference": _largest(*logits),
        "same_argmax": float((logits[0].argmax(-1) == logits[1].argmax(-1)).double().mean()),
    }


def _attention_equal(target: Target, cache: Callable[[], KVCache], count: int) -> bool:
    """Return True if the first layer's attention over random new tokens is equal together and one by one."""
    info, random = target.info, random_heads(target, 1, count, seed=0)
    q, k, v = random(info.n_heads), random(info.n_kv_heads), random(info.n_kv_heads)

    def attend(held: KVCache, at: slice) -> Tensor:
        held.write(0, k[:, :, at], v[:, :, at])
        return held.attend(0, q[:, :, at], mask=Causal(), scale=info.head_dim**-0.5)[0].clone()

    together, single, one_by_one = attend(cache(), slice(None)), cache(), []
    for row in range(count):
        one_by_one.append(attend(single, slice(row, row + 1)))
        single.commit(None, torch.ones_like(single.len_B))
    return torch.equal(together, torch.cat(one_by_one, 2))


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def _spacing(logits_TV: Tensor) -> float:
    """Return the distance of neighbouring numbers at the median of the largest logits."""
    top = logits_TV.amax(-1).double().abs().median()
    return float(torch.finfo(logits_TV.dtype).eps * 2.0 ** torch.floor(torch.log2(top)))


BENCH = Bench(settings=RowsSettings, run=run, columns=COLUMNS)

"""What a quantised KV cache costs in quality: perplexity and next tokens beside the cache in full precision.

Windows of text are scored as decoding would see them: the context is read in full precision, all but its
last 128 to 255 tokens are quantised, and the tokens after it follow while further blocks are quantised.
Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from longtrain.cache.hierarchical import HierarchicalCache
from longtrain.cache.readings import Axis, RoundedCache, Rounding, UpperHalfCache
from longtrain.decoding.roles import Parts
from longtrain.evaluation.figures.statistics import Bootstrap, Interval, paired_difference, pooled_ratio
from longtrain.evaluation.perplexity import foretold, perplexity, read_contexts
from longtrain.kernels.hierarchical.layout import Split

if TYPE_CHECKING:
    from longtrain.targets.model import Target

Window = tuple[Sequence[int], Sequence[int]]
"""A context, and the tokens after it that are scored."""


@dataclass(frozen=True)
class Reading:
    """One way of reading old keys and values.

    Args:
        name: of the row in a table.
        rounding: what it does to them; None: nothing.
        emulated: rounded copies in full precision stand for the quantised cache (any axis), rather than the
            cache that decodes.
    """

    name: str
    rounding: Rounding | None = None
    emulated: bool = False

    def parts(self, target: Target) -> Parts:
        """Its cache, for an engine."""
        return Parts(cache=self._maker(target), name=self.name)

    def _maker(self, target: Target) -> Callable[..., Any] | None:
        info, rounding = target.info, self.rounding
        if rounding is None:
            return None
        shape: dict[str, Any] = {
            "n_layers": info.n_layers,
            "n_kv_heads": info.n_kv_heads,
            "head_dim": info.head_dim,
        }
        where: dict[str, Any] = {"device": target.device, "dtype": target.dtype}
        if self.emulated:
            return lambda batch, max_tokens, max_nodes: RoundedCache(
                rounding=rounding, **shape, batch=batch, max_tokens=max_tokens, max_nodes=max_nodes, **where
            )
        kind = HierarchicalCache if rounding.bits == 8 else UpperHalfCache
        return lambda batch, max_tokens, max_nodes: kind(
            n_heads=info.n_heads,
            split=rounding.split,
            **shape,
            batch=batch,
            max_tokens=max_tokens,
            max_nodes=max_nodes,
            **where,
        )


FULL = Reading("full precision")


def decoding_caches(splits: Sequence[Split], bits: Sequence[int]) -> list[Reading]:
    """The hierarchical cache as target and draft read it, with each split."""
    return [
        Reading(f"INT{bit} {split.value}", Rounding(bits=bit, split=split))
        for bit in bits
        for split in splits
    ]


def axis_choices(split: Split, bits: Sequence[int]) -> list[Reading]:
    """Keys by channel or token with values by token or channel.

    Source: QuantSpec Table 5.
    """
    return [
        Reading(
            f"INT{bit} keys {keys.value}, values {values.value}", Rounding(keys, values, bit, split), True
        )
        for bit in bits
        for values in (Axis.TOKEN, Axis.CHANNEL)
        for keys in (Axis.TOKEN, Axis.CHANNEL)
    ]


@dataclass
class Scored:
    """Sums over the scored tokens of each window.

    Args:
        tokens: how many there are.
        nats: negative log-likelihood.
        agreed: at how many the most probable token is that of full precision.
        divergence: Kullback-Leibler divergence of full precision's law from this one, in nats.
    """

    tokens: list[int] = field(default_factory=list)
    nats: list[float] = field(default_factory=list)
    agreed: list[int] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)


def score(
    target: Target, readings: Sequence[Reading], windows: Sequence[Window], *, batch: int
) -> dict[str, Scored]:
    """Score windows with the cache in full precision and each reading.

    Args:
        target: the frozen model.
        readings: beside `FULL`, which is always there.
        windows: contexts may differ in length.
        batch: windows read together; their logits in full precision are kept, 4 bytes a vocabulary entry and
            scored token.

    Returns:
        Name of each reading -> its sums, `FULL` first.

    Raises:
        ConfigError: a window longer than the target's context.
    """
    found = {one.name: Scored() for one in (FULL, *readings)}
    for first in range(0, len(windows), batch):
        some = windows[first : first + batch]
        whole: list[dict[int, Tensor]] = [{} for _ in some]
        for row, at, logits_TV in _logits(target, FULL, some):
            whole[row][at] = logits_TV
        exact = [torch.cat([one[at] for at in sorted(one)]) for one in whole]
        del whole
        _add(found[FULL.name], some, _pieces(exact), exact)
        for reading in readings:
            _add(found[reading.name], some, _logits(target, reading, some), exact)
    return found


def figures(found: dict[str, Scored], *, seed: int = 0, resamples: int = 1000) -> list[dict[str, Any]]:
    """Perplexity of each reading, its change, how often the likeliest token agrees, how far the laws differ.

    The change is paired: the windows are drawn together.

    Args:
        found: of `score`.
        seed: of the draws of windows behind 95% intervals.
        resamples: such draws.
    """
    whole = found[FULL.name]
    rows = []
    for name, one in found.items():
        row: dict[str, Any] = {
            "reading": name,
            "windows": len(one.tokens),
            "tokens": sum(one.tokens),
            "perplexity": perplexity(sum(one.nats), sum(one.tokens)),
        }
        if one is not whole:
            draws = Bootstrap(seed, resamples)
            change = paired_difference((one.nats, one.tokens), (whole.nats, whole.tokens), draws)
            row["change_percent"] = _interval(change, lambda nats: 100 * math.expm1(nats))
            row["top1_agreement"] = _interval(pooled_ratio((one.agreed, one.tokens), draws))
            row["divergence_nats"] = _interval(pooled_ratio((one.divergence, one.tokens), draws))
        rows.append(row)
    return rows


def _logits(target: Target, reading: Reading, windows: Sequence[Window]) -> Iterator[tuple[int, int, Tensor]]:
    contexts, scored = zip(*windows, strict=True)
    read = read_contexts(target, reading.parts(target), contexts, scored=scored)
    return foretold(target, read, scored)


def _pieces(exact: Sequence[Tensor]) -> Iterator[tuple[int, int, Tensor]]:
    """Logits of whole windows, as `foretold` gives them."""
    for row, logits_TV in enumerate(exact):
        yield row, 0, logits_TV


def _add(
    found: Scored,
    windows: Sequence[Window],
    pieces: Iterator[tuple[int, int, Tensor]],
    exact: Sequence[Tensor],
) -> None:
    """Add the sums of some windows."""
    nats, agreed, divergence = ([0.0] * len(windows) for _ in range(3))
    for row, at, logits_TV in pieces:
        here = slice(at, at + len(logits_TV))
        wanted_T = torch.tensor(windows[row][1][here], device=logits_TV.device)
        whole_TV = exact[row][here]
        nats[row] += float(cross_entropy(logits_TV, wanted_T, reduction="none").double().sum())
        agreed[row] += float((logits_TV.argmax(-1) == whole_TV.argmax(-1)).sum())
        own_TV, law_TV = log_softmax(logits_TV.double(), -1), log_softmax(whole_TV.double(), -1)
        divergence[row] += float((law_TV.exp() * (law_TV - own_TV)).sum())
    found.tokens += [len(tokens) for _, tokens in windows]
    found.nats += nats
    found.agreed += map(int, agreed)
    found.divergence += divergence


def _interval(one: Interval, of: Callable[[float], float] = float) -> dict[str, float | None]:
    """Value and 95% interval as JSON values."""
    ends = {"value": one.value, "low": one.low, "high": one.high}
    return {key: None if math.isnan(end) else of(end) for key, end in ends.items()}

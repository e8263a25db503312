"""Sizes of a model, and the work of prefill, of decoding and of scoring keys.

Only tensor operations count, no launches, top-k or gathers, so measured times are longer.
Source: LookaheadKV Appendix B (the phases).
Shapes: S prompt tokens, H query heads, G KV heads, D head dim, E hidden dim, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longtrain.costs.hardware import BYTES_SHARE, FLOPS_SHARE, Gpu

ITEM = 2
"""Bytes of a bf16 number."""


TILE = 64
"""Entries of a layer with a window are dropped in multiples of this, so that attention's tiles stay whole."""


def window_slots(window: int, nodes: int = 0) -> int:
    """Return how many entries of a layer with a window fit its cache (`cache.window`).

    Args:
        window: keys that a token sees, its own included.
        nodes: most tokens of a step.
    """
    return window - 1 + max(2 * TILE, window // 4) + nodes


@dataclass(frozen=True)
class Experts:
    """The experts of a model: MLPs of which each token goes through a few.

    Args:
        count: experts of a layer.
        per_token: experts that each token goes through.
        size: inner width of one.
        shared: inner width of the MLP that every token goes through beside them; 0: none.
        dense_layers: layers that have one MLP (of `Sizes.intermediate_size`) instead.
    """

    count: int
    per_token: int
    size: int
    shared: int = 0
    dense_layers: int = 0

    @classmethod
    def of_keys(cls, keys: Mapping[str, Any]) -> Experts | None:
        """Return the experts in a `config.json`; None if all layers are dense."""
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        if not (count := next((int(keys[name]) for name in names if keys.get(name)), 0)):
            return None
        n_layers, every = int(keys["num_hidden_layers"]), int(keys.get("decoder_sparse_step") or 1)
        only, first = keys.get("mlp_only_layers") or (), int(keys.get("first_k_dense_replace") or 0)
        sparse = [i for i in range(first, n_layers) if i not in only and not (i + 1) % every]
        size = int(keys.get("moe_intermediate_size") or keys["intermediate_size"])
        return cls(
            count=count,
            per_token=int(keys["num_experts_per_tok"]),
            size=size,
            shared=size * int(keys.get("n_shared_experts") or 0),
            dense_layers=n_layers - len(sparse),
        )

    def read(self, tokens: int) -> float:
        """Return the distinct experts of a layer that a pass over some tokens reads, as expected if every
        token chose its experts at random.
        """
        return self.count * (1 - (1 - self.per_token / self.count) ** tokens)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model.

    Args:
        n_layers: L.
        n_heads: H.
        n_kv_heads: G.
        head_dim: D.
        hidden_size: E.
        intermediate_size: inner width of the MLP.
        vocab_size: V.
        experts: its experts; None: all MLPs are dense.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    experts: Experts | None = None

    @classmethod
    def of(cls, info: Any) -> Sizes:
        """Return the sizes of a target's `info`, which has the same names."""
        names = (name for name in cls.__dataclass_fields__ if name != "experts")
        experts = Experts(**info.experts) if info.experts else None
        return cls(**{name: int(getattr(info, name)) for name in names}, experts=experts)

    @classmethod
    def of_keys(cls, keys: Mapping[str, Any]) -> Sizes:
        """Return the sizes in a `config.json` (or in an entry of `longtrain.targets.shapes.SHAPES`)."""
        heads = int(keys["num_attention_heads"])
        return cls(
            n_layers=int(keys["num_hidden_layers"]),
            n_heads=heads,
            n_kv_heads=int(keys.get("num_key_value_heads") or heads),
            head_dim=int(keys.get("head_dim") or keys["hidden_size"] // heads),
            hidden_size=int(keys["hidden_size"]),
            intermediate_size=int(keys["intermediate_size"]),
            vocab_size=int(keys["vocab_size"]),
            experts=Experts.of_keys(keys),
        )

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Input and output features of a layer's linears; of those with a dense MLP, if there are experts."""
        E, q, kv, wide = (
            self.hidden_size,
            self.n_heads * self.head_dim,
            self.n_kv_heads * self.head_dim,
            self.intermediate_size,
        )
        return {
            "q": (E, q),
            "k": (E, kv),
            "v": (E, kv),
            "o": (q, E),
            "gate": (E, wide),
            "up": (E, wide),
            "down": (wide, E),
        }

    @property
    def layer(self) -> int:
        """Number of weights of one layer's linears, with a dense MLP."""
        return sum(a * b for a, b in self.linears.values())

    @property
    def weights(self) -> int:
        """Number of weights of all layers' linears, all experts included."""
        return self._with(self.experts.count if self.experts else 0)

    @property
    def used(self) -> int:
        """Number of those weights that one token is multiplied with."""
        return self._with(self.experts.per_token if self.experts else 0)

    def read(self, tokens: int) -> int:
        """Return the number of those weights that a pass over some tokens reads (`Experts.read`)."""
        return self._with(self.experts.read(tokens) if self.experts else 0)

    def _with(self, experts: float) -> int:
        """Return the weights of all layers' linears with so many experts of each layer."""
        whole = self.n_layers * self.layer
        if (has := self.experts) is None:
            return whole
        E, sparse = self.hidden_size, self.n_layers - has.dense_layers
        # the router, the shared MLP and the experts take the place of the dense MLP
        return whole + round(
            sparse * (E * has.count + 3 * E * (has.shared + experts * has.size - self.intermediate_size))
        )

    @property
    def head(self) -> int:
        """Number of weights of the LM head."""
        return self.vocab_size * self.hidden_size

    @property
    def width(self) -> int:
        """Query heads times head dim, summed over all layers."""
        return self.n_layers * self.n_heads * self.head_dim

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of K and V of `tokens` tokens in all layers."""
        return 2 * ITEM * self.n_layers * self.n_kv_heads * self.head_dim * tokens


@dataclass(frozen=True)
class Work:
    """Floating-point operations and bytes moved; `+` adds two."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def ms(self, gpu: Gpu, *, flops_share: float = FLOPS_SHARE, bytes_share: float = BYTES_SHARE) -> float:
        """Return milliseconds by the roofline model: the longer of arithmetic and memory time.

        Args:
            gpu: the device's peaks.
            flops_share: reached share of the peak arithmetic; 1 for a lower bound.
            bytes_share: reached share of the peak bandwidth; 1 for a lower bound.
        """
        arithmetic = self.flops / (flops_share * gpu.flops_per_s)
        return 1e3 * max(arithmetic, self.bytes / (bytes_share * gpu.bytes_per_s))


def prefill(size: Sizes, tokens: int, *, causal: bool = True) -> Work:
    """Work of a forward over the prompt with logits of one token; attention is causal or a full square."""
    square = (2 if causal else 4) * size.width * tokens**2
    flops = 2 * size.used * tokens + square + 2 * size.head
    return Work(flops, ITEM * (size.read(tokens) + size.head) + size.kv_bytes(tokens))


def decode(size: Sizes, tokens: int, context: int) -> Work:
    """Work of decoding `tokens` tokens, one at a time, over a cache of `context` entries."""
    flops = tokens * (2 * size.used + 2 * size.head + 4 * size.width * context)
    return Work(flops, tokens * (ITEM * (size.used + size.head) + size.kv_bytes(context)))


def pass_growth(size: Sizes, batch: int, tokens: int, length: int) -> float:
    """Return what a pass over `tokens` tokens of each sequence reads, over that of one token each.

    More than 1 only if there are experts, of which more tokens need more.

    Args:
        size: the model.
        batch: sequences.
        tokens: new tokens of each.
        length: cached tokens of each.
    """
    if size.experts is None:
        return 1.0
    rest = size.head + batch * size.kv_bytes(length) // ITEM
    return (size.read(batch * tokens) + rest) / (size.read(batch) + rest)


def score(size: Sizes, rows: int, tokens: int, *, fused: bool = False) -> Work:
    """Work of the attention weights of `rows` queries over the prompt; unfused, they are stored in bf16."""
    flops = 2 * size.width * rows * tokens
    moved = ITEM * size.n_layers * size.n_kv_heads * size.head_dim * tokens
    written = 0 if fused else 2 * ITEM * size.n_layers * size.n_heads * rows * tokens
    return Work(flops, moved + written)

"""Time to first token by arithmetic: what prefill and each way of choosing cache rows must multiply and move.

Every phase takes t = max(F / (0.7 peak FLOP/s), M / (0.9 peak bytes/s)), bf16, batch 1, one GPU; phases add.
Tensor operations alone: no launches, no top-k, no gather, so a measurement lies above.

Source: LookaheadKV Appendix B (the phases); the shares of peak are its 70% and 90%.
Shapes: S prompt tokens, M lookahead tokens, C kept rows, H query heads, G KV heads, D head dim, E hidden dim,
V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longtrain.errors import ConfigError

if TYPE_CHECKING:
    from longtrain.targets.info import TargetInfo

FLOPS_SHARE, BYTES_SHARE = 0.7, 0.9
"""Shares of a GPU's peak arithmetic and bandwidth that kernels are taken to reach."""

ITEM = 2
"""Bytes of a bf16 number."""


@dataclass(frozen=True)
class Gpu:
    """Peaks of a device: dense bf16 FLOP/s, bytes/s and bytes of memory."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float


GPUS = {
    "H100": Gpu("H100", 989e12, 3.35e12, 80e9),
    "H200": Gpu("H200", 989e12, 4.8e12, 141e9),
    "A100": Gpu("A100", 312e12, 2.039e12, 80e9),
    "A6000": Gpu("A6000", 154.8e12, 0.768e12, 48e9),
}
"""Data-sheet peaks: of the SXM boards (A100: of 80 GB), and of the RTX A6000."""


def gpu_called(name: str) -> Gpu | None:
    """The entry of `GPUS` for what CUDA calls a device ("NVIDIA H200"); None for others."""
    slower = any(board in name for board in ("NVL", "PCIe", "40GB"))
    return next((gpu for key, gpu in GPUS.items() if key in name and not slower), None)


@dataclass(frozen=True)
class Sizes:
    """A model in numbers.

    Args:
        n_layers: L.
        n_heads: H.
        n_kv_heads: G.
        head_dim: D.
        hidden_size: E.
        intermediate_size: of the MLP.
        vocab_size: V.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int

    @classmethod
    def of(cls, info: TargetInfo) -> Sizes:
        """Of a target."""
        return cls(**{name: int(getattr(info, name)) for name in cls.__dataclass_fields__})

    @classmethod
    def of_keys(cls, keys: Mapping[str, Any]) -> Sizes:
        """From the keys of a `config.json` (an entry of `longtrain.targets.shapes.SHAPES`)."""
        heads = int(keys["num_attention_heads"])
        return cls(
            n_layers=int(keys["num_hidden_layers"]),
            n_heads=heads,
            n_kv_heads=int(keys["num_key_value_heads"]),
            head_dim=int(keys.get("head_dim") or keys["hidden_size"] // heads),
            hidden_size=int(keys["hidden_size"]),
            intermediate_size=int(keys["intermediate_size"]),
            vocab_size=int(keys["vocab_size"]),
        )

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """In and out features of a layer's linears."""
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
    def weights(self) -> int:
        """Weights of all layers' linears."""
        return self.n_layers * sum(a * b for a, b in self.linears.values())

    @property
    def head(self) -> int:
        """Weights of the LM head."""
        return self.vocab_size * self.hidden_size

    @property
    def width(self) -> int:
        """Query heads x head dim, over all layers."""
        return self.n_layers * self.n_heads * self.head_dim

    def kv_bytes(self, tokens: int) -> int:
        """K and V of so many tokens in all layers."""
        return 2 * ITEM * self.n_layers * self.n_kv_heads * self.head_dim * tokens

    def adapter(self, n_lookahead: int, rank: int) -> int:
        """Weights of LookaheadKV's module: soft tokens, and LoRA wherever the scores depend on it."""
        sizes = {name: rank * (a + b) for name, (a, b) in self.linears.items()}
        dead = sizes["o"] + sizes["gate"] + sizes["up"] + sizes["down"]
        return n_lookahead * self.hidden_size + self.n_layers * sum(sizes.values()) - dead


@dataclass(frozen=True)
class Work:
    """Floating-point operations and bytes moved; `+` makes one phase of two."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def ms(self, gpu: Gpu) -> float:
        """Milliseconds of this phase."""
        compute = self.flops / (FLOPS_SHARE * gpu.flops_per_s)
        return 1e3 * max(compute, self.bytes / (BYTES_SHARE * gpu.bytes_per_s))


def prefill(size: Sizes, tokens: int, *, causal: bool = True) -> Work:
    """A forward over the prompt, one row of logits; attention over the causal half or the full square."""
    square = (2 if causal else 4) * size.width * tokens**2
    flops = 2 * size.weights * tokens + square + 2 * size.head
    return Work(flops, ITEM * (size.weights + size.head) + size.kv_bytes(tokens))


def decode(size: Sizes, tokens: int, context: int) -> Work:
    """So many tokens, one at a time, over a cache of `context` rows."""
    flops = tokens * (2 * size.weights + 2 * size.head + 4 * size.width * context)
    return Work(flops, tokens * (ITEM * (size.weights + size.head) + size.kv_bytes(context)))


def score(size: Sizes, rows: int, tokens: int, *, fused: bool = False) -> Work:
    """Attention weights of observing rows on every prompt key; unfused, they are written in bf16 and read."""
    flops = 2 * size.width * rows * tokens
    moved = ITEM * size.n_layers * size.n_kv_heads * size.head_dim * tokens
    written = 0 if fused else 2 * ITEM * size.n_layers * size.n_heads * rows * tokens
    return Work(flops, moved + written)


def lookahead_rows(size: Sizes, tokens: int, *, n_lookahead: int, rank: int) -> Work:
    """The lookahead tokens' own forward, as rows of the prefill's products: nothing more is read."""
    adapter = size.adapter(n_lookahead, rank)
    linear = 2 * n_lookahead * (size.weights + adapter)
    return Work(linear + 4 * size.width * n_lookahead * tokens, 0.0)


def second_pass(size: Sizes, tokens: int, *, n_lookahead: int, rank: int) -> Work:
    """The lookahead tokens' own forward as a pass of its own: weights and cache are read once more."""
    rows = lookahead_rows(size, tokens, n_lookahead=n_lookahead, rank=rank)
    return rows + Work(0.0, ITEM * size.weights + size.kv_bytes(tokens))


@dataclass(frozen=True)
class Setup:
    """The setting of the table.

    Args:
        size: the target.
        draft: SpecKV's draft.
        budget: C.
        window: SnapKV's rows, and LAQ's and SpecKV's tokens ahead.
        n_lookahead: M.
        rank: of the LoRA.
    """

    size: Sizes
    draft: Sizes
    budget: int = 128
    window: int = 32
    n_lookahead: int = 32
    rank: int = 8


def row(setup: Setup, tokens: int, gpu: Gpu, *, causal: bool = True) -> dict[str, Any]:
    """One line of the table: milliseconds and TFLOP of prefill, and what each method adds to its time.

    LookaheadKV comes four ways: its rows inside the prefill's products or as a second pass, and the scores'
    weights written out or fused away.
    """
    size, window = setup.size, setup.window
    base = prefill(size, tokens, causal=causal)
    base_ms = base.ms(gpu)
    how = {"n_lookahead": setup.n_lookahead, "rank": setup.rank}
    inside_ms = (base + lookahead_rows(size, tokens, **how)).ms(gpu) - base_ms
    apart_ms = second_pass(size, tokens, **how).ms(gpu)
    seen = score(size, setup.n_lookahead, tokens)
    fused = score(size, setup.n_lookahead, tokens, fused=True)
    snap = score(size, window, tokens)
    pseudo = decode(size, window, setup.budget)
    laq = [snap, pseudo, snap]
    longer = prefill(size, tokens + window, causal=causal)
    spec = [prefill(setup.draft, tokens, causal=causal), decode(setup.draft, window, tokens), longer]
    spec.append(score(size, 2 * window + 1, tokens))
    tera = 1e-12
    return {
        "gpu": gpu.name,
        "prompt_tokens": tokens,
        "attention": "causal" if causal else "full",
        "forward_tflop": base.flops * tera,
        "forward_ms": base_ms,
        "lookaheadkv_ms": inside_ms + seen.ms(gpu),
        "lookaheadkv_fused_ms": inside_ms + fused.ms(gpu),
        "lookaheadkv_second_pass_ms": apart_ms + seen.ms(gpu),
        "lookaheadkv_second_pass_fused_ms": apart_ms + fused.ms(gpu),
        "snapkv_ms": snap.ms(gpu),
        "speckv_ms": sum(part.ms(gpu) for part in spec) - base_ms,
        "speckv_tflop": sum(part.flops for part in spec) * tera,
        "laq_ms": sum(part.ms(gpu) for part in laq),
        "laq_tflop": (base.flops + sum(part.flops for part in laq)) * tera,
        "laq_decode_gb": pseudo.bytes * 1e-9,
    }


def table(setup: Setup, lengths: Sequence[int], gpus: Sequence[Gpu]) -> list[dict[str, Any]]:
    """Lines for every GPU, kind of attention count and length."""
    return [
        row(setup, tokens, gpu, causal=causal)
        for gpu in gpus
        for causal in (True, False)
        for tokens in lengths
    ]


def gpus_named(names: Sequence[str]) -> list[Gpu]:
    """Entries of `GPUS`.

    Raises:
        ConfigError: a name is not among them.
    """
    for name in names:
        if name not in GPUS:
            raise ConfigError(f"suite.cost.gpus names '{name}'; known: {', '.join(GPUS)}")
    return [GPUS[name] for name in dict.fromkeys(names)]

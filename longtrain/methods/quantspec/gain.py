"""The speed to expect of QuantSpec, over plain decoding on the target's own cache.

A cycle is some forwards of the draft and one of the target over their tokens. A forward takes a fixed time a
layer, and reads weights and cache at the device's bandwidth. On a small target, or over a short text, a step
is mostly this fixed time, which 4-bit weights and a 4-bit cache do not shorten.

The fixed times were fitted on one H200, where all is captured in CUDA graphs: plain steps of an 8B shape, of
Qwen2.5-Coder-1.5B and of a target of 28M parameters, and cycles of QuantSpec over them (recipes/results).
The expectation is within 15% of what was measured at 1.5 billion parameters and more, and up to 30% too low
at 28 million.
"""

from __future__ import annotations

from dataclasses import dataclass

from longtrain.costs.hardware import BYTES_SHARE
from longtrain.costs.model import Sizes
from longtrain.costs.roofline import stored
from longtrain.kernels.hierarchical.layout import BLOCK
from longtrain.kernels.int4_linear import AT_ONCE

LAYER_US, QUANTISED_US = 25.0, 34.0
"""Microseconds of a layer besides its reads: over a plain cache, and over a quantised one, where the newest
tokens are attended to apart."""
DRAFTED, ACCEPTED = 3, 0.9
"""Length of the chain, and the chance that a drafted token is accepted where all before it were. Real texts
had 0.87 to 0.97."""


@dataclass(frozen=True)
class Gain:
    """QuantSpec with one target on one device.

    Args:
        size: the target.
        windows: window of each layer; 0: none. Entries in a window stay in the target's dtype.
        itemsize: bytes of a number of the target.
        weight_bits: bits of the draft's weights.
        kv_bits: bits in which the draft reads quantised entries.
        bytes_per_s: the device's read bandwidth by its data sheet; None: unknown, and times are compared as
            if a step were nothing but its reads.
    """

    size: Sizes
    windows: tuple[int, ...]
    itemsize: int
    weight_bits: int
    kv_bits: int
    bytes_per_s: float | None

    def share(self, batch: int, tokens: int) -> float:
        """Return the bytes that a step of the draft reads over those of a step of the target."""
        own = 8 * self.itemsize
        draft = self._read(batch, tokens, weights=self.weight_bits, kv=self.kv_bits, rows=1)
        return draft / self._read(batch, tokens, weights=own, kv=8, rows=1)

    def speed(self, batch: int, tokens: int) -> float:
        """Return the expected tokens a second over those of plain decoding on the target's own cache.

        Args:
            batch: sequences.
            tokens: cached tokens of each.
        """
        own, rows = 8 * self.itemsize, DRAFTED + 1
        # 4-bit weights are read once for every few sequences
        weights = 4 * -(-batch // AT_ONCE) if self.weight_bits == 4 else own
        plain = self._time(LAYER_US, self._read(batch, tokens, weights=own, kv=own, rows=1))
        draft = self._read(batch, tokens, weights=weights, kv=self.kv_bits, rows=1)
        verify = self._read(batch, tokens, weights=own, kv=8, rows=rows)
        cycle = DRAFTED * self._time(QUANTISED_US, draft) + self._time(QUANTISED_US, verify)
        accepted = sum(ACCEPTED**i for i in range(rows))  # and the target's own token
        return accepted * plain / cycle

    def _time(self, layer_us: float, read: float) -> float:
        """Return the seconds of a forward that reads so many bytes; without a bandwidth the bytes."""
        if self.bytes_per_s is None:
            return read
        return 1e-6 * layer_us * self.size.n_layers + read / (BYTES_SHARE * self.bytes_per_s)

    def _read(self, batch: int, tokens: int, *, weights: int, kv: int, rows: int) -> float:
        """Return the bytes that a forward reads.

        Args:
            batch: sequences.
            tokens: cached tokens of each.
            weights: bits that are read of a weight.
            kv: bits of a number of a quantised entry.
            rows: new tokens of each sequence.
        """
        size = self.size
        numbers = 2 * batch * size.n_kv_heads * size.head_dim  # of one entry: keys and values of all KV heads
        full = sum(not window for window in self.windows)
        quantised = full * quantised_tokens(tokens)
        as_is = full * tokens + sum(min(window, tokens) for window in self.windows if window) - quantised
        read = stored(size.read(batch * rows) + size.head, weights) + stored(numbers * quantised, kv)
        return read + self.itemsize * numbers * as_is


def quantised_tokens(tokens: int) -> int:
    """Return how many of a text's tokens the cache quantises: whole blocks, and never the newest."""
    return max(0, tokens // BLOCK - 1) * BLOCK

"""Settings of QuantSpec; defaults are the paper's unless said otherwise. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from longtrain.errors import ConfigError
from longtrain.settings import OneOf, check


@dataclass
class Config:
    """A hierarchical KV cache and the draft that reads its upper half (QuantSpec, arXiv 2502.10424, §4)."""

    draft: bool = True  # the target drafts for itself; False: the cache alone, for another draft or none
    split: Annotated[str, OneOf("floor", "rtn")] = "floor"  # how 8 bits are split into two halves of 4: floor
    # (one code cut in two) or rtn (the paper's)
    kv_bits: Annotated[int, OneOf(4, 8)] = 4  # bits of the cache that the draft reads: 4, or 8 as the target
    # does (only its weights are smaller then)
    weight_bits: Annotated[int, OneOf(4, 16)] = 4  # bits of the draft's linear layers: 4, or 16 for the
    # target's own (only the cache is smaller then)
    weight_group: Annotated[int, OneOf(128, 64, 32)] = 128  # input features that share a scale and a zero, at
    # most: 128, 64 or 32
    strict_flush: bool = True  # speculative and plain decoding quantise after the same tokens, so that they
    # have the same distribution

    def __post_init__(self) -> None:
        check(self, "method")
        if self.draft and (self.kv_bits, self.weight_bits) == (8, 16):
            raise ConfigError(
                "method.kv_bits=8 method.weight_bits=16 makes the draft the target itself; lower one, or "
                "pass method.draft=false for the cache alone"
            )

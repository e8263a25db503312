"""Data sheets of GPUs, and the shares of their peaks that good kernels are assumed to reach."""

from __future__ import annotations

import re
from dataclasses import dataclass

from longtrain.errors import ConfigError

FLOPS_SHARE, BYTES_SHARE = 0.7, 0.9
"""Reached shares of a GPU's peak arithmetic and peak bandwidth. Source: LookaheadKV, Appendix B."""

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """Peaks of a device: dense bf16 FLOP/s, bytes/s, bytes of memory; one-way bytes/s of NVLink and PCIe."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    host_bytes_per_s: float


GPUS = {
    "H100": Gpu("H100", 989e12, 3.35e12, 80e9, 450e9, 64e9),
    "H200": Gpu("H200", 989e12, 4.8e12, 141e9, 450e9, 64e9),
    "A100": Gpu("A100", 312e12, 2.039e12, 80e9, 300e9, 32e9),
    "A6000": Gpu("A6000", 154.8e12, 0.768e12, 48e9, 56.25e9, 32e9),
    "L40S": Gpu("L40S", 362e12, 0.864e12, 48e9, 32e9, 32e9),
    "L4": Gpu("L4", 121e12, 0.3e12, 24e9, 32e9, 32e9),
    "RTX4090": Gpu("RTX4090", 165.2e12, 1.008e12, 24e9, 32e9, 32e9),
    "RTX3090": Gpu("RTX3090", 71e12, 0.936e12, 24e9, 56.25e9, 32e9),
}
"""Data-sheet peaks of SXM boards (A100: 80 GB) and of cards; cards without NVLink have PCIe's rate twice."""


def gpu_called(name: str) -> Gpu | None:
    """Return the entry of `GPUS` for CUDA's name of a device ("NVIDIA H200"); None if there is none."""
    other = any(board in name for board in ("NVL", "PCIe", "40GB", "Laptop", "MIG", "GH", " D", " Ti"))
    called = name.replace("RTX ", "RTX")
    return next((gpu for key, gpu in GPUS.items() if re.search(rf"{key}(?!\w)", called) and not other), None)


def named(name: str, key: str) -> Gpu:
    """Return the entry of `GPUS` that a configuration names.

    Args:
        name: the name as typed.
        key: the full key, for the message.

    Raises:
        ConfigError: there is no such entry.
    """
    if name not in GPUS:
        raise ConfigError(f"{key}={name}; known: {', '.join(GPUS)}")
    return GPUS[name]

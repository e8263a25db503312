"""Sequence lengths at which a memory cap forces one more layer's KV cache off the device.

Source: SpeContext (arXiv 2512.00722) §6, Eqs. 6-8, Algorithms 1 and 2.
Note: Algorithm 1 omits the bytes per number in its term for the slots, unlike Eq. 7, which is used here.
    The cap is for the cache alone, and every layer has slots from the start; the paper includes 1.3 times the
    weights, and gives slots only to layers on the host.

Shapes: L layers, T thresholds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longtrain.costs.hardware import GIB
from longtrain.errors import ConfigError

COLUMNS = {
    "layers on the host": "on_host",
    "up to tokens": "tokens",
    "host GiB": "host_gib",
    "cache GiB on the device": "device_gib",
}


@dataclass(frozen=True)
class ElasticMemory:
    """Device memory of an elastic KV cache.

    Args:
        n_layers: L.
        n_kv_heads: KV heads of a layer.
        head_dim: size of a head.
        batch: sequences.
        itemsize: bytes of a number.
        slots: KV entries that each KV head has slots for on the device.
        page_entries: KV entries of a page, the unit of allocation.
    """

    n_layers: int
    n_kv_heads: int
    head_dim: int
    batch: int
    itemsize: int
    slots: int
    page_entries: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of K and V of one token position in a layer, over all sequences."""
        return 2 * self.batch * self.n_kv_heads * self.head_dim * self.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots, which all layers have from the start, so that any layer can be offloaded."""
        return self.n_layers * self.slots * self.row_bytes

    def bytes(self, length: int, on_host: int) -> int:
        """Return the device bytes for sequences of `length` with `on_host` layers on the host (Eq. 7)."""
        pages = -(-length // self.page_entries)
        return self.slot_bytes + (self.n_layers - on_host) * pages * self.page_entries * self.row_bytes

    def thresholds(self, cap_bytes: float) -> tuple[int | None, ...]:
        """Return the largest length at which 0, 1, .. L layers on the host suffice (Eq. 8).

        Returns: L + 1 lengths; 0: not even one page fits; None: any length fits, since device memory is
        constant.

        Raises:
            ConfigError: the slots need more than the cap.
        """
        left = cap_bytes - self.slot_bytes
        if left < 0:
            raise ConfigError(
                f"a cap of {cap_bytes / GIB:.3g} GiB, and with all {self.n_layers} layers on the host "
                f"{self.slot_bytes / GIB:.3g} GiB stay on the device; allowed: more than that, or read fewer "
                "rows"
            )
        page_bytes = self.page_entries * self.row_bytes
        pages = [int(left // ((self.n_layers - on_host) * page_bytes)) for on_host in range(self.n_layers)]
        return (*(count * self.page_entries for count in pages), None)

    def on_host(self, length: int, cap_bytes: float) -> int:
        """Return the layers on the host for sequences of `length`, with the next step's tokens (Algorithm 2).

        Raises:
            ConfigError: offloading all layers does not suffice.
        """
        for on_host, most in enumerate(self.thresholds(cap_bytes)):
            if most is None or length <= most:
                return on_host
        raise ConfigError(f"texts of {length} tokens do not fit into {cap_bytes / GIB:.3g} GiB")


def threshold_rows(memory: ElasticMemory, cap_bytes: float, longest: int) -> list[dict[str, Any]]:
    """Return a table row for each number of layers on the host that occurs up to length `longest`."""
    rows: list[dict[str, Any]] = []
    before = 0
    for on_host, most in enumerate(memory.thresholds(cap_bytes)):
        tokens = longest if most is None else min(most, longest)
        if tokens <= before:
            continue
        rows.append(
            {
                "on_host": on_host,
                "tokens": tokens,
                "host_gib": memory.n_layers * tokens * memory.row_bytes / GIB,
                "device_gib": memory.bytes(tokens, on_host) / GIB,
            }
        )
        before = tokens
    return rows

"""How long texts may grow under a cap on memory before one more layer's rows must leave the device.

Source: SpeContext (arXiv 2512.00722) §6, Eqs. 6-8, Algorithms 1 and 2.
Note: Algorithm 1 leaves the bytes of a row's numbers out of its term for the slots, against Eq. 7, which
    counts here. The paper takes 1.3 times the weights for everything else: here a number of bytes that is
    measured or known. Its copy of repeated heads is 0 with kernels that read KV heads as they are.

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
    """What an elastic cache takes on the device.

    Args:
        n_layers: L.
        n_kv_heads: KV heads of a layer.
        head_dim: size of a head.
        batch: sequences.
        itemsize: bytes of a number.
        slots: rows that a KV head has slots for.
        fixed_bytes: everything whose size does not follow from the text: weights, activations.
        more_layers: what else grows with the text, in layers' K and V; a retrieval head's keys are 0.5 (the
            paper counts 1, and as many again as query heads share a KV head).
        every_slot: layers have slots from the start, so that one that leaves the device has its rows there;
            False: as the paper counts, layers on the host alone.
        page_rows: rows that memory is given out by.
    """

    n_layers: int
    n_kv_heads: int
    head_dim: int
    batch: int
    itemsize: int
    slots: int
    fixed_bytes: float = 0
    more_layers: float = 0
    every_slot: bool = True
    page_rows: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of K and V of one token in a layer, of all sequences."""
        return 2 * self.batch * self.n_kv_heads * self.head_dim * self.itemsize

    def bytes(self, length: int, on_host: int) -> float:
        """Bytes on the device with texts of a length and so many layers on the host (Eq. 7)."""
        rows = -(-length // self.page_rows) * self.page_rows
        return self._still(on_host) + (self.n_layers - on_host + self.more_layers) * rows * self.row_bytes

    def thresholds(self, cap_bytes: float) -> tuple[int | None, ...]:
        """The greatest length at which 0, 1, .. L layers on the host suffice (Eq. 8).

        Returns: T of L + 1 numbers; 0: not even one page fits; None: any length does, since nothing grows.

        Raises:
            ConfigError: the slots and what is fixed take more than the cap.
        """
        if self._still(self.n_layers) > cap_bytes:
            needed = self._still(self.n_layers) / GIB
            raise ConfigError(
                f"a cap of {cap_bytes / GIB:.3g} GiB, and with all {self.n_layers} layers on the host "
                f"{needed:.3g} GiB stay on the device; allowed: more than that, or read fewer rows"
            )
        found: list[int | None] = []
        for on_host in range(self.n_layers + 1):
            growing = (self.n_layers - on_host + self.more_layers) * self.page_rows * self.row_bytes
            left = cap_bytes - self._still(on_host)
            found.append(None if not growing else max(0, int(left // growing)) * self.page_rows)
        return tuple(found)

    def on_host(self, length: int, cap_bytes: float) -> int:
        """Layers on the host with texts of a length, new rows of the coming step included (Algorithm 2).

        Raises:
            ConfigError: not even all of them suffice.
        """
        for on_host, most in enumerate(self.thresholds(cap_bytes)):
            if most is None or length <= most:
                return on_host
        raise ConfigError(f"texts of {length} tokens do not fit into {cap_bytes / GIB:.3g} GiB")

    def _still(self, on_host: int) -> float:
        """Bytes that do not grow with the text."""
        with_slots = self.n_layers if self.every_slot else on_host
        return self.fixed_bytes + with_slots * self.slots * self.row_bytes


def threshold_rows(memory: ElasticMemory, cap_bytes: float, longest: int) -> list[dict[str, Any]]:
    """A row for every number of layers on the host that some length up to `longest` asks for."""
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

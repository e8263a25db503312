"""Costs of decoding at a context length: cache, memory, and the time of a step or cycle on a device.

Lower bounds are those of `costs.roofline` at the data sheet's peaks; expected times those of `costs.cycle`,
which assumes the bandwidth that good kernels reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longtrain.costs import roofline
from longtrain.costs.cycle import Forward, expected_ms
from longtrain.costs.footprint import CONTEXT, SPARE, fits, needed
from longtrain.costs.hardware import BYTES_SHARE, GIB, Gpu
from longtrain.costs.method import CycleCost
from longtrain.costs.model import ITEM, Sizes, window_slots
from longtrain.costs.roofline import Width

PLAIN_COLUMNS = {
    "context": "context",
    "prefill s, least": "prefill_s",
    "KV GiB": "kv_gib",
    "weights and KV GiB": "all_gib",
    "fits": "fits",
    "step ms, least": "least_ms",
    "step ms, expected": "plain_ms",
    "attention's share": "attention_share",
}
CYCLE_COLUMNS = {
    "context": "context",
    "KV GiB": "own_gib",
    "of the plain one": "own_share",
    "weights and KV GiB": "own_all_gib",
    "fits": "own_fits",
    "scores ms": "score_ms",
    "plain step ms": "own_ms",
    "draft step ms": "draft_ms",
    "verify ms": "verify_ms",
    "cycle ms": "cycle_ms",
    "tokens a cycle": "cycle_tokens",
    "speed": "speedup",
    "over plain on this cache": "own_speedup",
}
HOST_COLUMNS = {
    "context": "context",
    "layers on the host": "on_host",
    "MB moved a step": "moved_mb",
    "ms of it": "moved_ms",
    "step ms": "host_ms",
    "of rows on the device": "of_device",
}
MOVED_SHARE = 0.35
"""Share of selected KV entries that were not selected in the step before, measured for retrieval heads."""
HOST_SHARE = 0.67
"""Share of the link's peak reached when gathering KV entries from pinned memory: 42.9 of 64 GB/s (H200)."""


@dataclass(frozen=True)
class Served:
    """A target on a device.

    Args:
        size: the target.
        gpu: the device.
        batch: sequences decoded together.
        itemsize: bytes of a number of the target.
        weight_bytes: bytes of the target's weights.
        windows: window of each layer; 0: none.
    """

    size: Sizes
    gpu: Gpu
    batch: int
    itemsize: int
    weight_bytes: int
    windows: tuple[int, ...] = ()

    def seen(self, context: int, *, stored: bool = False) -> int:
        """Return how many of `context` cached tokens a layer reads, or stores, on the average over layers."""
        rows = [window_slots(max(self.windows)) if stored else window for window in self.windows if window]
        return round(context - sum(max(0, context - row) for row in rows) / self.size.n_layers)

    def fits(self, held: float) -> str:
        """Return `yes` if the device has room for so many bytes, else `no`."""
        return "yes" if fits(held, self.gpu.memory_bytes) else "no"

    def verdict(self, row: dict[str, Any], *, own: bool = False) -> str:
        """Return a sentence on the longest context that fits the device, and the need of a table's longest.

        Args:
            row: the result of `plain` or `speculative` at the longest context.
            own: use the method's cache instead of the plain one.
        """
        kv, held = (row[key] for key in (("own_gib", "own_all_gib") if own else ("kv_gib", "all_gib")))
        has, context = self.gpu.memory_bytes / GIB, row["context"]
        room = (has - CONTEXT / GIB) / (1 + SPARE) - (held - kv)
        longest = max(0, int(room / kv * context))
        about = (
            f"an {self.gpu.name} has {has:.4g} GiB, {CONTEXT / GIB:.2g} for CUDA, and {SPARE:.0%} stays free"
        )
        if longest >= context:
            return f"Fits: there is room for {longest} tokens of each sequence; {about}."
        needs = f"weights and cache of {context} tokens need {needed(held * GIB) / GIB:.4g} GiB"
        if longest < 1:
            return f"Does not fit: the weights alone take {held - kv:.4g} GiB; {about}."
        return f"Does not fit at {context} tokens, does up to {longest}: {needs}; {about}."

    def expected_ms(self, forwards: list[Forward], context: int) -> float:
        """Return the expected milliseconds of forwards, at the bandwidth that good kernels reach."""
        bytes_per_s = BYTES_SHARE * self.gpu.bytes_per_s
        return sum(
            expected_ms([one], self.size, batch=self.batch, context=seen, bytes_per_s=bytes_per_s)
            for one in forwards
            for seen in (self.seen(context) if one.layers is None else context,)
        )


def plain(served: Served, context: int) -> dict[str, Any]:
    """Return memory and step time of plain decoding at one context length."""
    size, gpu, batch = served.size, served.gpu, served.batch
    width = Width(8 * served.itemsize, 8 * served.itemsize)
    step = roofline.metrics(roofline.step(size, batch=batch, context=served.seen(context), width=width), gpu)
    read = roofline.metrics(roofline.prefill(size, batch=batch, context=context), gpu)
    held = served.seen(context, stored=True)
    kv = batch * roofline.stored(size.kv_bytes(held) // ITEM, 8 * served.itemsize)
    return {
        "batch": batch,
        "context": context,
        "prefill_s": 1e-3 * read["ms"],
        "kv_gib": kv / GIB,
        "all_gib": (served.weight_bytes + kv) / GIB,
        "fits": served.fits(served.weight_bytes + kv),
        "least_ms": step["ms"],
        "plain_ms": served.expected_ms([Forward(width)], context),
        "attention_share": step["attention_share"],
    }


def speculative(served: Served, cost: CycleCost, row: dict[str, Any], *, rate: float) -> dict[str, Any]:
    """Return memory and cycle time with a method's cache and draft.

    Args:
        served: the target on a device.
        cost: the cost of the method's cycle.
        row: the result of `plain` at this context.
        rate: probability that a drafted token is accepted if all before it were.
    """
    context, own = row["context"], cost.cache_bytes
    kv = row["kv_gib"] * GIB if own is None else own(served.batch, context)
    weights = served.weight_bytes + cost.weight_bytes
    found: dict[str, Any] = {
        "own_gib": kv / GIB,
        "own_share": kv / GIB / row["kv_gib"],
        "own_all_gib": (weights + kv) / GIB,
        "own_fits": served.fits(weights + kv),
        "own_ms": served.expected_ms([*cost.before, cost.alone], context),
    }
    if cost.before:
        found["score_ms"] = served.expected_ms(list(cost.before), context)
    if not cost.draft:
        return found
    drafted = int(sum(forward.times for forward in cost.draft))
    drafts_ms = served.expected_ms([*cost.before, *cost.draft], context)
    verify_ms = served.expected_ms([cost.verify], context)
    tokens = sum(rate**i for i in range(drafted + 1))
    return found | {
        "draft_ms": drafts_ms / drafted,
        "verify_ms": verify_ms,
        "cycle_ms": drafts_ms + verify_ms,
        "cycle_tokens": tokens,
        "speedup": tokens * row["plain_ms"] / (drafts_ms + verify_ms),
        "own_speedup": tokens * found["own_ms"] / (drafts_ms + verify_ms),
    }


def offloaded(served: Served, row: dict[str, Any], *, rows: int, on_host: int) -> dict[str, Any]:
    """Return the time of a step that reads selected KV entries, with some layers' cache on the host.

    The first of these layers waits for its transfer; transfers of the others overlap with earlier layers.

    Args:
        served: the target on a device.
        row: the result of `speculative` at this context.
        rows: KV entries selected for a step.
        on_host: number of layers on the host.
    """
    size, context = served.size, row["context"]
    whole = served.batch * size.kv_bytes(min(rows, context)) * served.itemsize / ITEM
    moved = MOVED_SHARE * whole * on_host / size.n_layers
    moved_ms = 1e3 * moved / (HOST_SHARE * served.gpu.host_bytes_per_s)
    waited_ms = moved_ms / on_host if on_host else 0.0
    return {
        "on_host": on_host,
        "moved_mb": moved / 1e6,
        "moved_ms": moved_ms,
        "host_ms": max(row["own_ms"] + waited_ms, moved_ms),
        "of_device": max(row["own_ms"] + waited_ms, moved_ms) / row["own_ms"],
    }

"""The part of `longtrain plan` about an elastic cache: up to which length which layers stay on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longtrain.costs.elastic import ElasticMemory
from longtrain.costs.hardware import GIB
from longtrain.errors import ConfigError
from longtrain.jobs.setup import plain
from longtrain.methods.named import named
from longtrain.settings import Count, convert, read
from longtrain.tables import of_rows

if TYPE_CHECKING:
    from longtrain.jobs.plan import RecipePlan

COLUMNS = {
    "layers on the host": "on_host",
    "up to tokens": "tokens",
    "host GiB": "host_gib",
    "cache GiB on the device": "device_gib",
}


def lines_of(plan: RecipePlan) -> list[str]:
    """A table of thresholds for `cache=elastic`; nothing without it.

    Raises:
        ConfigError: another cache, a wrong option, or a cap that the chosen rows alone exceed.
    """
    cfg = plan.cfg
    if (wanted := named("cache", plain(cfg.cache), "plan")) is None:
        return []
    if wanted.name != "elastic":
        raise ConfigError(f"cache={wanted.name}; plan knows: elastic, or null")
    from longtrain.cache.elastic import Offloading
    from longtrain.cache.row_sets import ReadBudget

    offloading = read(Offloading, wanted.options, "cache elastic")
    budget = ReadBudget(
        convert(cfg.evict.get("budget_tokens") or ReadBudget.rows, Count, "evict.budget_tokens")
    )
    batch, size = convert(cfg.batch, Count, "batch"), plan.size
    memory = ElasticMemory(
        size.n_layers,
        size.n_kv_heads,
        size.head_dim,
        batch,
        plan.itemsize,
        slots=budget.rows + 1,
        page_rows=offloading.page_rows,
    )
    about = f"Elastic cache of {batch} sequence{'s' if batch > 1 else ''}, {budget.rows} rows read a step"
    host = plan.info.max_positions * memory.row_bytes * size.n_layers / GIB
    if offloading.memory_gib is None:
        slots = memory.bytes(0, size.n_layers) / GIB
        return [
            f"{about}: all layers on the host from the start ({host:.3g} GiB pinned at "
            f"{plan.info.max_positions} tokens), {slots:.3g} GiB on the device"
        ]
    rows = rows_of(memory, offloading.memory_gib * GIB, plan.info.max_positions)
    return [
        f"{about}, at most {offloading.memory_gib:g} GiB on the device; layers leave it from line to line.",
        of_rows(rows, COLUMNS),
    ]


def rows_of(memory: ElasticMemory, cap_bytes: float, longest: int) -> list[dict[str, Any]]:
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

"""What decoding a target takes, by context: cache, memory, and the time of a step on a given device.

Least times are the bounds of `costs.roofline` at the data sheet's peaks; expected ones those of
`costs.cycle`, which takes what good kernels reach.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from longtrain.bench.report import GIB, table
from longtrain.cache.room import hierarchical_bytes
from longtrain.costs import roofline
from longtrain.costs.cycle import Forward, expected_ms
from longtrain.costs.hardware import BYTES_SHARE, GPUS, Gpu
from longtrain.costs.model import Sizes
from longtrain.costs.roofline import Width
from longtrain.errors import ConfigError
from longtrain.jobs.setup import convert, plain
from longtrain.kernels.hierarchical.layout import check_shape
from longtrain.methods.quantspec.config import Config
from longtrain.settings import parse_tokens
from longtrain.targets.info import TargetInfo

_CHAIN = 4
"""Drafted tokens of a cycle where `decode.shape` names no chain."""
_PLAIN = {
    "context": "context",
    "prefill s, least": "prefill_s",
    "KV GiB": "kv_gib",
    "weights and KV GiB": "all_gib",
    "of memory": "memory_share",
    "step ms, least": "least_ms",
    "step ms, expected": "plain_ms",
    "attention's share": "attention_share",
}
_QUANTISED = {
    "context": "context",
    "KV GiB": "quantised_gib",
    "of the plain one": "quantised_share",
    "weights and KV GiB": "quantised_all_gib",
    "of memory": "quantised_memory_share",
    "plain step ms": "quantised_ms",
    "draft step ms": "draft_ms",
    "verify ms": "verify_ms",
    "cycle ms": "cycle_ms",
    "tokens a cycle": "cycle_tokens",
    "speed": "speedup",
    "over plain on this cache": "own_speedup",
}


def gpu_of(cfg: DictConfig) -> Gpu:
    """The device of `gpu=`.

    Raises:
        ConfigError: it is not known.
    """
    if str(cfg.gpu) not in GPUS:
        raise ConfigError(f"gpu={cfg.gpu}; known: {', '.join(sorted(GPUS))}")
    return GPUS[str(cfg.gpu)]


def told(
    cfg: DictConfig, info: TargetInfo, quantspec: Config | None, *, itemsize: int, weight_bytes: int
) -> list[str]:
    """Lines of the plan: a table of plain decoding and, if that is the method, one of QuantSpec's.

    Args:
        cfg: keys `gpu`, `contexts`, `batch`, `acceptance` and `decode.shape`.
        info: the target.
        quantspec: its settings; None: another method or none.
        itemsize: bytes of one of the target's numbers.
        weight_bytes: of the target.

    Raises:
        ConfigError: a key has a wrong value, or heads that the quantised cache does not serve.
    """
    gpu, batch = gpu_of(cfg), convert(cfg.batch, int, "batch")
    acceptance = convert(cfg.acceptance, float, "acceptance")
    if batch < 1 or not 0 <= acceptance <= 1:
        raise ConfigError(f"batch={batch} acceptance={acceptance}; allowed: 1 or more, and 0 to 1")
    contexts = sorted({parse_tokens(context) for context in plain(cfg.contexts)})
    served = [context for context in contexts if 1 <= context <= info.max_positions]
    if not served:
        raise ConfigError(
            f"contexts={plain(cfg.contexts)}; allowed: 1 to the target's {info.max_positions} positions"
        )
    sizes = {"itemsize": itemsize, "weight_bytes": weight_bytes}
    rows = [plain_row(info, gpu, batch=batch, context=context, **sizes) for context in served]
    lines = [
        f"Decoding {batch} sequence{'s' if batch > 1 else ''} on one {gpu.name} of "
        f"{gpu.memory_bytes / 1e9:.0f} GB; least: no implementation is faster.",
        table(rows, _PLAIN),
    ]
    if quantspec is None:
        return lines
    check_shape(n_heads=info.n_heads, n_kv_heads=info.n_kv_heads, head_dim=info.head_dim)
    drafted = _drafted(cfg) if quantspec.draft else 0
    for row in rows:
        row |= quantised_row(info, gpu, quantspec, row, **sizes, drafted=drafted, rate=acceptance)
    return [
        *lines,
        (
            f"QuantSpec: expected times; {drafted} drafted tokens a cycle, each accepted with probability "
            f"{acceptance:g} (acceptance=); speed is over plain decoding on the plain cache."
            if quantspec.draft
            else "The quantised cache without its draft: expected times."
        ),
        table(rows, _QUANTISED),
    ]


def plain_row(
    info: TargetInfo, gpu: Gpu, *, batch: int, context: int, itemsize: int, weight_bytes: int
) -> dict[str, Any]:
    """Memory and step time of plain decoding at one context."""
    size, width = Sizes.of(info), Width(8 * itemsize, 8 * itemsize)
    found = roofline.figures(roofline.step(size, batch=batch, context=context, width=width), gpu)
    kv = batch * roofline.stored(_numbers(info, context), 8 * itemsize)
    return {
        "batch": batch,
        "context": context,
        "prefill_s": 1e-3 * roofline.figures(roofline.prefill(size, batch=batch, context=context), gpu)["ms"],
        "kv_gib": kv / GIB,
        "all_gib": (weight_bytes + kv) / GIB,
        "memory_share": (weight_bytes + kv) / gpu.memory_bytes,
        "least_ms": found["ms"],
        "plain_ms": _ms([Forward(width)], info, gpu, batch, context),
        "attention_share": found["attention_share"],
    }


def quantised_row(
    info: TargetInfo,
    gpu: Gpu,
    config: Config,
    row: dict[str, Any],
    *,
    itemsize: int,
    weight_bytes: int,
    drafted: int,
    rate: float,
) -> dict[str, Any]:
    """The same on the hierarchical cache, and cycles of self-speculation.

    Args:
        info: the target.
        gpu: the device.
        config: of QuantSpec.
        row: of plain decoding at this context.
        itemsize: bytes of one of the target's numbers.
        weight_bytes: of the target.
        drafted: tokens a cycle.
        rate: with which each is accepted.
    """
    size, batch, context = Sizes.of(info), row["batch"], row["context"]
    kv = hierarchical_bytes(
        n_layers=info.n_layers,
        n_kv_heads=info.n_kv_heads,
        head_dim=info.head_dim,
        batch=batch,
        max_tokens=context,
        itemsize=itemsize,
    )
    weights = float(weight_bytes)
    if config.draft and config.weight_bits == 4:
        weights += roofline.stored(size.weights + size.head, 4)
    target = Width(8 * itemsize, 8)
    alone_ms = _ms([Forward(target)], info, gpu, batch, context)
    found: dict[str, Any] = {
        "quantised_gib": kv / GIB,
        "quantised_share": kv / GIB / row["kv_gib"],
        "quantised_all_gib": (weights + kv) / GIB,
        "quantised_memory_share": (weights + kv) / gpu.memory_bytes,
        "quantised_ms": alone_ms,
    }
    if not drafted:
        return found
    draft = Width(4 if config.weight_bits == 4 else 8 * itemsize, config.kv_bits)
    draft_ms = _ms([Forward(draft)], info, gpu, batch, context)
    verify_ms = _ms([Forward(target, rows=drafted + 1)], info, gpu, batch, context)
    cycle_ms, tokens = drafted * draft_ms + verify_ms, sum(rate**i for i in range(drafted + 1))
    return found | {
        "draft_ms": draft_ms,
        "verify_ms": verify_ms,
        "cycle_ms": cycle_ms,
        "cycle_tokens": tokens,
        "speedup": tokens * row["plain_ms"] / cycle_ms,
        "own_speedup": tokens * alone_ms / cycle_ms,
    }


def _numbers(info: TargetInfo, context: int) -> int:
    """Keys and values of one sequence."""
    return 2 * info.n_layers * info.n_kv_heads * info.head_dim * context


def _ms(forwards: list[Forward], info: TargetInfo, gpu: Gpu, batch: int, context: int) -> float:
    """Expected, at the share of peak bandwidth that is reached."""
    return expected_ms(
        forwards, Sizes.of(info), batch=batch, context=context, bytes_per_s=BYTES_SHARE * gpu.bytes_per_s
    )


def _drafted(cfg: DictConfig) -> int:
    """Tokens of the chain that `decode.shape` names; those of the default chain where it names none."""
    shape = plain(cfg.decode.shape)
    is_chain = isinstance(shape, list) and bool(shape) and all(width == 1 for width in shape)
    return len(shape) if is_chain else _CHAIN

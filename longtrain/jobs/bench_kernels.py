"""`longtrain bench suite=kernels`: what to measure, from the configuration."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig

from longtrain.bench import attention_baselines, kernels, kernels_report
from longtrain.errors import ConfigError
from longtrain.jobs import bench_rows
from longtrain.jobs.setup import at_least, convert, device_of, plain
from longtrain.kernels.hierarchical.layout import HEAD_DIMS
from longtrain.settings import parse_tokens

CUDA_CELLS = [
    ("dense", 1, "32k"), ("int4", 1, "32k"), ("dense", 1, "128k"), ("int4", 1, "128k"), ("int4", 1, "256k"),
    ("int8", 7, "32k"), ("int8", 7, "128k"), ("dense", 7, "128k"), ("dense", 8, "32k"), ("dense", 8, "128k"),
    ("dense", 64, "32k"), ("dense", 64, "128k"),
]  # fmt: skip
CPU_CELLS = [("dense", 1, 512), ("int4", 1, 512), ("int8", 7, 512), ("dense", 8, 512)]


def run(cfg: DictConfig) -> None:
    """Measure, write `kernels.json` (again whenever there is a new row) and `kernels.png`, show the table.

    Raises:
        ConfigError: a key of the suite is wrong.
    """
    path, rows = bench_rows.show(cfg, "kernels", kernels.measure(settings_of(cfg)), kernels.COLUMNS)
    if (png := kernels_report.picture(rows)) is not None:
        path.with_suffix(".png").write_bytes(png)


def settings_of(cfg: DictConfig) -> kernels.Settings:
    """`suite` as the settings of `bench.kernels`; `auto` is settled by the device.

    Raises:
        ConfigError: a value of another type, an unknown cache or baseline, a shape that does not fit.
    """
    device, suite = torch.device(device_of(cfg)), plain(cfg.suite)
    cuda = device.type == "cuda"

    def auto(key: str, on_cuda: Any, elsewhere: Any) -> Any:
        return (on_cuda if cuda else elsewhere) if suite[key] == "auto" else suite[key]

    both = convert(auto("heads", [32, 8], [4, 2]), list[int], "suite.heads")
    if len(both) != 2 or min(both) < 1 or both[0] % both[1]:
        raise ConfigError(
            f"suite.heads={both}; allowed: [query heads, KV heads], query heads a multiple of KV heads"
        )
    heads, kv_heads = both
    head_dim = convert(auto("head_dim", 128, 64), int, "suite.head_dim")
    if head_dim not in HEAD_DIMS:
        raise ConfigError(f"suite.head_dim={head_dim}; allowed: {', '.join(map(str, HEAD_DIMS))}")
    cells = [_cell(one, heads, kv_heads, head_dim) for one in auto("cells", CUDA_CELLS, CPU_CELLS)]
    if (mha := auto("mha_heads", 32, None)) is not None:
        mha = at_least(mha, 1, "suite.mha_heads")
        cells += [_cell(one, mha, mha, head_dim) for one in suite["mha_cells"]]
    if not cells:
        raise ConfigError("suite.cells is empty; say what to measure, such as [[dense, 1, 32k]]")
    fast = [name for name in attention_baselines.NAMES if name not in ("cudnn", "flex")]
    stock = auto("baselines", list(attention_baselines.NAMES), fast)
    baselines = tuple(convert(stock, list[str], "suite.baselines"))
    if unknown := set(baselines) - set(attention_baselines.NAMES):
        known = ", ".join(attention_baselines.NAMES)
        raise ConfigError(f"suite.baselines has {', '.join(sorted(unknown))}; known: {known}")
    name = str(auto("dtype", "bfloat16", "float32"))
    if name not in ("bfloat16", "float16", "float32"):
        raise ConfigError(f"suite.dtype={name}; allowed: bfloat16, float16, float32")
    return kernels.Settings(
        device=device,
        dtype=getattr(torch, name),
        cells=tuple(cells),
        baselines=baselines,
        repeats=at_least(suite["repeats"], 1, "suite.repeats"),
        candidates=convert(suite["candidates"], bool, "suite.candidates"),
        seed=convert(cfg.seed, int, "seed"),
    )


def _cell(given: Any, heads: int, kv_heads: int, head_dim: int) -> kernels.Cell:
    """One of `suite.cells`."""
    try:
        cache, rows, keys = given
        cell = kernels.Cell(str(cache), heads, kv_heads, int(rows), parse_tokens(keys), head_dim)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"suite.cells has {given}; allowed: [cache, new rows, keys], as [int4, 1, 32k]"
        ) from error
    if cell.cache not in kernels.BITS:
        raise ConfigError(f"suite.cells has the cache '{cell.cache}'; known: {', '.join(kernels.BITS)}")
    least = 1 if cell.cache == "dense" else 2 * kernels.RECENT
    if not 1 <= cell.rows <= 128 or cell.keys < least or heads % kv_heads:
        raise ConfigError(
            f"suite.cells has {given} with {heads} query heads over {kv_heads} KV heads; allowed: 1 to 128 "
            f"rows, {least} keys or more, query heads a multiple of KV heads"
        )
    return cell

"""`longtrain bench suite=quantise`: what to measure, from the configuration."""

from __future__ import annotations

import torch
from omegaconf import DictConfig

from longtrain.bench import quantise
from longtrain.costs.model import Sizes
from longtrain.errors import ConfigError
from longtrain.jobs import bench_rows
from longtrain.jobs.setup import at_least, convert, device_of, plain
from longtrain.kernels.hierarchical.layout import Split, check_shape
from longtrain.settings import parse_tokens

CPU_SIZES = Sizes(2, 4, 2, 64, 256, 512, 256)


def run(cfg: DictConfig) -> None:
    """Measure, write `quantise.json` (again whenever there is a new row), show the table.

    Raises:
        ConfigError: a key of the suite is wrong.
    """
    bench_rows.show(cfg, "quantise", quantise.measure(settings_of(cfg)), quantise.COLUMNS)


def settings_of(cfg: DictConfig) -> quantise.Settings:
    """`suite` as the settings of `bench.quantise`; `auto` is settled by the device.

    Raises:
        ConfigError: an unknown shape or split, heads that are not served, or no length.
    """
    from longtrain.targets.shapes import shape_config

    device, suite = torch.device(device_of(cfg)), plain(cfg.suite)
    cuda = device.type == "cuda"
    shape = suite["shape"]
    if shape == "auto":
        size = Sizes.of_keys(shape_config("llama31_8b").to_dict()) if cuda else CPU_SIZES
    else:
        size = Sizes.of_keys(shape_config(shape).to_dict())
    check_shape(n_heads=size.n_heads, n_kv_heads=size.n_kv_heads, head_dim=size.head_dim)
    lengths = ["32k", "128k"] if cuda else [1024]
    if suite["lengths"] != "auto":
        lengths = suite["lengths"]
    tokens = tuple(sorted({parse_tokens(length) for length in lengths}))
    if not tokens or tokens[0] < 1:
        raise ConfigError(f"suite.lengths={lengths}; allowed: prompts of 1 token or more, e.g. [32k,128k]")
    known = [split.value for split in Split]
    splits = convert(suite["splits"], list[str], "suite.splits")
    if not splits or set(splits) - set(known):
        raise ConfigError(f"suite.splits={splits}; allowed: some of {', '.join(known)}")
    return quantise.Settings(
        device=device,
        dtype=torch.bfloat16 if cuda else torch.float32,
        size=size,
        lengths=tokens,
        splits=tuple(map(Split, splits)),
        repeats=at_least(suite["repeats"], 1, "suite.repeats"),
        seed=convert(cfg.seed, int, "seed"),
    )

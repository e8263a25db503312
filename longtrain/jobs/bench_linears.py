"""`longtrain bench suite=linears`: what to measure, from the configuration."""

from __future__ import annotations

import torch
from omegaconf import DictConfig

from longtrain.bench import linears
from longtrain.errors import ConfigError
from longtrain.jobs import bench_rows
from longtrain.jobs.setup import at_least, convert, device_of, plain

CPU_SHAPE = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 192,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
"""Small enough for a CPU, features in groups of 64 and more."""


def run(cfg: DictConfig) -> None:
    """Measure, write `linears.json` (again whenever there is a new row), show the table.

    Raises:
        ConfigError: a key of the suite is wrong.
    """
    bench_rows.show(cfg, "linears", linears.measure(settings_of(cfg)), linears.COLUMNS)


def settings_of(cfg: DictConfig) -> linears.Settings:
    """`suite` as the settings of `bench.linears`; `auto` is settled by the device.

    Raises:
        ConfigError: an unknown shape or kind of weights, or no count of rows.
    """
    from longtrain.targets.shapes import shape_config

    device, suite = torch.device(device_of(cfg)), plain(cfg.suite)
    cuda = device.type == "cuda"
    shape = suite["shape"]
    if shape == "auto":
        shape = "llama31_8b" if cuda else CPU_SHAPE
    layers, per_step = linears.layers_of(shape_config(shape))
    weights = tuple(convert(suite["weights"], list[str], "suite.weights"))
    if not weights or set(weights) - set(linears.WEIGHTS):
        raise ConfigError(f"suite.weights={list(weights)}; allowed: some of {', '.join(linears.WEIGHTS)}")
    rows = tuple(convert(suite["rows"], list[int], "suite.rows"))
    if not rows or min(rows) < 1:
        raise ConfigError(f"suite.rows={list(rows)}; allowed: counts from 1")
    return linears.Settings(
        device=device,
        dtype=torch.bfloat16 if cuda else torch.float32,
        layers=layers,
        per_step=per_step,
        weights=weights,
        rows=rows,
        repeats=at_least(suite["repeats"], 1, "suite.repeats"),
        seed=convert(cfg.seed, int, "seed"),
    )

"""`longtrain bench suite=engine`: decoding as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from longtrain.assets import asset_dir
from longtrain.errors import ConfigError, DataError
from longtrain.evaluation.contexts import documents_from_files
from longtrain.jobs import bench_rows
from longtrain.jobs.setup import (
    at_least,
    convert,
    device_of,
    drafting_from,
    load_target_from,
    plain,
    sampling_from,
    typed,
)

if TYPE_CHECKING:
    from longtrain.artifact import Artifact
    from longtrain.decoding.roles import Parts
    from longtrain.targets.model import Target


def engine_rows(cfg: DictConfig) -> list[dict[str, Any]]:
    """Plain against speculative decoding, on held-out text or, with `suite.shape`, on random ids.

    Raises:
        ConfigError: a key of the suite is wrong.
    """
    from longtrain.artifact import Artifact
    from longtrain.bench import engine

    suite = cfg.suite
    lengths, batches = bench_rows.lengths_of(cfg), bench_rows.batches_of(cfg)
    artifact = Artifact.load(cfg.artifact, home=cfg.home) if cfg.artifact else None
    counts = {
        key: at_least(suite[key], least, f"suite.{key}")
        for key, least in {"max_new_tokens": 2, "warmup": 0, "repeats": 1, "cycles": 0}.items()
    }
    settings = engine.Settings(
        sampling=sampling_from(cfg),
        shape=drafting_from(cfg),
        baselines=convert(plain(suite.baselines), list[str], "suite.baselines"),
        **counts,
    )
    named = artifact.target.name if artifact else None
    target = _random_target(cfg) if suite.shape else load_target_from(cfg, path=named)
    rows: list[dict[str, Any]] = []
    parts = None
    for length in lengths:
        for batch in batches:
            if parts is None:
                parts = _parts(cfg, target, artifact)
            prompts = (_random_ids if suite.shape else _stretches)(target, length, batch)
            rows.append(engine.measure(target, parts, prompts, settings))
    return rows


def _random_target(cfg: DictConfig) -> Target:
    """A published shape with random weights, fused where it runs on CUDA."""
    from longtrain.targets.loading import random_target

    device = device_of(cfg)
    dtype = str(cfg.target.dtype) if cfg.target else "auto"
    target = random_target(str(cfg.suite.shape), seed=int(cfg.seed), dtype=dtype, device=device)
    return target.fuse() if device.startswith("cuda") else target


def _parts(cfg: DictConfig, target: Target, artifact: Artifact | None) -> Parts | None:
    """What decodes beside the target: an artifact, or `method=NAME` with random weights.

    Raises:
        ConfigError: a method that brings nothing to an engine, or one with weights and a real target.
    """
    import torch

    from longtrain import methods

    if artifact is not None:
        return artifact.attach(target)
    if cfg.method is None:
        return None
    spec = methods.get(str(cfg.method.name))
    if spec.attach is None:
        raise ConfigError(f"method={spec.name} brings nothing to decode with; pass another, or none")
    if spec.objective is not None and not cfg.suite.shape:
        raise ConfigError(
            f"method={spec.name} would decode with random weights; pass artifact=NAME, or suite.shape=NAME "
            "to measure random weights"
        )
    values = {key: value for key, value in plain(cfg.method).items() if key != "name"}
    config: Any = typed(spec.config, values, "method")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(cfg.seed))
        module = spec.build(config, target.info)
    return spec.attach(module.to(target.device, target.dtype), target, config, {})


def _stretches(target: Target, length: int, batch: int) -> list[list[int]]:
    """Stretches of held-out text, evenly spread.

    Raises:
        DataError: the target has no tokenizer, or there is too little text for this length.
    """
    if target.tokenizer is None:
        raise DataError(f"target {target.info.name} has no tokenizer; bench suite=engine needs real text")
    documents = documents_from_files(asset_dir("bundled") / "text" / "heldout", target.tokenizer)
    ids = [int(token) for document in documents for token in document.ids_T]
    if len(ids) < length:
        raise DataError(f"held-out text has {len(ids)} tokens; lengths={length} asks for more")
    step = (len(ids) - length) // max(1, batch - 1) if batch > 1 else 0
    return [ids[i * step : i * step + length] for i in range(batch)]


def _random_ids(target: Target, length: int, batch: int) -> list[list[int]]:
    """Prompts for weights that know no text."""
    import torch

    coins = torch.Generator().manual_seed(length)
    return torch.randint(target.info.vocab_size, (batch, length), generator=coins).tolist()

"""Shared by several jobs: loading the target, the artifacts and the systems that a configuration names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from longtrain.errors import ArtifactError, ConfigError
from longtrain.settings import AUTO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from longtrain.artifact import Artifact
    from longtrain.config import RunConfig
    from longtrain.systems import Entry
    from longtrain.targets.model import Target


NO_CUDA = (
    "trainer.accelerator={}, and torch sees no CUDA device here; with a target that is small enough for a "
    "CPU pass trainer=cpu"
)


def load_target(
    cfg: RunConfig,
    *,
    device: str | None = None,
    path: str | None = None,
    fuse: bool = True,
    training: bool = False,
    layers: bool = True,
) -> Target:
    """Load the frozen target named by `cfg.target`.

    Args:
        cfg: the configuration.
        device: the device to put it on, instead of `target.device`.
        path: the target to load if `target.path` is not set (for example, the one an artifact was trained
            for).
        fuse: follow `target.fused`; False keeps the model's own decoder.
        training: shard it according to `target.shard`; other jobs run in one process with the whole model.
        layers: False: without its decoder layers, see `loading.load_target`.

    Raises:
        ConfigError: neither `target.path` nor `path` names a target, or a key of `target` is not allowed.
    """
    from longtrain.targets import loading

    asked = cfg.target
    target = loading.load_target(
        asked.required_path(path),
        dtype=asked.dtype,
        device=device or asked.device_here(),
        weights=asked.weights,
        seed=cfg.seed,
        shard=asked.shard if training else None,
        layers=layers,
        **asked.overrides,
    )
    usual = target.device.type == "cuda" and target.shards is None
    fused = usual if asked.fused == AUTO else asked.fused
    return target.fuse() if fuse and fused else target


def load_artifact(name: str, cfg: RunConfig) -> Artifact:
    """Load an artifact, or another tool's folder in its place, following `home`, `trained_by` and
    `unverified`.

    With `unverified`, a failed check is recorded in `Artifact.verified` instead of raised, now and when it is
    attached.

    Raises:
        ArtifactError: it does not exist, or is damaged.
    """
    from longtrain.artifact import Artifact

    return Artifact.load(name, home=cfg.home, trained_by=cfg.trained_by, unverified=cfg.unverified)


def systems_of(cfg: RunConfig) -> tuple[list[Entry], dict[str, Artifact]]:
    """The entries of `suite.systems`, with `artifact=` and an untrained `method=` before them.

    Returns:
        The entries, and all artifacts that they name.

    Raises:
        ConfigError: an entry is wrong.
        ArtifactError: an artifact does not exist, or is damaged.
    """
    from longtrain.systems.system import check_methods, parse, parse_all

    named = [parse({"artifact": name}) for name in cfg.artifacts]
    if cfg.method is not None and cfg.method.spec.objective is None and not named:
        named.append(parse({"method": dict(cfg.method.values)}))
    listed = parse_all(cfg.suite.systems or [])
    check_methods(listed)
    wanted = dict.fromkeys(name for entry in [*named, *listed] for name in entry.artifacts)
    artifacts = {name: load_artifact(name, cfg) for name in wanted}
    if cfg.select:
        named = _choosing(named, cfg.select, artifacts)
    return [*named, *(entry for entry in listed if entry not in named)], artifacts


def _choosing(
    entries: Sequence[Entry], chosen: Mapping[str, Any], artifacts: Mapping[str, Artifact]
) -> list[Entry]:
    """Apply the keys of `select` to the entries with a selector.

    Raises:
        ConfigError: no entry has a selector.
    """
    from longtrain import methods

    def chooses(entry: Entry) -> bool:
        name = entry.method.name if entry.method else artifacts[entry.artifacts[0]].method
        return "every" in methods.get(name).inference_keys

    if not any(map(chooses, entries)):
        key, value = next(iter(chosen.items()))
        raise ConfigError(
            f"select.{key}={value} and neither artifact= nor method= selects entries; systems in "
            f"suite.systems have it as a key: {{artifact: NAME, {key}: {value}}}"
        )
    return [
        replace(entry, options={**entry.options, **chosen}) if chooses(entry) else entry for entry in entries
    ]


def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor], where: str, advice: str) -> None:
    """Load trained tensors into a module.

    Raises:
        ArtifactError: the tensors do not match the module that the configuration describes.
    """
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ArtifactError(
            f"{where} does not fit the module that the configuration describes: {reason}; {advice}"
        ) from None

"""Shared by several jobs: loading the target and the artifacts that a configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from longtrain.errors import ArtifactError
from longtrain.settings import AUTO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from longtrain.artifact import Artifact
    from longtrain.config import ArtifactSource, TargetConfig
    from longtrain.targets.model import Target


NO_CUDA = (
    "trainer.accelerator={}, and torch sees no CUDA device here; with a target that is small enough for a "
    "CPU pass trainer=cpu"
)


def load_target(
    asked: TargetConfig,
    *,
    seed: int,
    device: str | None = None,
    path: str | None = None,
    fuse: bool = True,
    training: bool = False,
    layers: bool = True,
) -> Target:
    """Load the frozen target of the group `target`.

    Args:
        asked: the group `target`.
        seed: the seed of random weights (`target.weights=random`).
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

    target = loading.load_target(
        asked.required_path(path),
        dtype=asked.dtype,
        device=device or asked.device_here(),
        weights=asked.weights,
        seed=seed,
        shard=asked.shard if training else None,
        layers=layers,
        **asked.overrides,
    )
    usual = target.device.type == "cuda" and target.shards is None and target.family.fused
    fused = usual if asked.fused == AUTO else asked.fused
    return target.fuse() if fuse and fused else target


def load_artifact(name: str, source: ArtifactSource) -> Artifact:
    """Load an artifact, or another tool's folder in its place.

    With `source.unverified`, a failed check is recorded in `Artifact.verified` instead of raised, now and
    when it is attached.

    Raises:
        ArtifactError: it does not exist, or is damaged.
    """
    from longtrain.artifact import Artifact

    return Artifact.load(name, home=source.home, trained_by=source.trained_by, unverified=source.unverified)


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

"""The typed configuration of a job: `run.RunConfig` and the groups it consists of."""

from longtrain.config.groups import (
    NO_TARGET,
    ArtifactSource,
    DecodeConfig,
    EvictConfig,
    HarnessKeys,
    MethodChoice,
    SuiteConfig,
    TargetConfig,
)
from longtrain.config.job_keys import MERGE, GenerateKeys
from longtrain.config.run import RunConfig

__all__ = [
    "MERGE",
    "NO_TARGET",
    "ArtifactSource",
    "DecodeConfig",
    "EvictConfig",
    "GenerateKeys",
    "HarnessKeys",
    "MethodChoice",
    "RunConfig",
    "SuiteConfig",
    "TargetConfig",
]

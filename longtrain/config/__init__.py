"""The typed configuration of a job: `run.RunConfig` and the groups it consists of."""

from longtrain.config.groups import NO_TARGET, DecodeConfig, HarnessKeys, MethodChoice, TargetConfig
from longtrain.config.job_keys import MERGE, GenerateKeys
from longtrain.config.run import RunConfig

__all__ = [
    "MERGE",
    "NO_TARGET",
    "DecodeConfig",
    "GenerateKeys",
    "HarnessKeys",
    "MethodChoice",
    "RunConfig",
    "TargetConfig",
]

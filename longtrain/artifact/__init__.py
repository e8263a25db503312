"""Artifacts: exported modules that name their method and target, and are verified when loaded."""

from longtrain.artifact.folder import Artifact
from longtrain.artifact.golden import Golden

__all__ = ["Artifact", "Golden"]

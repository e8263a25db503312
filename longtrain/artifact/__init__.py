"""The exported unit: a folder that names its method and target, and proves that it is read as written."""

from longtrain.artifact.folder import Artifact
from longtrain.artifact.golden import Golden
from longtrain.artifact.golden_scores import ScoreGolden

__all__ = ["Artifact", "Golden", "ScoreGolden"]

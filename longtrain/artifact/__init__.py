"""The exported unit: a folder that names its method and target, and proves that it is read as written."""

from longtrain.artifact.folder import Artifact
from longtrain.artifact.golden_laws import DraftGolden
from longtrain.artifact.golden_scores import ScoreGolden

__all__ = ["Artifact", "DraftGolden", "ScoreGolden"]

"""Golden outputs: what a module computes for a fixed prompt, recorded at export and compared at load."""

from longtrain.artifact.golden.kinds import KINDS, Attach, Kind
from longtrain.artifact.golden.outputs import Golden, States

__all__ = ["KINDS", "Attach", "Golden", "Kind", "States"]

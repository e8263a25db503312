"""The former names of `bench.clock`."""

from longtrain.bench.clock import Timing as Run
from longtrain.bench.clock import cold as short
from longtrain.bench.clock import copy_bytes_per_s, release, rounds, summary, versus
from longtrain.bench.clock import timed as run

__all__ = ["Run", "copy_bytes_per_s", "release", "rounds", "run", "short", "summary", "versus"]

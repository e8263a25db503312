"""The former names of `bench.clock`."""

from longtrain.bench.clock import copies_of, read_bytes_per_s, replayed

__all__ = ["copies_of", "read_bytes_per_s", "replayed"]

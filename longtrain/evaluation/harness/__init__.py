"""The harness of `longtrain eval`: planned, resumable, sharded, and pinned to its protocol."""

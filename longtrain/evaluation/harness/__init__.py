"""The harness of `longtrain eval`: deterministic batches, resumable, in parts, with a hashed protocol."""

"""A low-dimensional indexer: each layer scores KV entries by projections of its own queries and keys."""

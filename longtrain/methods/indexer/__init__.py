"""A low-dimensional indexer: each layer scores rows by projections of its own queries and keys."""

"""LongSpec: a one-layer draft of constant memory that cross-attends to the target's own KV cache."""

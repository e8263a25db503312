"""The target's layers that EAGLE-3 reads by default; imports no torch."""

from __future__ import annotations


def feature_layers(n_layers: int) -> tuple[int, ...]:
    """Return the layers whose outputs are read (0-based), lowest first.

    Source: the authors' code reads the inputs of layers 2, N // 2 and N - 3, which are the outputs of those
        before.
    Note: for fewer than 8 layers these coincide; three evenly spread layers are taken instead.
    """
    if n_layers >= 8:
        return (1, n_layers // 2 - 1, n_layers - 4)
    return tuple(sorted({0, (n_layers - 1) // 2, max(n_layers - 2, 0)}))

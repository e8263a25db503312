"""Settings of a toy draft; it stands for a second tree draft that somebody adds. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Config:
    """A draft that reads three hidden states of the target and the tokens above a node."""

    layers: list[int] | None = None  # layers whose outputs are read; null: the first, the middle and the last
    width: int = 64  # hidden size of the draft


def layers_of(config: Config, n_layers: int) -> tuple[int, ...]:
    """The layers whose outputs are read; -1 is the LM head's input."""
    return tuple(config.layers) if config.layers is not None else (0, n_layers // 2, -1)

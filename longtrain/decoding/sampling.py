"""How the next token is drawn: one set of processors for target and draft, and coins that do not depend on the batch.

Shapes: B batch, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from longtrain.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """Temperature, top-p and top-k, applied to target and draft alike. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"temperature={self.temperature} is negative; allowed: 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p}; allowed: above 0, up to 1")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k}; allowed: 0 (off) or a count")

    @property
    def greedy(self) -> bool:
        """Whether the next token is the argmax."""
        return self.temperature == 0


class Coins(Protocol):
    """All randomness of decoding. A test replaces it to enumerate every outcome of the code that ships."""

    def below(self, prob_B: Tensor, pos_B: Tensor, role: str) -> Tensor:
        """True with probability `prob_B` (clamped to [0, 1]); bool_B. `pos_B`: absolute position decided about."""

    def draw(self, weight_BV: Tensor, pos_B: Tensor, role: str) -> Tensor:
        """An index with probability proportional to `weight_BV` (>= 0, any positive sum); int64_B."""

"""What goes into a target forward and what comes out of it.

Shapes: B batch, T new tokens, E hidden dim, V vocabulary, G KV heads, H query heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from longtrain.cache.base import Causal, Mask
from longtrain.errors import DataError
from longtrain.losses import TopLaw


@dataclass(frozen=True)
class Rows:
    """The new rows of one forward: token ids or embeddings, their positions and who sees whom.

    Args:
        ids_BT: token ids, int64, or None when `embeds_BTE` is given.
        pos_BT: absolute rotary positions, int64. Slot in the cache and position are separate things.
        embeds_BTE: input embeddings instead of ids.
        mask: visibility among the new rows; every row sees the whole committed prefix of its sequence.
        n_B: valid rows of each sequence when the batch is right-padded; None: all T.

    Raises:
        DataError: neither or both of ids and embeddings are given.
    """

    pos_BT: Tensor
    ids_BT: Tensor | None = None
    embeds_BTE: Tensor | None = None
    mask: Mask = field(default_factory=Causal)
    n_B: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.ids_BT is None) == (self.embeds_BTE is None):
            raise DataError("Rows needs either ids_BT or embeds_BTE, and not both")

    def embeds(self, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Their embeddings [B, T, E]."""
        if self.embeds_BTE is not None:
            return self.embeds_BTE
        assert self.ids_BT is not None
        return embed(self.ids_BT)


@dataclass(frozen=True)
class Want:
    """What the caller needs back; anything not asked for is not computed.

    Args:
        logits: the logits of every row, of the last valid row of each sequence, or none. A packed row has
            none.
        hidden: layers whose *output* is wanted (0-based); -1 is the final normed hidden state (the
            LM head's input).
        stop_at_layer: run no further than this layer's K and V (its attention and MLP are skipped).
        kv: layers whose K and V are wanted (0-based) of a packed row; other forwards write theirs to a cache.
    """

    logits: Literal["all", "last", "none"] = "last"
    hidden: tuple[int, ...] = ()
    stop_at_layer: int | None = None
    kv: tuple[int, ...] = ()


@dataclass(frozen=True)
class TargetStep:
    """What a forward gave: `logits_BTV` (T=1 for `last`), and `hidden[layer]` as [B, T, E]."""

    logits_BTV: Tensor | None = None
    hidden: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PackedStep:
    """What `Target.packed` gave for one packed row of T tokens.

    Args:
        hidden: `hidden[layer]` is a wanted layer's output [T, E]; -1 is the LM head's input.
        kv: `kv[layer]` is a wanted layer's (k_TGD, v_TGD); K is after RoPE (and k_norm).
        top: the target's law of the next token in the place of `hidden[-1]`, where stored features are lean
            and the objective says that it can do with this (`Objective.reads_top_law`).
    """

    hidden: dict[int, Tensor] = field(default_factory=dict)
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    top: TopLaw | None = None

"""Inputs and outputs of a target's forward.

Shapes: B batch, T new tokens, E hidden dim, V vocabulary, G KV heads, H query heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from longtrain.cache.base import Causal, Mask
from longtrain.errors import ConfigError, refusal
from longtrain.losses import TopTokens


@dataclass(frozen=True)
class TokenBatch:
    """The new tokens of one forward: ids or embeddings, positions, and visibility among them.

    Args:
        ids_BT: token ids, int64, or None when `embeds_BTE` is given.
        pos_BT: absolute rotary positions, int64; a token's place in the cache may be another.
        embeds_BTE: input embeddings instead of ids.
        mask: visibility among the new tokens; every one sees the whole committed prefix of its sequence.
        n_B: valid tokens of each sequence when the batch is right-padded; None: all T.
    """

    pos_BT: Tensor
    ids_BT: Tensor | None = None
    embeds_BTE: Tensor | None = None
    mask: Mask = field(default_factory=Causal)
    n_B: Tensor | None = None

    def embeds(self, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the embeddings [B, T, E]."""
        if self.embeds_BTE is not None:
            return self.embeds_BTE
        assert self.ids_BT is not None
        return embed(self.ids_BT)


@dataclass(frozen=True)
class OutputRequest:
    """The outputs that a caller requests of a forward; nothing else is computed.

    Args:
        logits: the logits of every token, of the last valid token of each sequence, or none. A packed
            sequence has none.
        hidden: layers whose *output* is returned (0-based); -1 is the final normed hidden state (the
            LM head's input).
        stop_at_layer: run no further than this layer's K and V (its attention and MLP are skipped).
        kv: layers whose K and V are returned (0-based), of a packed sequence; other forwards write them to a
            cache.
    """

    logits: Literal["all", "last", "none"] = "last"
    hidden: tuple[int, ...] = ()
    stop_at_layer: int | None = None
    kv: tuple[int, ...] = ()

    def check(self, n_layers: int, *, packed: bool = False) -> None:
        """Refuse outputs that a target of `n_layers` layers, or a packed forward, does not have.

        Raises:
            ConfigError: there are no such outputs.
        """
        n, stop = n_layers, self.stop_at_layer
        layers = [*self.kv, *(layer for layer in self.hidden if layer != -1)]
        late = [layer for layer in self.hidden if layer in (-1, stop)] if stop is not None else []
        if stop is not None:
            late += [layer for layer in layers if layer > stop]
            layers.append(stop)
        if any(not 0 <= layer < n for layer in layers):
            allowed = f"layers 0..{n - 1} of a target with {n} (hidden: -1 too)"
        elif stop is not None and (self.logits != "none" or late):
            allowed = f"logits='none', hidden states of layers below {stop}, and K and V up to {stop}"
        elif packed and self.logits != "none":
            allowed = "logits='none' of a packed row; call Target.head on its hidden[-1]"
        elif self.kv and not packed:
            allowed = "kv of a packed row only; other forwards write K and V to their cache"
        else:
            return
        raise refusal(ConfigError, f"{self}", f"{allowed}")


@dataclass(frozen=True)
class TargetStep:
    """Outputs of a forward: `logits_BTV` (T=1 for `last`), and `hidden[layer]` as [B, T, E]."""

    logits_BTV: Tensor | None = None
    hidden: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PackedStep:
    """Outputs of `Target.packed` for one packed sequence of T tokens.

    Args:
        hidden: `hidden[layer]` is a requested layer's output [T, E]; -1 is the LM head's input.
        kv: `kv[layer]` is a requested layer's (k_TGD, v_TGD); K is after RoPE (and k_norm).
        top: the target's next-token distribution instead of `hidden[-1]`, if only that is stored and the
            objective accepts it (`Objective.reads_top_tokens`).
    """

    hidden: dict[int, Tensor] = field(default_factory=dict)
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    top: TopTokens | None = None

"""The DSpark draft for inference (`methods.draft_layer`): equal to `DSparkDraft` up to rounding.

Shapes: N tokens of all sequences together, B batch, R rows of a block, K slots, E hidden dim, H query heads,
D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from longtrain.kernels.fused_layer import Rotation, RowPositions, Slots, enter_rows
from longtrain.methods.draft_layer import JoinedLayer, normed

if TYPE_CHECKING:
    from longtrain.methods.dspark.modules import DSparkDraft


class FusedDSpark:
    """A DSpark draft with concatenated weights.

    Args:
        draft: its weights become views of the concatenated ones, unless they are being trained.
    """

    def __init__(self, draft: DSparkDraft) -> None:
        self.draft = draft
        self.blocks = [draft.block_layer(i) for i in range(len(draft.layers))]
        self.layers = [JoinedLayer(block.self_attn, block.mlp) for block in self.blocks]
        self.fc = self.layers[0].dense(draft.fc)
        self.head = None if draft.lm_head is None else self.layers[0].dense(draft.lm_head)
        """The draft's own LM head; None: the target's."""

    def holds(self) -> bool:
        """Return True if the concatenated weights are still the draft's (`JoinedLayer.holds`)."""
        return all(layer.holds() for layer in self.layers)

    def renew(self) -> None:
        """Copy the current values of weights that are being trained."""
        for layer in self.layers:
            layer.renew()

    def context(self, states: Sequence[Tensor]) -> Tensor:
        """Combine the target's hidden states of the layers read, each [N, E], into c, [N, E]."""
        return normed(self.fc(self.draft.joined(states)), self.draft.hidden_norm)

    def block(
        self,
        ids_BR: Tensor,
        table_VE: Tensor,
        at: RowPositions,
        rotation: Rotation,
        slots: Callable[[int], Slots],
        attend: Callable[[int, Tensor], Tensor],
        *,
        embed_scale: float,
    ) -> Tensor:
        """Return the head's input of the rows that predict, [B, K, E].

        Args:
            ids_BR: the anchor and masks.
            table_VE: embeddings.
            at: positions of the rows.
            rotation: the draft's rotary embedding.
            slots: layer -> buffer positions of the block's keys and values.
            attend: (layer, queries [B, R, H, D]) -> attention output of that shape.
            embed_scale: factor on the embeddings.
        """
        norm = self.blocks[0].input_layernorm
        z_NE, x_NE, rope = enter_rows(
            ids_BR, table_VE, (norm.weight, norm.eps), at, rotation, embed_scale=embed_scale
        )
        for index, (layer, block) in enumerate(zip(self.layers, self.blocks, strict=True)):
            if index:
                x_NE = normed(z_NE, block.input_layernorm)
            q_NHD = layer.query(x_NE, rope, slots(index))
            mixed_BRHD = attend(index, q_NHD.unflatten(0, ids_BR.shape))
            z_NE = layer.out(mixed_BRHD.reshape(len(z_NE), -1), z_NE)
            z_NE = layer.plus_mlp(z_NE, block.post_attention_layernorm)
        return normed(z_NE, self.draft.norm).unflatten(0, ids_BR.shape)[:, self.draft.first :]

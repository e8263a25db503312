"""The DSpark draft for inference (`methods.draft_layer`): equal to `DSparkDraft` up to rounding.

Shapes: N tokens of all sequences together, B batch, R rows of a block, K slots, E hidden dim, H query heads,
D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from longtrain.kernels.fused_layer import Rotation, RowPositions, Slots, enter_rows
from longtrain.methods.draft_layer import JoinedLayer, normed
from longtrain.methods.dspark.conv import BlockConv
from longtrain.targets.fused import Dense

if TYPE_CHECKING:
    from longtrain.methods.dspark.modules import DSparkDraft


class JoinedConv(NamedTuple):
    """The convolutions around a sublayer, over the rows of all blocks together (`conv.BlockConv`)."""

    conv: BlockConv
    projection: Dense

    def enter(self, x_NE: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Return the sublayer's input, [N, E], and the kernels for its output; `shape` is [B, R]."""
        dynamic_BRX = self.projection(x_NE).unflatten(0, shape)
        inner_BRE, dynamic = self.conv(x_NE.unflatten(0, shape), dynamic_BRX)
        return inner_BRE.flatten(0, 1), dynamic

    def leave(self, y_NE: Tensor, dynamic_BROG: Tensor) -> Tensor:
        """Return the sublayer's output, [N, E]."""
        return self.conv.finish(y_NE.unflatten(0, dynamic_BROG.shape[:2]), dynamic_BROG).flatten(0, 1)


class FusedDSpark:
    """A DSpark draft with concatenated weights.

    Args:
        draft: its weights become views of the concatenated ones, unless they are being trained.
    """

    def __init__(self, draft: DSparkDraft) -> None:
        self.draft = draft
        self.blocks = [draft.block_layer(i) for i in range(len(draft.layers))]
        self.layers = [JoinedLayer(block.self_attn, block.mlp) for block in self.blocks]
        dense, pairs = self.layers[0].dense, [(block.attention_conv, block.mlp_conv) for block in self.blocks]
        self.convs = [
            [JoinedConv(conv, dense(conv.kernel_projection)) for conv in pair if conv is not None]
            for pair in pairs
        ]
        """For each layer the convolutions around its attention and around its MLP, if it has them."""
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
            convs, dynamic = self.convs[index], None
            if convs:
                x_NE, dynamic = convs[0].enter(x_NE, ids_BR.shape)
            q_NHD = layer.query(x_NE, rope, slots(index))
            mixed_NX = attend(index, q_NHD.unflatten(0, ids_BR.shape)).reshape(len(z_NE), -1)
            if dynamic is None:
                z_NE = layer.out(mixed_NX, z_NE)
                z_NE = layer.plus_mlp(z_NE, block.post_attention_layernorm)
                continue
            z_NE = z_NE + convs[0].leave(layer.out(mixed_NX), dynamic)
            x_NE, dynamic = convs[1].enter(normed(z_NE, block.post_attention_layernorm), ids_BR.shape)
            z_NE = z_NE + convs[1].leave(layer.down(layer.gate_up.swiglu(x_NE)), dynamic)
        return normed(z_NE, self.draft.norm).unflatten(0, ids_BR.shape)[:, self.draft.first :]

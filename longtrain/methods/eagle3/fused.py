"""The EAGLE-3 draft for inference (`methods.draft_layer`): equal to `Eagle3Draft` up to rounding.

Shapes: N tokens or tree nodes of all sequences together, E hidden dim, H query heads, D head dim, K tokens of
the draft's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.kernels.fused_layer import Rotation, RowPositions, enter_rows
from longtrain.methods.draft_layer import JoinedLayer, normed

if TYPE_CHECKING:
    from longtrain.layers import Rope
    from longtrain.methods.eagle3.modules import Eagle3Draft


class FusedEagle3(JoinedLayer):
    """An EAGLE-3 draft with concatenated weights.

    Args:
        draft: its weights become views of the concatenated ones, unless they are being trained.
    """

    def __init__(self, draft: Eagle3Draft) -> None:
        super().__init__(draft.self_attn, draft.mlp)
        self.draft = draft
        self.fc, self.head = self.dense(draft.fc), self.dense(draft.lm_head)

    def feature(self, states: Sequence[Tensor]) -> Tensor:
        """Combine the target's hidden states, each [N, E], into one feature [N, E]."""
        draft = self.draft
        if draft.fc_norm is not None:
            states = [normed(state, norm) for state, norm in zip(states, draft.fc_norm, strict=True)]  # type: ignore[arg-type]
        whole = states[0] if len(states) == 1 else torch.cat(tuple(states), dim=-1)
        return self.fc(whole if draft.input_norm is None else normed(whole, draft.input_norm))

    def enter(
        self,
        ids_BT: Tensor,
        table_VE: Tensor,
        feature_NE: Tensor,
        at: RowPositions,
        rotation: Rotation,
        path_BT: Tensor | None = None,
        embed_scale: float = 1.0,
    ) -> tuple[Tensor, Tensor, Rope]:
        """Return the attention's input [N, 2E], the residual stream [N, E], and the positions' cos and sin.

        Args:
            ids_BT: the token that follows each position.
            table_VE: embeddings.
            feature_NE: feature of each position.
            at: the positions.
            rotation: the draft's rotary embedding.
            path_BT: index into `ids_BT` for each position; None: position t reads the t-th.
            embed_scale: factor on the embeddings.
        """
        draft, E = self.draft, feature_NE.shape[-1]
        # [embedding ; feature], each normed, as the attention's input of 2E
        entry = feature_NE.new_empty(len(feature_NE), 2 * E)
        norm = draft.input_layernorm.weight, draft.input_layernorm.eps
        *_, rope = enter_rows(
            ids_BT,
            table_VE,
            norm,
            at,
            rotation,
            path_BT=path_BT,
            normed_NE=entry[:, :E],
            embed_scale=embed_scale,
        )
        feature_normed = normed(feature_NE, draft.hidden_norm, into=entry[:, E:])
        return entry, feature_normed if draft.norm_before_residual else feature_NE, rope

    def after_attention(self, residual_NE: Tensor, mixed_NX: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the layer after its attention; return the LM head's input and the next depth's feature.

        Args:
            residual_NE: the residual stream from `enter`.
            mixed_NX: attention output, heads concatenated.
        """
        draft = self.draft
        x_NE = self.plus_mlp(self.out(mixed_NX, residual_NE), draft.post_attention_layernorm)
        out_NE = normed(x_NE, draft.norm)
        return out_NE, out_NE if draft.norm_output else x_NE

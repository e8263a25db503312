"""The draft as it runs when drafting (`methods.draft_layer`).

The same function as `Eagle3Draft` up to rounding.
Shapes: N rows (nodes or tokens, all sequences' together), E hidden dim, H query heads, D head dim, K tokens
of the draft's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.methods.draft_layer import JoinedLayer, normed

if TYPE_CHECKING:
    from longtrain.methods.eagle3.modules import Eagle3Draft


class FusedEagle3(JoinedLayer):
    """A draft's weights, joined as they are now.

    Args:
        draft: keeps views of the joined weights; left as it is where it is being trained.
    """

    def __init__(self, draft: Eagle3Draft) -> None:
        super().__init__(draft.self_attn, draft.mlp)
        self.draft = draft
        self.fc, self.head = self.dense(draft.fc), self.dense(draft.lm_head)

    def feature(self, states: Sequence[Tensor]) -> Tensor:
        """The target's states, each [N, E], as one feature [N, E]."""
        draft = self.draft
        if draft.fc_norm is not None:
            states = [normed(state, norm) for state, norm in zip(states, draft.fc_norm, strict=True)]  # type: ignore[arg-type]
        whole = torch.cat(tuple(states), dim=-1)
        return self.fc(whole if draft.input_norm is None else normed(whole, draft.input_norm))

    def enter(self, embed_NE: Tensor, feature_NE: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention reads [N, 2E], and the residual stream [N, E]."""
        draft = self.draft
        feature_normed = normed(feature_NE, draft.hidden_norm)
        entry = torch.cat((normed(embed_NE, draft.input_layernorm), feature_normed), dim=-1)
        return entry, feature_normed if draft.norm_before_residual else feature_NE

    def after_attention(self, residual_NE: Tensor, mixed_NX: Tensor) -> tuple[Tensor, Tensor]:
        """The layer from the attention's result on: the LM head's input, and the next depth's feature.

        Args:
            residual_NE: the stream that `enter` gave.
            mixed_NX: what the attention gathered, heads side by side.
        """
        draft = self.draft
        x_NE = self.plus_mlp(self.out(mixed_NX, residual_NE), draft.post_attention_layernorm)
        out_NE = normed(x_NE, draft.norm)
        return out_NE, out_NE if draft.norm_output else x_NE

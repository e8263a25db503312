"""The draft's layer as it runs when drafting (`methods.draft_layer`).

The same function as `LongSpecDraft` up to rounding. Rows are nodes or tokens, all sequences' together.
Shapes: N rows, E hidden dim, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from longtrain.kernels.fused_layer import rotate_heads
from longtrain.methods.draft_layer import JoinedLayer, head_norms, normed

if TYPE_CHECKING:
    from longtrain.layers import Rope
    from longtrain.methods.longspec.modules import LongSpecDraft


class FusedDraft(JoinedLayer):
    """A draft's weights, joined as they are now.

    Args:
        draft: keeps views of the joined weights; left as it is where it is being trained.
    """

    def __init__(self, draft: LongSpecDraft) -> None:
        super().__init__(draft.self_attn, draft.mlp)
        self.draft, cross = draft, draft.cross_attn
        self.cross = None if cross is None else (self.dense(cross.q_proj), self.dense(cross.o_proj))

    def after_own(
        self, x_NE: Tensor, mixed_NX: Tensor, rope: Rope, read: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The layer from the self-attention's result on: the LM head's input, [N, E].

        Args:
            x_NE: embeddings.
            mixed_NX: what the self-attention gathered, heads side by side.
            rope: cos and sin of the same rows.
            read: queries [N, H, D] -> what they gather from the target's cache, heads side by side.
        """
        draft = self.draft
        x_NE = self.out(mixed_NX, x_NE)
        if self.cross is not None and draft.cross_attn is not None:
            query, out = self.cross
            assert draft.post_self_attention_layernorm is not None
            q_NX = query(normed(x_NE, draft.post_self_attention_layernorm))
            norms, eps = head_norms(draft.cross_attn)
            x_NE = out(read(rotate_heads(q_NX, rope, (self.heads[0], 0), norms=norms, eps=eps)[0]), x_NE)
        x_NE = self.plus_mlp(x_NE, draft.post_cross_attention_layernorm)
        return x_NE if draft.norm is None else normed(x_NE, draft.norm)

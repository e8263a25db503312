"""The LongSpec draft's layer for inference (`methods.draft_layer`): equal to `LongSpecDraft` up to rounding.

Shapes: N tokens or tree nodes of all sequences together, E hidden dim, H query heads, G KV heads, D head dim.
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
    """A LongSpec draft with concatenated weights.

    Args:
        draft: its weights become views of the concatenated ones, unless they are being trained.
    """

    def __init__(self, draft: LongSpecDraft) -> None:
        super().__init__(draft.self_attn, draft.mlp)
        self.draft, cross = draft, draft.cross_attn
        self.cross = None if cross is None else (self.dense(cross.q_proj), self.dense(cross.o_proj))

    def after_own(
        self, x_NE: Tensor, mixed_NX: Tensor, rope: Rope, read: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Compute the layer after its self-attention; return the LM head's input, [N, E].

        Args:
            x_NE: embeddings.
            mixed_NX: output of the self-attention, heads concatenated.
            rope: cos and sin of the same positions.
            read: queries [N, H, D] -> attention output over the target's cache, heads concatenated.
        """
        draft = self.draft
        x_NE = self.out(mixed_NX, x_NE)
        if self.cross is not None and draft.cross_attn is not None:
            query, out = self.cross
            assert draft.post_self_attention_layernorm is not None
            q_NX = query(normed(x_NE, draft.post_self_attention_layernorm))
            norms, eps = head_norms(draft.cross_attn)
            heads, neighbours = (self.heads[0], 0), draft.cross_attn.neighbours
            q_NHD = rotate_heads(q_NX, rope, heads, norms=norms, eps=eps, neighbours=neighbours)[0]
            x_NE = out(read(q_NHD), x_NE)
        x_NE = self.plus_mlp(x_NE, draft.post_cross_attention_layernorm)
        return x_NE if draft.norm is None else normed(x_NE, draft.norm)

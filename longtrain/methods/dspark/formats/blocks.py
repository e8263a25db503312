"""Computes blocks over given states in plain torch, as they were trained and as engines serve them.

Shapes: T tokens before blocks, A blocks, R rows of a block, K slots, E hidden dim, H query heads, G KV heads,
D head dim, C tokens before blocks and rows of one together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.modules import DSparkDraft
from longtrain.methods.rope import rotary_of

if TYPE_CHECKING:
    from longtrain.targets.info import TargetInfo


def block_states(
    module: DSparkDraft,
    config: Config,
    info: TargetInfo,
    states_TN: Tensor,
    pos_T: Tensor,
    place_A: Tensor,
    embed_ARE: Tensor,
    *,
    less: int | None = None,
) -> Tensor:
    """Return the head's input of all slots, [A, K, E].

    Args:
        module: the draft, in fp32 on the CPU.
        config: hyperparameters.
        info: the target.
        states_TN: the target's states of all read layers, concatenated.
        pos_T: positions of these tokens, ascending.
        place_A: position of each block's anchor; a block sees the tokens before it.
        embed_ARE: embeddings of its rows.
        less: None: windows as they were trained, the same for all slots of a block. A number: as engines
            serve them, which move a window with the slot, count the block's rows in it, and take it for so
            many tokens less.
    """
    rotary = rotary_of(config, info)
    keys = module.keys_values(module.context(states_TN.chunk(len(module.read), -1)), rotary(pos_T))
    row_R = torch.arange(config.rows)
    at_AR = place_A[:, None] + row_R
    before_A1T = pos_T < place_A[:, None, None]

    def sees(window: int | None) -> Tensor:
        """[A, R, T + R]: what each row attends to."""
        context_ART = before_A1T.expand(-1, config.rows, -1)
        block_RR = torch.ones(config.rows, config.rows, dtype=torch.bool)
        if window is not None and less is None:
            context_ART = context_ART & (pos_T >= place_A[:, None, None] - window)
        elif window is not None and less is not None:
            context_ART = context_ART & (pos_T >= at_AR[:, :, None] - (window - less))
            block_RR = (row_R[:, None] - row_R).abs() <= window - less
        return torch.cat((context_ART, block_RR.expand(len(place_A), -1, -1)), -1)

    masks = {window: sees(window)[:, None] for window in set(config.layer_windows)}

    def attend(layer: int, q_ARHD: Tensor, k_ARGD: Tensor, v_ARGD: Tensor) -> Tensor:
        pairs = ((keys[2 * layer], k_ARGD), (keys[2 * layer + 1], v_ARGD))
        k_ACGD, v_ACGD = (
            torch.cat((old_TGD.expand(len(place_A), -1, -1, -1), new_ARGD), 1) for old_TGD, new_ARGD in pairs
        )
        mixed_AHRD = scaled_dot_product_attention(
            q_ARHD.transpose(1, 2),
            k_ACGD.transpose(1, 2),
            v_ACGD.transpose(1, 2),
            attn_mask=masks[config.layer_windows[layer]],
            scale=module.scale,
            enable_gqa=True,
        )
        return mixed_AHRD.transpose(1, 2)

    cos_AR_D, sin_AR_D = rotary(at_AR.flatten())
    rope = (cos_AR_D.unflatten(0, at_AR.shape), sin_AR_D.unflatten(0, at_AR.shape))
    return module.block(embed_ARE, rope, attend)

"""The trained module: a whole Llama, built through the target layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longtrain.methods.pretrain.config import Config
from longtrain.targets.bundle import LlamaShape, build_llama, packed_hidden


class Pretrained(nn.Module):
    """A Llama with tied embeddings and its forward over one packed row.

    Args:
        config: shape and seed of the initial weights.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        shape = LlamaShape(**{key: getattr(config, key) for key in LlamaShape.__dataclass_fields__})
        self.llama = build_llama(shape, seed=config.init_seed)
        if config.compile:
            for layer in self.llama.model.layers:
                layer.mlp.compile(dynamic=False)
                layer.input_layernorm.compile(dynamic=False)
                layer.post_attention_layernorm.compile(dynamic=False)

    @property
    def head_weight(self) -> Tensor:
        """The LM head [V, E], the same tensor as the embeddings."""
        return self.llama.lm_head.weight

    def forward(self, ids_T: Tensor, bounds: tuple[int, ...]) -> Tensor:
        """Final normed hidden states [T, E] of a row of documents, each seeing itself, positions from 0."""
        device = ids_T.device
        starts = torch.tensor(bounds[:-1], dtype=torch.int64).to(device, non_blocking=True)
        sizes = torch.tensor(bounds[1:], dtype=torch.int64).to(device, non_blocking=True) - starts
        pos_T = torch.arange(bounds[-1], device=device)
        pos_T = pos_T - torch.repeat_interleave(starts, sizes, output_size=bounds[-1])
        return packed_hidden(self.llama, ids_T, pos_T, bounds)

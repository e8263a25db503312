"""A whole Llama, and next-token prediction over packed documents with a weight for each label.

Shapes: T tokens of one packed sequence, E hidden dim, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from longtrain.data.packing.batch import Batch
from longtrain.methods.pretrain.config import Config
from longtrain.methods.spec import Loss, Objective
from longtrain.targets.bundle import LlamaShape, build_llama, packed_hidden


class Pretrained(nn.Module):
    """A Llama with tied embeddings and its forward over one packed sequence.

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
        """Return final normed hidden states [T, E] of packed documents, each with positions from 0."""
        device = ids_T.device
        starts = torch.tensor(bounds[:-1], dtype=torch.int64).to(device, non_blocking=True)
        sizes = torch.tensor(bounds[1:], dtype=torch.int64).to(device, non_blocking=True) - starts
        pos_T = torch.arange(bounds[-1], device=device)
        pos_T = pos_T - torch.repeat_interleave(starts, sizes, output_size=bounds[-1])
        return packed_hidden(self.llama, ids_T, pos_T, bounds)


class PretrainObjective(Objective):
    """Weighted cross-entropy of every label, given the tokens before it in its own document.

    Metrics: `text_bits` (bits per token of running text), `value_loss` (nats) and `value_accuracy` over the
    labels that can only come from the context. The weights distinguish the two kinds of label.

    Args:
        module: the model.
        config: the weights of the labels.
    """

    module: Pretrained

    def __init__(self, module: Pretrained, config: Config) -> None:
        super().__init__()
        self.module = module
        self.target = None
        self.value_weight = config.value_weight
        self.text_weight = config.text_weight

    def forward(self, batch: Batch) -> Loss:
        """Return the sum of weighted losses of one packed sequence."""
        hidden_TE = self.module(batch.ids_T, batch.bounds)
        weights_T = (
            batch.loss_mask_T.float() if batch.weights_T is None else batch.weights_T * batch.loss_mask_T
        )
        tokens = int(batch.host_labels.sum())
        labels_T, weights_T = batch.ids_T[1:], weights_T[1:]
        logits_TV = linear(hidden_TE[:-1], self.module.head_weight)
        nll_T = cross_entropy(logits_TV.float(), labels_T, reduction="none")
        total = (nll_T * weights_T).sum()
        with torch.no_grad():
            value_T = (weights_T == self.value_weight).float()
            text_T = (weights_T == self.text_weight).float()
            hit_T = (logits_TV.argmax(-1) == labels_T).float()
            metrics = {
                "text_bits": ((nll_T * text_T).sum() / math.log(2), text_T.sum()),
                "value_loss": ((nll_T * value_T).sum(), value_T.sum()),
                "value_accuracy": ((hit_T * value_T).sum(), value_T.sum()),
            }
        return Loss(total=total, tokens=tokens, metrics=metrics)

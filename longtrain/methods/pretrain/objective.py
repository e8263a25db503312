"""Next-token prediction over packed documents, with a weight for each label.

Shapes: T tokens of one packed row, E hidden dim, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import cross_entropy, linear

from longtrain.data.rows.batch import Batch
from longtrain.methods.pretrain.config import Config
from longtrain.methods.pretrain.modules import Pretrained
from longtrain.methods.spec import Loss, Objective


class PretrainObjective(Objective):
    """Weighted cross-entropy of every label, given the tokens before it in its own document.

    Figures: `text_bits` (bits a token of running text), `value_loss` (nats) and `value_accuracy` over the
    labels that can only come from the context. The two kinds are told apart by their weights.

    Args:
        module: the model.
        config: the weights of the labels.
    """

    def __init__(self, module: Pretrained, config: Config) -> None:
        super().__init__()
        self.module = module
        self.target = None
        self.value_weight = config.value_weight
        self.text_weight = config.text_weight

    def forward(self, batch: Batch) -> Loss:
        """Sum of weighted losses of one packed row."""
        hidden_TE = self.module(batch.ids_T, batch.bounds)
        weights_T = (
            batch.loss_mask_T.float() if batch.weights_T is None else batch.weights_T * batch.loss_mask_T
        )
        on_host_T = batch.loss_mask_T if batch.host_mask_T is None else batch.host_mask_T
        tokens = int(on_host_T.sum())
        labels_T, weights_T = batch.ids_T[1:], weights_T[1:]
        logits_TV = linear(hidden_TE[:-1], self.module.head_weight)
        nll_T = cross_entropy(logits_TV.float(), labels_T, reduction="none")
        total = (nll_T * weights_T).sum()
        with torch.no_grad():
            value_T = (weights_T == self.value_weight).float()
            text_T = (weights_T == self.text_weight).float()
            hit_T = (logits_TV.argmax(-1) == labels_T).float()
            figures = {
                "text_bits": ((nll_T * text_T).sum() / math.log(2), text_T.sum()),
                "value_loss": ((nll_T * value_T).sum(), value_T.sum()),
                "value_accuracy": ((hit_T * value_T).sum(), value_T.sum()),
            }
        return Loss(total=total, tokens=tokens, figures=figures)

"""The KVzap training objective: squared error of the predicted logarithms of KVzip's scores.

Shapes: B contexts together, S positions, L layers, G KV heads, T tokens of a packed sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.decoding.ranking import RECALLS, recall_at
from longtrain.errors import ConfigError
from longtrain.features.target import StoredTarget
from longtrain.methods.kvzap.labels import groups, labelled
from longtrain.methods.samples import samples
from longtrain.methods.spec import Loss, Objective
from longtrain.targets.model import Target

if TYPE_CHECKING:
    from longtrain.data.packing.batch import Batch
    from longtrain.methods.kvzap.config import Config
    from longtrain.methods.kvzap.modules import KVzap
    from longtrain.methods.repetition import RepeatLabels


class KVzapObjective(Objective):
    """Mean squared error over a context's tokens, layers and KV heads.

    A document's context is everything before its response, which is not read. Contexts go through the target
    with the module observing, and once more as their own repetition, which gives the labels; the target runs
    without gradients both times.

    Args:
        module: predicts the scores.
        target: the frozen target.
        config: hyperparameters.

    Raises:
        ConfigError: the target's features are stored.

    Source: KVzap (arXiv 2601.07891) and `kvzap/train.py` of kvpress: MSE on the logarithm of KVzip+ scores.
    Note: kvpress draws 500 tokens of each text; here all of them count, and every context the same.
    """

    per_document = True

    module: KVzap
    target: Target

    def __init__(self, module: KVzap, target: Target, config: Config) -> None:
        super().__init__()
        if isinstance(target, StoredTarget):
            raise ConfigError(
                "method=kvzap has the target repeat each context, which is not stored; pass features=online"
            )
        self.module, self.target, self.config = module, target, config

    def forward(self, batch: Batch) -> Loss:
        """Return the sum over documents with labels of their context's mean squared error.

        Metrics: `loss`; in validation `r2`, over layers, KV heads and contexts, and `recall@K`: the share of
        the entries that KVzip keeps at K a head (all heads of all layers together) that the module keeps too.

        Raises:
            ConfigError: the target has no tokenizer.
            DataError: a response without a context.
        """
        found, device = samples(batch), batch.ids_T.device
        total = torch.zeros((), device=device)
        if not found:
            # a loss of 0 that depends on every parameter, so that DDP's ranks stay synchronised
            nothing = sum((value.sum() * 0 for value in self.module.parameters()), start=total)
            return Loss(nothing, 0, {"loss": (total, total)})
        sums: dict[str, list[Tensor]] = {}
        train = torch.is_grad_enabled()
        with torch.autocast(device.type, enabled=False):
            for group in groups(found, len(batch.ids_T)):
                contexts = [batch.ids_T[one.start : one.prompt] for one in group]
                pred_LBGS, labels = labelled(self.module, self.target, self.config, contexts, train=train)
                total = total + _error(pred_LBGS, labels).sum()
                if not self.training:
                    _take(sums, pred_LBGS, labels)
        pooled = {name: torch.cat(values) for name, values in sums.items()}
        metrics = {name: (values.sum(), total.new_tensor(len(values))) for name, values in pooled.items()}
        metrics["loss"] = (total.detach(), total.new_tensor(len(found)))
        return Loss(total, sum(sample.stop - sample.prompt for sample in found), metrics)


def _error(pred_LBGS: Tensor, labels: RepeatLabels) -> Tensor:
    """Return the mean squared error of each context."""
    square_LBGS = (pred_LBGS - labels.true_LBGS).square() * labels.counts_LBGS
    return square_LBGS.sum((0, 2, 3)) / labels.counts_LBGS.sum((0, 2, 3)).clamp(min=1)


@torch.no_grad()
def _take(sums: dict[str, list[Tensor]], pred_LBGS: Tensor, labels: RepeatLabels) -> None:
    """Append the metrics of some contexts to `sums`, one value for each mean's entry."""
    L, _, G, _ = pred_LBGS.shape
    whole = (pred_LBGS, labels.true_LBGS, labels.counts_LBGS)
    for b, length in enumerate(labels.lengths):
        pred_LGS, true_LGS, counts_LGS = (x[:, b, :, :length] for x in whole)
        n_LG = counts_LGS.sum(-1)
        mean_LG1 = (true_LGS.sum(-1) / n_LG.clamp(min=1))[..., None]
        left_LG = ((pred_LGS - true_LGS).square() * counts_LGS).sum(-1)
        spread_LG = ((true_LGS - mean_LG1).square() * counts_LGS).sum(-1)
        told_LG = spread_LG > 0
        sums.setdefault("r2", []).append((1 - left_LG / spread_LG)[told_LG].double())
        flat = [x.reshape(1, -1) for x in (pred_LGS, true_LGS, counts_LGS)]
        for rows in RECALLS:
            if length > rows:
                found = recall_at(flat[0].to(flat[1].dtype), flat[1], rows * L * G, flat[2])
                sums.setdefault(f"recall@{rows}", []).append(found.double())

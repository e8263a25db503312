"""The LookaheadKV training objective: predicted against true importance, in one prefill and one small pass.

Shapes: T tokens of a packed sequence, P prompts, M lookahead tokens, N = P * M, B batch (1), L layers,
H query heads, X heads of several layers, E hidden dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longtrain.data.packing.packed_sequences import positions, to_device
from longtrain.losses import importance_kl
from longtrain.methods.lookaheadkv.modules import lookahead_tokens_of
from longtrain.methods.lookaheadkv.samples import Truth, prompt_ids
from longtrain.methods.lookaheadkv.validation import WINDOW, Ranking, ranks
from longtrain.methods.samples import Sample, samples
from longtrain.methods.spec import Loss, Objective
from longtrain.targets.step import OutputRequest
from longtrain.targets.suffix import Beside, SuffixRun

if TYPE_CHECKING:
    from longtrain.data.packing.batch import Batch
    from longtrain.methods.lookaheadkv.config import Config
    from longtrain.methods.lookaheadkv.modules import LookaheadKV
    from longtrain.targets.model import Target


_TOGETHER = 2**23
"""Most scores (of several layers) that are compared at once."""


class LookaheadObjective(Objective):
    """KL from the response's attention on the prompt to that of the lookahead tokens.

    Prompt and response go through the target once, without gradients; the lookahead tokens of all documents
    follow as one batch. Gradients flow through those tokens alone, which is exact: what a prompt computes
    does not depend on anything that is trained.

    Args:
        module: the lookahead tokens and their LoRA.
        target: the frozen target.
        config: hyperparameters.

    Source: LookaheadKV §3.2, Eq. 4; Algorithm 1.
    Note: every document counts the same, whatever its length.
    """

    per_document = True

    module: LookaheadKV
    target: Target

    def __init__(self, module: LookaheadKV, target: Target, config: Config) -> None:
        super().__init__()
        self.module, self.target, self.config = module, target, config
        if config.embedding_lr_scale != 1.0:
            self.lr_multipliers = {"lookahead_embeddings": config.embedding_lr_scale}

    def forward(self, batch: Batch) -> Loss:
        """Return the sum over documents with labels of their KL, a mean over layers and query heads.

        Layers with a sliding window do not count.

        Metrics, by document: `loss`; `kl` if the loss has further terms; and in validation those of
        `Ranking`.

        Raises:
            DataError: a response without a prompt.
        """
        found, device = samples(batch), batch.ids_T.device
        if not found:
            return self._nothing(batch)
        with torch.autocast(device.type, enabled=False):
            return self._loss(batch, found)

    def _nothing(self, batch: Batch) -> Loss:
        """Return the loss of a sequence without labels, which is 0.

        A sharded target has to run all the same, since its layers communicate with the other ranks.
        """
        zero = torch.zeros((), device=batch.ids_T.device)
        if self.target.shards is None:
            nothing = sum((value.sum() * 0 for value in self.module.parameters()), start=zero)
        else:
            tokens = len(batch.ids_T)
            with torch.autocast(zero.device.type, enabled=False):
                nothing = self._loss(batch, [Sample(0, tokens - 1, tokens)]).total * 0
        return Loss(nothing, 0, {"loss": (zero, zero)})

    def _loss(self, batch: Batch, found: list[Sample]) -> Loss:
        config, device, info = self.config, batch.ids_T.device, self.target.info
        ranking = None if self.training else Ranking(found, info.n_kv_heads)
        windows = {config.suffix_window} - {0} | ({WINDOW} if ranking else set())
        prompt_T = to_device(prompt_ids(found, len(batch.ids_T)), device)
        mixed_T = None
        if config.suffix_window and any(sample.length > config.suffix_window for sample in found):
            mixed_T = to_device(_longer(found, len(batch.ids_T), config.suffix_window), device)
        divergence = _Divergence(config, prompt_T, len(found))
        keys = [(sample.start, sample.prompt) for sample in found]
        embeds_NE, pos_N, spans = lookahead_tokens_of(self.module, keys, [0] * len(keys), self.target.dtype)
        adapters = self.module.adapters(self.target.dtype)
        rows = SuffixRun(self.target, embeds_NE, to_device(pos_N, device), spans, adapters)
        grads = torch.is_grad_enabled()  # taken here, since the prefill runs without gradients

        def each(layer: int, k_BTGD: Tensor, v_BTGD: Tensor) -> None:
            with torch.set_grad_enabled(grads):
                s_BHT = rows.step(k_BTGD, v_BTGD)
                if s_BHT is None:
                    return
                pred_HT, true_HT = s_BHT.squeeze(0), truth.true[layer]
                if mixed_T is not None:
                    both_HT = (pred_HT + truth.recent[config.suffix_window][layer]) / 2
                    pred_HT = torch.where(mixed_T, both_HT, pred_HT)
                divergence.add(pred_HT, true_HT)
            if ranking is not None:
                seen = truth.recent.get(WINDOW, {})
                ranking.add(pred_HT.detach(), true_HT, [seen[layer]] if seen else [])

        beside = Beside(self.target)
        scale, layers = self.target.scaling(0), info.full_layers
        truth = Truth(found, scale, layers=layers, then=each, beside=beside, windows=windows, device=device)
        # The lookahead tokens follow layer by layer: the host launches their operators while the device is
        # busy.
        self._prefill(batch, truth)
        beside.join()
        kl, narrow = divergence.means()
        documents = torch.full((), len(found), device=device)
        metrics = {} if ranking is None else ranking.metrics()
        total = kl
        if narrow is not None:
            total = kl + config.budget_weight * narrow
            metrics["kl"] = (kl.detach(), documents)
        metrics["loss"] = (total.detach(), documents)
        return Loss(total, sum(sample.stop - sample.prompt for sample in found), metrics)

    @torch.no_grad()
    def _prefill(self, batch: Batch, truth: Truth) -> None:
        """Run prompts and responses through the target, up to K and V of the last layer that has scores."""
        pos_T = to_device(positions(batch.bounds), batch.ids_T.device)
        last = self.target.info.full_layers[-1]
        self.target.packed(
            batch.ids_T, pos_T, batch.bounds, OutputRequest("none", stop_at_layer=last), hook=truth
        )


class _Divergence:
    """Accumulates the KL over layers; short sequences' layers are computed together to save launches."""

    def __init__(self, config: Config, prompt_T: Tensor, prompts: int) -> None:
        self._config, self._prompt_T, self._prompts = config, prompt_T, prompts
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._heads = 0
        self._whole: list[Tensor] = []
        self._narrow: list[Tensor] = []

    def add(self, pred_HT: Tensor, true_HT: Tensor) -> None:
        """Add one layer."""
        self._waiting.append((pred_HT, true_HT))
        if (len(self._waiting) + 1) * pred_HT.numel() > _TOGETHER:
            self._flush()

    def means(self) -> tuple[Tensor, Tensor | None]:
        """Return sums over prompts, means over layers and heads: of all tokens, and of the budgets' best."""
        self._flush()
        whole = torch.stack(self._whole).sum() / self._heads
        if not self._narrow:
            return whole, None
        return whole, torch.stack(self._narrow).sum() / self._heads / len(self._config.budgets)

    def _flush(self) -> None:
        if not self._waiting:
            return
        pred_XT, true_XT = (torch.cat(side) for side in zip(*self._waiting, strict=True))
        self._waiting = []
        heads, about = len(pred_XT), (self._prompt_T, self._prompts)
        self._heads += heads
        self._whole.append(importance_kl(pred_XT, true_XT, *about) * heads)
        if self._config.budgets:
            rank_XT = ranks(true_XT, *about)
            for budget in self._config.budgets:
                best_XT = rank_XT < budget
                narrow = importance_kl(pred_XT * best_XT, true_XT * best_XT, *about)
                self._narrow.append(narrow * heads)


def _longer(found: list[Sample], tokens: int, window: int) -> Tensor:
    """Return a mask of the tokens that belong to a prompt longer than the window, on the host."""
    inside_T = torch.zeros(tokens, dtype=torch.bool)
    for sample in found:
        inside_T[sample.start : sample.prompt] = sample.length > window
    return inside_T

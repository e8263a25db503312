"""Eviction by lookahead tokens: they attend to the prompt's cache, and the best entries of each head stay.

Shapes: L layers, B prompts, M lookahead tokens, N = B * M, S prompt positions, H query heads, G KV heads,
E hidden dim, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from longtrain.data.packing.packed_sequences import to_device
from longtrain.decoding.evict import Budget, Budgeted, Keep, PromptRun
from longtrain.decoding.observe import LastQueries
from longtrain.decoding.select import max_pool, reduce_heads, top, top_adaptive
from longtrain.kernels.importance import importance, own_importance, suffix_lse
from longtrain.methods.lookaheadkv.modules import lookahead_tokens_of
from longtrain.settings import Adaptive
from longtrain.targets.suffix import Beside, SuffixRun

if TYPE_CHECKING:
    from longtrain.methods.lookaheadkv.config import Config
    from longtrain.methods.lookaheadkv.modules import LookaheadKV
    from longtrain.targets.attention import AttentionHook
    from longtrain.targets.model import Target


class LookaheadEvictor(Budgeted):
    """Keeps the KV entries that the lookahead tokens attend to most (`decoding.evict.Evictor`).

    The prompt's own computation is unchanged: the lookahead tokens read its cache and write nothing to it.

    Args:
        module: lookahead tokens and LoRA, in the target's dtype and on its device.
        target: the frozen model.
        config: hyperparameters.
        budget: entries kept of each layer and KV head; on average if budgets are adaptive.
        adaptive: how the budget is shared.
        kernel: width of the max-pool over scores, also for policies that wrap this one (Ada-KV).

    Source: LookaheadKV §3.1, Algorithm 2: no window and no sinks are protected.
    Note: adaptive budgets are not the paper's; scores of each head are then normalised to sum to 1 over the
        prompt.
    """

    name = "lookaheadkv"
    wrappable = True
    any_scale = True
    least_budget = 1

    def __init__(
        self,
        module: LookaheadKV,
        target: Target,
        config: Config,
        budget: Budget,
        *,
        adaptive: Adaptive,
        kernel: int,
    ) -> None:
        self.module, self.target, self.config = module, target, config
        self.budget, self.adaptive, self.kernel = budget, adaptive, kernel
        self.head_reduction: Literal["mean", "max"] = "max" if config.reduction == "max" else "mean"
        with torch.no_grad():
            self.adapters = module.adapters(target.dtype)

    def hook(self, lengths: Sequence[int]) -> AttentionHook | None:
        """Return the observer that runs the lookahead tokens layer by layer; None if every prompt fits."""
        if self.budget.covers(lengths) and not self.config.suffix_window:
            return None
        return LookaheadTokens(self, lengths)

    def select(self, run: PromptRun, scores: Tensor | None = None) -> Keep | None:
        """Choose the entries to keep (see `Evictor`), by `scores` if they are known already."""
        if self.budget.covers(run.lengths):
            return None
        s_LBGS = self.scores(run) if scores is None else scores
        if self.adaptive:
            s_LBGS = s_LBGS / s_LBGS.sum(-1, keepdim=True)
        s_LBGS = max_pool(s_LBGS, run.lengths, kernel=self.kernel)
        if self.adaptive:
            return top_adaptive(s_LBGS, run.lengths, self.budget, across=self.adaptive)
        return top(s_LBGS, run.lengths, self.budget)

    @torch.no_grad()
    def scores(self, run: PromptRun) -> Tensor:
        """Return the importance of every prompt token, s_LBGS in fp32, reduced over query heads, not pooled.

        The lookahead tokens ran along with the prefill if it was observed; else they go through the cache
        now.
        """
        if isinstance(run.watched, LookaheadTokens):
            run.watched.beside.join()
            return torch.stack(run.watched.scores)
        rows, longest = LookaheadTokens(self, run.lengths), max(run.lengths)
        for layer in range(rows.last + 1):
            k_BTGD, v_BTGD = run.cache.prefix(layer)
            rows.step(layer, k_BTGD[:, :longest], v_BTGD[:, :longest])
        return torch.stack(rows.scores)


class LookaheadTokens:
    """Runs the lookahead tokens of a batch of prompts along with the prefill (an `AttentionHook`).

    They pass through layers with a sliding window too, which have no scores.

    Args:
        evictor: the evictor that they belong to.
        lengths: prompt tokens, on the host.
    """

    every_layer = True

    def __init__(self, evictor: LookaheadEvictor, lengths: Sequence[int]) -> None:
        module, target = evictor.module, evictor.target
        self._config, self._scale = evictor.config, target.scaling(0)
        self._heads, self._n_kv_heads = evictor.head_reduction, target.info.n_kv_heads
        window = self._config.suffix_window
        self._recent = LastQueries(lengths, window) if window else None
        keys = [(0, length) for length in lengths]
        with torch.no_grad():
            embeds_NE, pos_N, spans = lookahead_tokens_of(module, keys, range(len(keys)), target.dtype)
            pos_N = to_device(pos_N, embeds_NE.device)
            self._run = SuffixRun(target, embeds_NE, pos_N, spans, evictor.adapters)
        self.last = self._run.last
        self.beside = Beside(target)
        self.scores: list[Tensor] = []
        """s_BGS of the layers so far that see the whole text, fp32, not pooled."""

    @torch.no_grad()
    def __call__(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Process one layer of the prefill."""
        if layer > self.last:
            return
        if self._recent is not None:
            self._recent(layer, q_BHTD, k_BGTD, v_BGTD)
        k_BTGD, v_BTGD = k_BGTD.transpose(1, 2), v_BGTD.transpose(1, 2)
        self.beside.run(lambda: self.step(layer, k_BTGD, v_BTGD), k_BGTD, v_BGTD)

    def step(self, layer: int, k_BTGD: Tensor, v_BTGD: Tensor) -> None:
        """Run the lookahead tokens through the next layer, given the prompts' keys and values."""
        s_BHT = self._run.step(k_BTGD, v_BTGD)
        if s_BHT is None:
            return
        if self._recent is not None:
            s_BHT = self._mixed(self._recent, layer, s_BHT, k_BTGD)
        self.scores.append(reduce_heads(s_BHT, self._n_kv_heads, self._heads))

    def _mixed(self, recent: LastQueries, layer: int, s_BHT: Tensor, k_BTGD: Tensor) -> Tensor:
        """Average the lookahead tokens' scores and the last queries'; short prompts are unchanged.

        Source: LookaheadKV, Appendix E.2 and Table 7.
        """
        spans = recent.spans()
        if not spans:
            return s_BHT
        q_NHD, own_k_NGD = recent.layer(layer)
        lse_NH = suffix_lse(q_NHD, own_k_NGD, k_BTGD, spans, scale=self._scale)
        recent_BHT = importance(q_NHD, lse_NH, k_BTGD, spans, scale=self._scale)
        own_NH = own_importance(q_NHD, own_k_NGD, lse_NH, spans, scale=self._scale)
        mixed_BHT = s_BHT.clone()
        for span in spans:
            (first, last), stop = span.rows, span.keys[1]
            recent_BHT[span.seq, :, stop : stop + last - first] = own_NH[first:last].T
            mixed_BHT[span.seq] = (s_BHT[span.seq] + recent_BHT[span.seq]) / 2
        return mixed_BHT

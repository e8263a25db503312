"""LAQ: a pseudo answer, decoded on a cache that SnapKV has cut, chooses what of the whole cache stays.

Shapes: L layers, B prompts, S prompt slots, T slots of the cache, N observing rows, H query heads,
G KV heads, g query heads of a KV head, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from longtrain.costs.hardware import Gpu
from longtrain.costs.method import PromptShape
from longtrain.costs.model import decode, score
from longtrain.decoding.evict import Keep, PromptRun
from longtrain.decoding.observe import AllQueries, Both, LastQueries, observed
from longtrain.decoding.select import max_pool, top
from longtrain.methods.policies.base import fits
from longtrain.methods.policies.snapkv import SnapKV
from longtrain.settings import Count, CountOrZero, wrong


@dataclass
class LAQ(SnapKV):
    """Lookahead Q-Cache: the queries of `n_tokens` greedy tokens, decoded on an evicted copy, are observers.

    1. SnapKV cuts a copy of the cache to the budget. 2. The copy decodes greedily. 3. Those steps' queries
    score the whole prompt (mean over rows and heads, max-pool) and the best rows stay.
    The scores depend on the budget through the copy. Peak memory is the whole cache and the copy.

    Args:
        window: observers of the first cut.
        n_tokens: tokens of the pseudo answer.
        second_window: LAQ++: so many last rows of the prompt observe together with the pseudo answer, and
            stay; 0: LAQ.
        softmax: which keys the observers' softmax runs over. "answer": the prompt and the pseudo rows up to
            their own, as if these queries were decoded on the whole cache. "prompt": the prompt alone.
            "shifted": the prompt alone; of N observers the i-th, from 1, does not see its last N - i rows.

    Raises:
        ConfigError: a second window larger than the first.

    Source: Lookahead Q-Cache (arXiv 2505.20334), section 3.
    Note: the authors' script (noforit/Lookahead_Q-Cache) is `n_tokens=8 softmax=shifted`, with
        `second_window=8` for LAQ++: it multiplies the observers with the prompt's keys alone and lays the
        causal mask of its window over the last of them. It also repeats the cache for the query heads of a
        KV head, so that each of them keeps rows of its own; here they share them. Every softmax but "answer"
        holds whole rows of attention, in plain torch: it is there to be compared, not to be fast.
    """

    name: ClassVar[str] = "laq"
    scores_depend_on_budget: ClassVar[bool] = True
    n_tokens: Count = 32
    second_window: CountOrZero = 0
    softmax: Literal["answer", "prompt", "shifted"] = "answer"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.second_window > self.window:
            raise wrong("evict.second_window", self.second_window, f"0 to evict.window={self.window}")

    @property
    def least_budget(self) -> int:
        """See `BasePolicy`: the window, which the copy's cut keeps, although the last one need not."""
        return max(1, self.window)

    @property
    def protected(self) -> int:
        """Rows at the end of each prompt that stay whatever their score."""
        return self.second_window

    def extra_rows(self, longest: int) -> int:
        """See `Evictor`: the pseudo answer."""
        return self.n_tokens

    @classmethod
    def first_token(cls, prompt: PromptShape, gpu: Gpu) -> dict[str, float]:
        """See `BasePolicy`: SnapKV's scores, a pseudo answer on the evicted copy, and scores again."""
        seen = score(prompt.size, cls.window, prompt.tokens)
        pseudo = decode(prompt.size, cls.n_tokens, prompt.budget)
        added = [seen, pseudo, seen]
        return {
            "ms": sum(part.ms(gpu) for part in added),
            "tflop": (prompt.prefill.flops + sum(part.flops for part in added)) * 1e-12,
            "decode_gb": pseudo.bytes * 1e-9,
        }

    def scores(self, run: PromptRun) -> Tensor:
        """See `Scorer`."""
        assert isinstance(run.watched, LastQueries)
        first = None if fits(run.lengths, self.budget) else super().choose(run, super().scores(run))
        rows = AllQueries(run.lengths)
        run.decode(self.n_tokens, keep=first, watch=rows)
        last = run.watched.narrowed(self.second_window)
        if self.softmax != "answer":
            return _on_prompt(run, last, rows, shifted=self.softmax == "shifted")
        return observed(run, Both(last, rows) if self.second_window else rows)

    def choose(self, run: PromptRun, scores: Tensor | None) -> Keep:
        """See `BasePolicy`."""
        assert scores is not None
        pooled = max_pool(scores, run.lengths, kernel=self.kernel)
        return top(pooled, run.lengths, self.budget, protect_last=self.protected)


def _on_prompt(run: PromptRun, last: LastQueries, answer: AllQueries, *, shifted: bool) -> Tensor:
    """As `observed`, of rows whose softmax runs over the prompt's keys alone: s_LBGS, 0 in the window.

    Args:
        run: the prefilled prompts.
        last: rows of the prompt that observe; each sees the keys up to its own.
        answer: rows after the prompt; each sees all of it.
        shifted: instead, all of them see what rows in the place of the prompt's last ones would see.
    """
    G, longest = run.target.info.n_kv_heads, max(run.lengths)
    scores = []
    for layer in range(run.target.info.n_layers):
        k_BTGD = run.cache.prefix(layer)[0]
        wide = torch.promote_types(k_BTGD.dtype, torch.float32)
        s_BGS = torch.zeros(len(run.lengths), G, longest, dtype=wide, device=k_BTGD.device)
        pieces = zip(last.pieces(layer)[0], answer.pieces(layer)[0], strict=True)
        for b, (n, (window_NHD, answer_NHD)) in enumerate(zip(run.lengths, pieces, strict=True)):
            q_NHD = torch.cat((window_NHD, answer_NHD))
            N, D, own = len(q_NHD), q_NHD.shape[-1], n - len(window_NHD)
            sees_N = torch.arange(N) + (n - N if shifted else own)
            unseen_NS = torch.arange(n)[None, :] > sees_N[:, None]
            q_GgND = q_NHD.view(N, G, -1, D).permute(1, 2, 0, 3).to(wide) * D**-0.5
            logits_GgNS = q_GgND @ k_BTGD[b, :n].to(wide).permute(1, 2, 0)[:, None]
            p_GgNS = logits_GgNS.masked_fill(unseen_NS.to(q_NHD.device), -torch.inf).softmax(-1)
            s_BGS[b, :, :own] = p_GgNS.mean((1, 2))[:, :own]
        scores.append(s_BGS)
    return torch.stack(scores)

"""LAQ: a pseudo answer, decoded on a cache cut by SnapKV, decides which entries of the cache stay.

Shapes: L layers, B prompts, S prompt positions, T positions of the cache, N observing queries, H query heads,
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
from longtrain.kernels.attention.sinks import with_sinks
from longtrain.methods.policies.snapkv import SnapKV
from longtrain.settings import Count, CountOrZero, wrong


@dataclass
class LAQ(SnapKV):
    """Lookahead Q-Cache: the queries of `n_tokens` greedy tokens, decoded on an evicted copy, are observers.

    1. SnapKV cuts a copy of the cache to the budget. 2. The copy decodes greedily. 3. Those steps' queries
    score the whole prompt (mean over queries and heads, max-pool) and the best entries stay.
    The scores depend on the budget through the copy. Peak memory is the whole cache and the copy.

    Args:
        window: observers of the first cut.
        n_tokens: tokens of the pseudo answer.
        second_window: LAQ++: this many last tokens of the prompt observe together with the pseudo answer, and
            stay; 0: LAQ.
        softmax: keys that the observers' softmax runs over. "answer": the prompt and the pseudo answer up to
            the observer itself, as if these queries were decoded on the whole cache. "prompt": the prompt
            alone. "shifted": the prompt alone; of N observers the i-th, from 1, does not see its last N - i
            tokens.

    Raises:
        ConfigError: a second window larger than the first.

    Source: Lookahead Q-Cache (arXiv 2505.20334), section 3.
    Note: the authors' script (noforit/Lookahead_Q-Cache) is `n_tokens=8 softmax=shifted`, with
        `second_window=8` for LAQ++: it multiplies the observers with the prompt's keys alone and applies the
        causal mask of its window to the last of them. It also repeats the cache for the query heads of a KV
        head, so that each of them keeps entries of its own; here they share them. Every softmax but "answer"
        materialises the attention matrix in plain torch: it is there to be compared, not to be fast.
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
        """Smallest budget, the window that the copy's cut keeps (see `BasePolicy`)."""
        return max(1, self.window)

    @property
    def protected(self) -> int:
        """Number of last tokens of each prompt that stay whatever their score."""
        return self.second_window

    def extra_tokens(self, longest: int) -> int:
        """Return the extra cache positions, for the pseudo answer (see `Evictor`)."""
        return self.n_tokens

    @classmethod
    def first_token(cls, prompt: PromptShape, gpu: Gpu) -> dict[str, float]:
        """Estimate SnapKV's scores, a pseudo answer on the copy, and scores again (see `BasePolicy`)."""
        seen = score(prompt.size, cls.window, prompt.tokens)
        pseudo = decode(prompt.size, cls.n_tokens, prompt.budget)
        added = [seen, pseudo, seen]
        return {
            "ms": sum(part.ms(gpu) for part in added),
            "tflop": (prompt.prefill.flops + sum(part.flops for part in added)) * 1e-12,
            "decode_gb": pseudo.bytes * 1e-9,
        }

    def scores(self, run: PromptRun) -> Tensor:
        """Decode the pseudo answer and return the scores of its queries (see `Scorer`)."""
        assert isinstance(run.watched, LastQueries)
        first = None if self.budget.covers(run.lengths) else super().choose(run, super().scores(run))
        rows = AllQueries(run.lengths)
        run.decode(self.n_tokens, keep=first, hook=rows)
        last = run.watched.narrowed(self.second_window)
        if self.softmax != "answer":
            return _on_prompt(run, last, rows, shifted=self.softmax == "shifted")
        return observed(run, Both(last, rows) if self.second_window else rows)

    def choose(self, run: PromptRun, scores: Tensor | None) -> Keep:
        """Keep the best entries and the second window (see `BasePolicy`)."""
        assert scores is not None
        pooled = max_pool(scores, run.lengths, kernel=self.kernel)
        return top(pooled, run.lengths, self.budget, protect_last=self.protected)


def _on_prompt(run: PromptRun, last: LastQueries, answer: AllQueries, *, shifted: bool) -> Tensor:
    """Score like `observed`, with a softmax over the prompt's keys alone: s_LBGS, 0 in the window.

    Args:
        run: the prefilled prompts.
        last: observing queries of the prompt; each sees the keys up to its own.
        answer: observing queries after the prompt; each sees all of it.
        shifted: instead, all of them see what queries in the place of the prompt's last ones would see.
    """
    G, longest = run.target.info.n_kv_heads, max(run.lengths)
    scores = []
    for layer in run.layers:
        k_BTGD = run.cache.prefix(layer)[0]
        wide = torch.promote_types(k_BTGD.dtype, torch.float32)
        s_BGS = torch.zeros(len(run.lengths), G, longest, dtype=wide, device=k_BTGD.device)
        pieces = zip(last.pieces(layer)[0], answer.pieces(layer)[0], strict=True)
        for b, (n, (window_NHD, answer_NHD)) in enumerate(zip(run.lengths, pieces, strict=True)):
            q_NHD = torch.cat((window_NHD, answer_NHD))
            N, own = len(q_NHD), n - len(window_NHD)
            sees_N = torch.arange(N) + (n - N if shifted else own)
            unseen_NS = torch.arange(n)[None, :] > sees_N[:, None]
            # [N, H, D] -> [G, g, N, D]
            q_GgND = q_NHD.unflatten(1, (G, -1)).permute(1, 2, 0, 3).to(wide) * run.target.scaling(layer)
            logits_GgNS = q_GgND @ k_BTGD[b, :n].to(wide).permute(1, 2, 0)[:, None]
            logits_GgNS.masked_fill_(unseen_NS.to(q_NHD.device), -torch.inf)
            p_HNS = logits_GgNS.softmax(-1).flatten(0, 1)
            if (sinks_H := run.target.sinks(layer)) is not None:
                p_HNS = with_sinks(p_HNS, logits_GgNS.logsumexp(-1).flatten(0, 1), sinks_H)
            s_BGS[b, :, :own] = p_HNS.unflatten(0, (G, -1)).mean((1, 2))[:, :own]
        scores.append(s_BGS)
    return torch.stack(scores)

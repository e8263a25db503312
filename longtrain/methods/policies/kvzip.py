"""KVzip: keeps the KV entries that the model needs to repeat its prompt.

Shapes: L layers, B prompts, S prompt positions, N repeated tokens of all prompts, H query heads, G KV heads,
D head dim, E hidden dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor

from longtrain.decoding.evict import Keep, PromptRun
from longtrain.decoding.select import reduce_heads, top_adaptive
from longtrain.kernels.importance import Span, importance, suffix_lse
from longtrain.methods.policies.base import BasePolicy
from longtrain.methods.policies.repeat import LONGEST_REQUEST, Repeat, repeat_of
from longtrain.settings import Count, CountOrZero


@dataclass
class KVzip(BasePolicy):
    """Context reconstruction: the prompt is repeated, teacher-forced, chunk by chunk.

    For each chunk of the prompt the model is asked to repeat it and reads the answer. A key's score is the
    largest attention that any repeated token of any query head gives it, in a softmax over the first keys
    (sinks), the chunk's keys and the repeated tokens before. The best entries of all layers and heads
    together stay.

    Args:
        chunk: prompt tokens repeated at a time.
        sinks: first tokens of each prompt, which stay.
        across: scope of one budget: the heads of all layers ("layers", the paper) or of one ("heads").
        value_norm: multiply attention by |W_O v|, the norm of what a key's value adds.
        row_norm: divide a repeated token's attention by the norm of the layer's attention input.

    Raises:
        ConfigError: an option out of range; at the first prompt: the target has no tokenizer.

    Source: KVzip (arXiv 2505.23416), section 3; with `value_norm` and `row_norm` it is KVzip+ (KVzap, arXiv
        2601.07891).
    Note: a chat header that starts the prompt is not repeated and, except for the sinks, not kept. If the
        prompt ends with the assistant's header the request opens a new user turn; else it continues the
        open one, as in the authors' code.
    """

    name: ClassVar[str] = "kvzip"
    chunk: Count = 2048
    sinks: CountOrZero = 4
    across: Literal["heads", "layers"] = "layers"
    value_norm: bool = False
    row_norm: bool = False

    @property
    def least_budget(self) -> int:
        """Smallest budget, the sinks (see `BasePolicy`)."""
        return max(1, self.sinks)

    def extra_tokens(self, longest: int) -> int:
        """Return the extra cache positions: a request and the chunk that answers it (see `Evictor`)."""
        return min(self.chunk, longest) + LONGEST_REQUEST

    def scores(self, run: PromptRun) -> Tensor:
        """Return the repeated tokens' maximal attention (`Scorer`); 1 at the sinks, 0 in a chat header."""
        info = run.target.info
        tokens = run.tokens_BS.tolist()
        repeats = [repeat_of(run.target, tokens[b][:n], chunk=self.chunk) for b, n in enumerate(run.lengths)]
        wide = torch.promote_types(run.target.dtype, torch.float32)
        s_LBGS = torch.zeros(
            len(run.layers), len(tokens), info.n_kv_heads, max(run.lengths), dtype=wide, device=run.n_B.device
        )
        for turn in range(max(len(repeat.chunks) for repeat in repeats)):
            one = _Turn(run, repeats, turn, self, s_LBGS)
            run.follow([repeat.rows(turn) for repeat in repeats], one)
        s_LBGS[..., : self.sinks] = 1.0
        return s_LBGS

    def choose(self, run: PromptRun, scores: Tensor | None) -> Keep:
        """Choose the best entries of all heads that share a budget (see `BasePolicy`)."""
        assert scores is not None
        return top_adaptive(
            scores, run.lengths, self.budget, protect_first=self.sinks, floor=0.0, across=self.across
        )


class _Turn:
    """Observer that scores one chunk of each prompt while it is repeated; it stores no layer's tensors.

    Only the keys between the first and the last chunk's end are read, and rows of all prompts are gathered by
    one table, so that a layer's cost on the host does not grow with the number of prompts.
    """

    def __init__(
        self,
        run: PromptRun,
        repeats: Sequence[Repeat],
        turn: int,
        policy: KVzip,
        s_LBGS: Tensor,
    ) -> None:
        self.run, self.value_norm, self.s_LBGS = run, policy.value_norm, s_LBGS
        self.see_inputs = self._measure if policy.row_norm else None
        self._norm_N = s_LBGS.new_empty(0)
        rows = [repeat.rows(turn) for repeat in repeats]
        counts = {b: len(row) for b, row in enumerate(rows) if row}
        chunks = {b: repeats[b].chunks[turn] for b in counts}
        low, high = min(start for start, _ in chunks.values()), max(stop for _, stop in chunks.values())
        bounds = pairwise(accumulate(counts.values(), initial=0))
        self.keys = slice(low, high)
        self.spans = [
            Span(bound, b, (chunks[b][0] - low, chunks[b][1] - low))
            for b, bound in zip(counts, bounds, strict=True)
        ]
        T = max(map(len, rows))
        self._rows_N = self._put([b * T + t for b, n in counts.items() for t in range(n)])
        sinks = [min(policy.sinks, chunks[b][0]) if b in chunks else 0 for b in range(len(rows))]
        self._sinks_BX = self._put([[at < n for at in range(max(sinks))] for n in sinks])

    def __call__(self, layer: int, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> None:
        """Score one layer's chunks."""
        scale = self.run.target.scaling(layer)
        q_NHD, own_NGD = (self._rows(x.transpose(1, 2)) for x in (q_BHTD, k_BGTD))
        k_BSGD, v_BSGD = (x[:, self.keys] for x in self.run.cache.prefix(layer))
        sinks_H = self.run.target.sinks(layer)
        lse_NH = suffix_lse(q_NHD, own_NGD, k_BSGD, self.spans, scale=scale, sinks_H=sinks_H)
        if self._sinks_BX.shape[1]:
            lse_NH = torch.logaddexp(lse_NH, self._rows(self._first(layer, q_BHTD, scale)))
        if self.see_inputs is not None:  # p / |x| is exp(q k - (lse + log |x|))
            lse_NH = lse_NH + self._norm_N.log()[:, None]
        s_BHS = importance(q_NHD, lse_NH, k_BSGD, self.spans, scale=scale, reduce="max")
        if self.value_norm:
            s_BHS = s_BHS * _value_norm(self.run.target.layer_state(layer)["self_attn.o_proj.weight"], v_BSGD)
        # 0 outside of the chunks, each of which is scored in one turn
        self.s_LBGS[self.run.layers.index(layer), :, :, self.keys] += reduce_heads(
            s_BHS, k_BSGD.shape[2], "max"
        )

    def _measure(self, layer: int, x_BTE: Tensor) -> None:
        """Record the norms of one layer's attention inputs (`targets.attention.AttentionHook`)."""
        wide = torch.promote_types(x_BTE.dtype, torch.float32)
        self._norm_N = self._rows(torch.linalg.vector_norm(x_BTE, dim=-1, dtype=wide))

    def _first(self, layer: int, q_BHTD: Tensor, scale: float) -> Tensor:
        """Log-sum-exps [B, T, H] over the sink keys before each prompt's chunk; -inf where there are none."""
        k_BXGD = self.run.cache.prefix(layer)[0][:, : self._sinks_BX.shape[1]]
        wide = torch.promote_types(q_BHTD.dtype, torch.float32)
        q_BGRD = q_BHTD.reshape(len(q_BHTD), k_BXGD.shape[2], -1, q_BHTD.shape[3]).to(wide) * scale
        logit_BGRX = q_BGRD @ k_BXGD.to(wide).permute(0, 2, 3, 1)
        logit_BGRX = logit_BGRX.masked_fill(~self._sinks_BX[:, None, None], -torch.inf)
        return logit_BGRX.logsumexp(-1).reshape(q_BHTD.shape[:3]).transpose(1, 2)

    def _rows(self, x_BTX: Tensor) -> Tensor:
        """The repeated tokens' rows [N, ...] of a tensor of all prompts and padding."""
        return x_BTX.flatten(0, 1).index_select(0, self._rows_N)

    def _put(self, table: Sequence[object]) -> Tensor:
        """A table of the host on the device, without waiting for it."""
        return torch.tensor(table).to(self.run.n_B.device, non_blocking=True)


def _value_norm(o_proj_EX: Tensor, v_BSGD: Tensor) -> Tensor:
    """Return the norm of W_O v of each query head and key: [B, H, S].

    By the Gram matrix of a head's columns, |W v|^2 = v (W^T W) v, so no tensor of the hidden size is needed.
    """
    G, D = v_BSGD.shape[2:]
    wide = torch.promote_types(v_BSGD.dtype, torch.float32)
    w_EGgD = o_proj_EX.to(wide).unflatten(1, (G, -1, D))  # [E, H D] -> [E, G, H / G, D]
    gram_GgDD = torch.einsum("egrc,egrd->grcd", w_EGgD, w_EGgD)
    v_BGSD = v_BSGD.to(wide).transpose(1, 2)
    square_BGgS = ((v_BGSD[:, :, None] @ gram_GgDD) * v_BGSD[:, :, None]).sum(-1)
    return square_BGgS.clamp(min=0).sqrt().flatten(1, 2)

"""How a policy ranks a prompt's tokens beside the truth: the attention that the answer will give them.

Shapes: L layers, B batch, G KV heads, S prompt tokens, X rankings (a layer and KV head each).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from longtrain.decoding.engine import Engine
from longtrain.decoding.evict import Evictor, Keep, PromptRun
from longtrain.decoding.observe import AllQueries
from longtrain.decoding.ranking import RECALLS, kendall_tau, recall_at
from longtrain.decoding.roles import Parts
from longtrain.decoding.select import reduce_heads
from longtrain.evaluation.eviction_protocol import Json, Protocol
from longtrain.evaluation.eviction_tasks import Prompt
from longtrain.kernels.importance import Span, importance, suffix_lse
from longtrain.methods.policies.base import Policy, Scorer

if TYPE_CHECKING:
    from longtrain.targets.attention import Watch
    from longtrain.targets.model import Target


@dataclass
class ToldOracle(Policy):
    """Knows the question that comes after eviction and its expected answer: keeps what that answer reads.

    Args:
        told: the prompts of the batch at hand (`tell`).
    """

    window: int = 0
    told: list[Prompt] = field(default_factory=list)
    name: ClassVar[str] = "oracle"

    def tell(self, prompts: Sequence[Prompt]) -> None:
        """Say what the next batch will be asked."""
        self.told[:] = prompts

    def extra_rows(self, longest: int) -> int:
        """See `Evictor`: the question and its answer."""
        return max(len(p.question) + len(p.answer_ids) for p in self.told)

    def scores(self, run: PromptRun) -> Tensor:
        """See `Scorer`: attention of the answer's rows, whose softmax is over question and answer too."""
        watch = AllQueries(run.lengths)
        run.follow([[*p.question, *p.answer_ids] for p in self.told], watch)
        info, found, spans = run.target.info, [], watch.spans()
        places, answers = self._answers(spans)
        row_N = torch.tensor(places, device=run.n_B.device)
        for layer in range(info.n_layers):
            k_BTGD = run.cache.prefix(layer)[0][:, : max(run.lengths)]
            q_NHD, own_k_NGD = watch.layer(layer)
            scale = info.head_dim**-0.5
            lse_NH = suffix_lse(q_NHD, own_k_NGD, k_BTGD, spans, scale=scale)
            s_BHT = importance(q_NHD[row_N], lse_NH[row_N], k_BTGD, answers, scale=scale)
            found.append(reduce_heads(s_BHT, info.n_kv_heads))
        return torch.stack(found)

    def _answers(self, spans: Sequence[Span]) -> tuple[list[int], list[Span]]:
        """Of all rows those of the answers: their places, and their spans among themselves."""
        places: list[int] = []
        answers = []
        for span in spans:
            start = len(places)
            places += range(span.rows[0] + len(self.told[span.seq].question), span.rows[1])
            answers.append(replace(span, rows=(start, len(places))))
        return places, answers


class Ranks:
    """True scores of the first prompts of one length, computed when first asked for and kept on the host.

    Args:
        target: the frozen model.
        oracle: has the true scores.
        protocol: how many prompts, and which of their positions.
    """

    def __init__(self, target: Target, oracle: Evictor, protocol: Protocol) -> None:
        self.target, self.oracle, self.protocol = target, oracle, protocol
        self._truth: dict[int, Tensor] = {}

    def compare(self, first: int, prompts: Sequence[Prompt], s_LBGS: Tensor) -> list[Json]:
        """Recall and tau of a batch's scores, mean over layers and KV heads, one entry a prompt.

        Recall at k is None for prompts of k ranked tokens or fewer, all of which would be among the best.

        Args:
            first: number of the batch's first prompt; those from `rank_prompts` on are left out.
            prompts: the batch.
            s_LBGS: a policy's scores, not pooled.
        """
        wanted = prompts[: max(0, self.protocol.rank_prompts - first)]
        found = []
        for b, prompt in enumerate(wanted):
            size = max(1, len(self.protocol.seen(prompt)) - self.protocol.rank_skip)
            true_XS = self._true(first, prompts)[:, b, :, :size].flatten(0, 1).to(s_LBGS.device)
            pred_XS = s_LBGS[:, b, :, :size].flatten(0, 1)
            recall = {
                str(k): float(recall_at(pred_XS, true_XS, k).mean()) if size > k else None for k in RECALLS
            }
            found.append({"recall": recall, "tau": _mean(kendall_tau(pred_XS, true_XS))})
        return found

    def _true(self, first: int, prompts: Sequence[Prompt]) -> Tensor:
        if first not in self._truth:
            tell(self.oracle, prompts)
            look = _Look(self.oracle, self.protocol.max_new_tokens)
            engine = Engine(self.target, Parts(evictor=look, name="oracle"), limits=self.protocol.limits)
            engine.generate([self.protocol.seen(prompt) for prompt in prompts], max_new_tokens=1)
            assert look.found is not None
            self._truth[first] = look.found.cpu()
        return self._truth[first]


class _Look:
    """Takes an evictor's scores and evicts nothing."""

    def __init__(self, evictor: Evictor, answer_tokens: int) -> None:
        self.evictor, self.name, self.answer_tokens = evictor, evictor.name, answer_tokens
        self.found: Tensor | None = None

    def extra_rows(self, longest: int) -> int:
        return max(self.evictor.extra_rows(longest), self.answer_tokens)

    def watch(self, lengths: Sequence[int]) -> Watch | None:
        return self.evictor.watch(lengths)

    def select(self, run: PromptRun) -> Keep | None:
        assert isinstance(self.evictor, Scorer)
        self.found = self.evictor.scores(replace(run, max_new_tokens=self.answer_tokens))
        return None


def tell(evictor: Evictor, prompts: Sequence[Prompt]) -> None:
    """Let an evictor that may know the questions know them."""
    if isinstance(evictor, ToldOracle):
        evictor.tell(prompts)


def _mean(tau_X: Tensor) -> float | None:
    """Mean of the rankings that say anything; None where none does."""
    real = tau_X[~tau_X.isnan()]
    return float(real.mean()) if len(real) else None

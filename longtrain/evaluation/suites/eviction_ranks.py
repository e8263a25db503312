"""How a policy ranks a prompt's tokens beside the truth: the attention that the answer will give them.

Shapes: L layers, B batch, G KV heads, S prompt tokens, X rankings (a layer and KV head each).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from longtrain.decoding.engine import Engine
from longtrain.decoding.evict import Evictor, Keep, PromptRun
from longtrain.decoding.limits import Limits
from longtrain.decoding.observe import AllQueries
from longtrain.decoding.ranking import RECALLS, kendall_tau, recall_at
from longtrain.decoding.roles import Parts
from longtrain.decoding.select import reduce_heads
from longtrain.evaluation.prompts import Encoded
from longtrain.evaluation.records import ids_sha256
from longtrain.kernels.importance import Span, importance, suffix_lse
from longtrain.methods.policies.base import Policy, Scorer

if TYPE_CHECKING:
    from longtrain.targets.attention import Watch
    from longtrain.targets.model import Target

Ids = Sequence[int]


@dataclass
class ToldOracle(Policy):
    """Knows the question that comes after eviction and its expected answer: keeps what that answer reads.

    Args:
        questions: what comes after each prompt of the batch at hand (`tell`).
        answers: tokens of the expected answers.
    """

    window: int = 0
    questions: Sequence[Ids] = field(default=(), repr=False)
    answers: Sequence[Ids] = field(default=(), repr=False)
    name: ClassVar[str] = "oracle"

    def tell(self, questions: Sequence[Ids], answers: Sequence[Ids]) -> None:
        """Say what the next batch will be asked, and what it is to answer."""
        self.questions, self.answers = questions, answers

    def extra_rows(self, longest: int) -> int:
        """See `Evictor`: the question and its answer."""
        return max(len(q) + len(a) for q, a in zip(self.questions, self.answers, strict=True))

    def scores(self, run: PromptRun) -> Tensor:
        """See `Scorer`: attention of the answer's rows, whose softmax is over question and answer too."""
        watch = AllQueries(run.lengths)
        run.follow([[*q, *a] for q, a in zip(self.questions, self.answers, strict=True)], watch)
        info, found, spans = run.target.info, [], watch.spans()
        places, answers = self._answer_rows(spans)
        row_N = torch.tensor(places, device=run.n_B.device)
        for layer in range(info.n_layers):
            k_BTGD = run.cache.prefix(layer)[0][:, : max(run.lengths)]
            q_NHD, own_k_NGD = watch.layer(layer)
            scale = info.head_dim**-0.5
            lse_NH = suffix_lse(q_NHD, own_k_NGD, k_BTGD, spans, scale=scale)
            s_BHT = importance(q_NHD[row_N], lse_NH[row_N], k_BTGD, answers, scale=scale)
            found.append(reduce_heads(s_BHT, info.n_kv_heads))
        return torch.stack(found)

    def _answer_rows(self, spans: Sequence[Span]) -> tuple[list[int], list[Span]]:
        """The answers' rows among all rows: their places, and their spans among themselves."""
        places: list[int] = []
        answers = []
        for span in spans:
            start = len(places)
            places += range(span.rows[0] + len(self.questions[span.seq]), span.rows[1])
            answers.append(replace(span, rows=(start, len(places))))
        return places, answers


@dataclass(frozen=True)
class TrueScores:
    """The scores of an oracle, computed for a batch when first asked for and kept on the host.

    Args:
        oracle: makes the evictor that has the true scores.
        answer_tokens: most tokens of an answer.
        skip: last positions of a prompt that are left out: a policy with a window keeps them unscored.
    """

    oracle: Callable[[], Evictor]
    answer_tokens: int
    skip: int
    known: dict[Any, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def compare(
        self, target: Target, prompts: Sequence[Encoded], answers: Sequence[Ids], s_LBGS: Tensor
    ) -> list[dict[str, float]]:
        """`recall@k` and `rank_tau` of a batch's scores beside the true ones, mean over layers and KV heads.

        Neither side is pooled. Recall at k is left out for prompts of k ranked tokens or fewer, all of which
        would be among the best.

        Args:
            target: the frozen model.
            prompts: the batch.
            answers: tokens of the expected answers, for an oracle that is told them.
            s_LBGS: a policy's scores.
        """
        names = tuple(ids_sha256([*prompt.ids, *prompt.after]) for prompt in prompts)
        if names not in self.known:
            self.known[names] = self._compute(target, prompts, answers).cpu()
        found = []
        for b, prompt in enumerate(prompts):
            size = max(1, len(prompt.ids) - self.skip)
            true_XS = self.known[names][:, b, :, :size].flatten(0, 1).to(s_LBGS.device)
            found.append(_compare(s_LBGS[:, b, :, :size].flatten(0, 1), true_XS))
        return found

    def _compute(self, target: Target, prompts: Sequence[Encoded], answers: Sequence[Ids]) -> Tensor:
        oracle = self.oracle()
        if isinstance(oracle, ToldOracle):
            oracle.tell([prompt.after for prompt in prompts], answers)
        look = _Look(oracle, self.answer_tokens)
        engine = Engine(target, Parts(evictor=look, name="oracle"), limits=Limits(batch=len(prompts)))
        engine.generate([prompt.ids for prompt in prompts], max_new_tokens=1)
        assert look.found is not None
        return look.found


def _compare(pred_XS: Tensor, true_XS: Tensor) -> dict[str, float]:
    size = true_XS.shape[-1]
    found = {f"recall@{k}": float(recall_at(pred_XS, true_XS, k).mean()) for k in RECALLS if size > k}
    tau_X = kendall_tau(pred_XS, true_XS)
    real = tau_X[~tau_X.isnan()]  # of the rankings that say anything
    return found | ({"rank_tau": float(real.mean())} if len(real) else {})


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

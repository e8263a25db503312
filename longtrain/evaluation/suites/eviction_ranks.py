"""How a policy ranks a prompt's tokens beside the truth: the attention that the answer will give them.

Shapes: L layers, B batch, G KV heads, S prompt tokens, X rankings (a layer and KV head each).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from longtrain.decoding.engine import Engine
from longtrain.decoding.evict import Evictor, Keep, PromptRun
from longtrain.decoding.limits import Limits
from longtrain.decoding.ranking import RECALLS, kendall_tau, recall_at
from longtrain.decoding.roles import Parts
from longtrain.evaluation.prompts import Encoded
from longtrain.evaluation.records import ids_sha256
from longtrain.methods.policies.base import Scorer
from longtrain.methods.policies.oracle import ToldOracle

if TYPE_CHECKING:
    from longtrain.targets.attention import Watch
    from longtrain.targets.model import Target

Ids = Sequence[int]


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

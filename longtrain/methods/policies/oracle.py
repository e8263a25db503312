"""Oracles: scores from the answer itself, the upper bound of every scorer.

Shapes: L layers, B prompts, S prompt positions, G KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from longtrain.decoding.evict import PromptRun
from longtrain.decoding.observe import AllQueries, observed
from longtrain.decoding.sampling import Sampling
from longtrain.decoding.select import reduce_heads
from longtrain.kernels.importance import Span, importance, suffix_lse
from longtrain.methods.policies.base import Policy
from longtrain.settings import Count, CountOrZero


@dataclass
class Oracle(Policy):
    """Decodes the greedy answer on the whole cache, then scores the prompt by the answer's own attention.

    `scores` are the ones LookaheadKV is trained to predict: mean over the answer's tokens, softmax over all
    that such a token sees (earlier answer tokens included), mean over the heads of a KV head, not pooled.

    Args:
        window: 0: no token stays without regard to its score.
        kernel: width of the selection's max-pool; 1 keeps the true best tokens.
        n_tokens: most answer tokens that are used, if more are requested.
        temperature: temperature of the answer; above 0 it is sampled, which shows how far scores depend on
            the wording (LookaheadKV, Table 8).
        seed: seed of the sampling.

    Source: LookaheadKV (arXiv 2603.10899), section 3 (ground-truth scores); 512 tokens as in its training.
    """

    name: ClassVar[str] = "oracle"
    wrappable: ClassVar[bool] = True
    window: CountOrZero = 0
    n_tokens: Count = 512
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sampling = Sampling(temperature=self.temperature, seed=self.seed)

    def extra_tokens(self, longest: int) -> int:
        """Return the extra cache positions, for the answer (see `Evictor`)."""
        return self.n_tokens

    def scores(self, run: PromptRun) -> Tensor:
        """Decode the answer and return its attention to the prompt (see `Scorer`)."""
        most = min(run.max_new_tokens or self.n_tokens, self.n_tokens)
        answers = run.decode(most, sampling=self._sampling)
        rows = AllQueries(run.lengths)
        run.follow(answers, rows)
        return observed(run, rows)


@dataclass
class QuestionOracle(Policy):
    """An oracle for evictions before the question: keeps what the expected answer to a known question reads.

    It has no name in `POLICIES`, since it needs the answers.

    Args:
        questions: tokens that follow each prompt of the next batch (`tell`).
        answers: tokens of each expected answer.
    """

    window: int = 0
    questions: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    name: ClassVar[str] = "oracle"

    def tell(self, questions: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        """Set the questions that follow each prompt of the next batch, and the expected answers."""
        self.questions, self.answers = list(map(list, questions)), list(map(list, answers))

    def extra_tokens(self, longest: int) -> int:
        """Return the extra cache positions, for the question and its answer (see `Evictor`)."""
        return max(map(len, self._rows()))

    def scores(self, run: PromptRun) -> Tensor:
        """Return the answer's attention (see `Scorer`), with a softmax that includes question and answer."""
        hook = AllQueries(run.lengths)
        run.follow(self._rows(), hook)
        info, found, spans = run.target.info, [], hook.spans()
        places, answers = self._answers(spans)
        row_N = torch.tensor(places, device=run.n_B.device)
        for layer in run.layers:
            k_BTGD = run.cache.prefix(layer)[0][:, : max(run.lengths)]
            q_NHD, own_k_NGD = hook.layer(layer)
            scale = info.head_dim**-0.5
            sinks_H = run.target.sinks(layer)
            lse_NH = suffix_lse(q_NHD, own_k_NGD, k_BTGD, spans, scale=scale, sinks_H=sinks_H)
            s_BHT = importance(q_NHD[row_N], lse_NH[row_N], k_BTGD, answers, scale=scale)
            found.append(reduce_heads(s_BHT, info.n_kv_heads))
        return torch.stack(found)

    def _rows(self) -> list[list[int]]:
        return [[*one, *answer] for one, answer in zip(self.questions, self.answers, strict=True)]

    def _answers(self, spans: Sequence[Span]) -> tuple[list[int], list[Span]]:
        """Return the answers' places among all observed tokens, and their spans among themselves."""
        places: list[int] = []
        answers = []
        for span in spans:
            start = len(places)
            places += range(span.rows[0] + len(self.questions[span.seq]), span.rows[1])
            answers.append(replace(span, rows=(start, len(places))))
        return places, answers

"""Oracle: the scores that the answer itself gives, the upper bound of every scorer.

Shapes: L layers, B prompts, S prompt slots, G KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from longtrain.decoding.evict import PromptRun
from longtrain.decoding.observe import AllQueries, observed
from longtrain.decoding.sampling import Sampling
from longtrain.methods.policies.base import Policy
from longtrain.settings import Count, CountOrZero


@dataclass
class Oracle(Policy):
    """Decodes the greedy answer on the whole cache, then scores the prompt by the answer's own rows.

    `scores` are the ones LookaheadKV is trained to predict: mean over the answer's rows, softmax over all
    that such a row sees (earlier answer tokens included), mean over the heads of a KV head, not pooled.

    Args:
        window: 0: nothing stays but for its score.
        kernel: of the selection's max-pool; 1 keeps the true best tokens.
        n_tokens: most tokens of the answer that are looked at, where more are asked for.
        temperature: of the answer looked at; above 0 it is sampled, which shows how far scores depend on the
            words (LookaheadKV, Table 8).
        seed: of its coins.

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

    def extra_rows(self, longest: int) -> int:
        """See `Evictor`: the answer."""
        return self.n_tokens

    def scores(self, run: PromptRun) -> Tensor:
        """See `Scorer`."""
        most = min(run.max_new_tokens or self.n_tokens, self.n_tokens)
        answers = run.decode(most, sampling=self._sampling)
        rows = AllQueries(run.lengths)
        run.follow(answers, rows)
        return observed(run, rows)

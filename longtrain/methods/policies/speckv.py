"""SpecKV: a small model drafts the answer, and the target's attention from the draft gives the scores.

Shapes: L layers, B prompts, S prompt positions, G KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from longtrain.costs.hardware import Gpu
from longtrain.costs.method import PromptShape
from longtrain.costs.model import decode, prefill, score
from longtrain.decoding.engine import Engine
from longtrain.decoding.evict import PromptRun
from longtrain.decoding.observe import AllQueries, Both, LastQueries, observed
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.methods.policies.base import Policy
from longtrain.settings import Count
from longtrain.targets.loading import load_target
from longtrain.targets.model import Target


@dataclass
class SpecKV(Policy):
    """Observers are the last `window` + 1 prompt tokens and the tokens of a draft model's greedy answer.

    Args:
        window: tokens at the end of each prompt that stay.
        draft: a target folder, Hub id or `tiny` that shares the target's tokenizer, or a loaded target.
        n_tokens: number of tokens drafted.
        reduction: reduction over observers and over heads of a KV head: "max" (the authors' settings) or
            "mean" (their paper).

    Raises:
        ConfigError: no draft, or an option out of range.
        TargetMismatchError: the draft has another tokenizer (raised at the first prompt).

    Source: SpecKV (arXiv 2506.08373), section 4.1 and Algorithm 1.
    Note: the authors' code also makes the target's prefill sparse beyond 4096 tokens; here the prefill is
        whole, as for every policy. Their cache contains the budget and the last token; here that one counts,
        so the first observer's own key does not always stay: it competes by its neighbours' pooled scores.
    """

    name: ClassVar[str] = "speckv"
    wrappable: ClassVar[bool] = True
    least_window: ClassVar[int] = 1
    draft: str | Target | None = None
    n_tokens: Count = 32
    reduction: Literal["max", "mean"] = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft is None:
            raise ConfigError(
                "evict.draft=null; SpecKV needs a small model with the target's tokenizer: "
                "evict.draft=FOLDER (or a Hub id)"
            )

    def extra_tokens(self, longest: int) -> int:
        """Return the extra cache positions, for the drafted answer (see `Evictor`)."""
        return self.n_tokens

    def hook(self, lengths: Sequence[int]) -> LastQueries:
        """Return the observer of the window's queries (see `Evictor`)."""
        return LastQueries(lengths, self.window + 1)

    @classmethod
    def first_token(cls, prompt: PromptShape, gpu: Gpu) -> dict[str, float]:
        """Estimate the draft's prefill and answer, and the target's of both (see `BasePolicy`)."""
        if prompt.draft is None:
            return {}
        work = [
            prefill(prompt.draft, prompt.tokens, causal=prompt.causal),
            decode(prompt.draft, cls.n_tokens, prompt.tokens),
            prefill(prompt.size, prompt.tokens + cls.n_tokens, causal=prompt.causal),
            score(prompt.size, 2 * cls.window + 1, prompt.tokens),
        ]
        return {
            "ms": sum(part.ms(gpu) for part in work) - prompt.prefill.ms(gpu),
            "tflop": sum(part.flops for part in work) * 1e-12,
        }

    def scores(self, run: PromptRun) -> Tensor:
        """Draft the answers and return all observers' attention (`Scorer`); 0 from the first one on."""
        assert isinstance(run.watched, LastQueries)
        draft = self._draft_for(run.target)
        prompts = [row[:n] for row, n in zip(run.tokens_BS.tolist(), run.lengths, strict=True)]
        answers = Engine(draft).generate(prompts, max_new_tokens=self.n_tokens).tokens
        rows = AllQueries(run.lengths)
        run.follow(answers, rows)
        return observed(run, Both(run.watched, rows), reduce=self.reduction, heads=self.reduction)

    def _draft_for(self, target: Target) -> Target:
        """Return the draft model, loaded on first use."""
        assert self.draft is not None
        if isinstance(self.draft, Target):
            draft = self.draft
        else:
            draft = _loaded(self.draft, target.dtype, target.device)
        ours, theirs = target.info, draft.info
        if ours.tokenizer_hash != theirs.tokenizer_hash or theirs.vocab_size > ours.vocab_size:
            raise TargetMismatchError(
                f"evict.draft={theirs.name} does not share the tokenizer of the target {ours.name} "
                f"(vocabularies of {theirs.vocab_size} and {ours.vocab_size}); pass a smaller model of the "
                "target's own family"
            )
        return draft


@lru_cache(maxsize=1)
def _loaded(where: str, dtype: torch.dtype, device: torch.device) -> Target:
    """Load the draft once for all budgets and prompts."""
    return load_target(where, dtype=dtype, device=device)

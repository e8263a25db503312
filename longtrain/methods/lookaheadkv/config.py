"""Hyperparameters of LookaheadKV; defaults are the paper's unless said otherwise. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from longtrain.settings import (
    Adaptive,
    Count,
    CountOrZero,
    Kernel,
    NotNegative,
    OneOf,
    Positive,
    check,
    convert,
    wrong,
)

FORMATS = ("peft",)
"""Formats of other tools that `export format=` writes."""

LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
"""Linears of a decoder layer that may have LoRA."""

_SETS = {"all": LINEARS, "qv": ("q", "v"), "none": ()}


@dataclass
class Config:
    """Lookahead tokens and their LoRA, and how they are trained (LookaheadKV, arXiv 2603.10899, §3, §4.1)."""

    n_lookahead: Count = 32  # soft tokens that stand for the response (§4.1)
    lora_rank: Count = 8  # rank of the LoRA on the soft tokens (§4.1)
    lora_alpha: Positive = 32.0  # its output is scaled by alpha / rank (§4.1)
    lora_targets: Any = "all"  # all, qv, none (Table 5), or a list of q, k, v, o, gate, up, down
    pool_kernel: Kernel = 7  # max-pooling of scores over neighbours before the selection; odd; 1: none
    reduction: Annotated[str, OneOf("mean", "max")] = "mean"  # how scores of query heads that share a KV head
    # are combined: mean, max
    init_std: NotNegative = 0.0  # standard deviation of new soft tokens; 0: that of the target's embeddings
    # (ours)
    suffix_window: CountOrZero = 0  # average also over the last N queries (Table 7: 32 is worse); 0: off
    embedding_lr_scale: Positive = 1.0  # factor on optim.lr for the soft tokens (ours; 5 trains well)
    budgets: list[Count] = field(default_factory=list)  # also add the KL among the N tokens with the highest
    # true scores, for each N (ours); []: no
    budget_weight: NotNegative = 1.0  # weight of that term, a mean over `budgets`
    adaptive: Any = False  # how a budget is shared if evict.adaptive does not say: false (the paper's: the
    # same in every head), heads (among the heads of a layer) or layers (among all heads; both ours)
    response: Annotated[str, OneOf("answer", "question_answer")] = "answer"  # what the labels of the data
    # cover: answer; question_answer: also the question, which the module then does not see (query-agnostic);
    # stored in the artifact

    def __post_init__(self) -> None:
        check(self, "method")
        self.linears()
        self.adaptive = convert(self.adaptive, Adaptive, "method.adaptive")  # Hydra's schema has no Literal

    def linears(self) -> tuple[str, ...]:
        """Return the linears that have LoRA, in the order of `LINEARS`.

        Raises:
            ConfigError: `lora_targets` names something else.
        """
        asked = self.lora_targets
        names = _SETS.get(asked) if isinstance(asked, str) else asked
        if not isinstance(names, list | tuple) or not {str(name) for name in names} <= {*LINEARS}:
            known = f"{', '.join(_SETS)}, or a list of {', '.join(LINEARS)}"
            raise wrong("method.lora_targets", asked, known)
        return tuple(name for name in LINEARS if name in names)

"""Hyperparameters of LookaheadKV; defaults are the paper's unless said otherwise. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from longtrain.errors import ConfigError

LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
"""Linears of a decoder layer that LoRA may be added to."""

_SETS = {"all": LINEARS, "qv": ("q", "v"), "none": ()}


@dataclass
class Config:
    """Lookahead tokens and their LoRA, and how they are trained (LookaheadKV, arXiv 2603.10899, §3, §4.1)."""

    n_lookahead: int = 32  # soft tokens that stand for the response (§4.1)
    lora_rank: int = 8  # rank of the LoRA on the soft tokens' rows (§4.1)
    lora_alpha: float = 32.0  # its output is scaled by alpha / rank (§4.1)
    lora_targets: Any = "all"  # all, qv, none (Table 5), or a list of q, k, v, o, gate, up, down
    pool_kernel: int = 7  # max-pooling of scores over neighbours before the selection; odd; 1: none
    reduction: str = "mean"  # of the scores of query heads that share a KV head: mean, max
    init_std: float = 0.0  # of fresh soft tokens; 0: that of the target's own embeddings (ours)
    suffix_window: int = 0  # average in the scores of the prompt's last N queries (Table 7: 32 hurts); 0: no
    embedding_lr_scale: float = 1.0  # factor on optim.lr for the soft tokens (ours; 5 trains well)
    budgets: list[int] = field(default_factory=list)  # add the KL among the true best N tokens (ours); []: no
    budget_weight: float = 1.0  # weight of that term, a mean over `budgets`
    response: str = "answer"  # what the labels of the data cover: answer; question_answer: the question too,
    # which the module then cannot see (query-agnostic); recorded in the artifact

    def __post_init__(self) -> None:
        for key, low in (("n_lookahead", 1), ("lora_rank", 1), ("pool_kernel", 1), ("suffix_window", 0)):
            if getattr(self, key) < low:
                raise ConfigError(f"method.{key}={getattr(self, key)}; allowed: {low} or more")
        if self.pool_kernel % 2 == 0:
            raise ConfigError(f"method.pool_kernel={self.pool_kernel}; allowed: odd numbers")
        for key in ("lora_alpha", "embedding_lr_scale"):
            if not getattr(self, key) > 0:
                raise ConfigError(f"method.{key}={getattr(self, key)}; allowed: above 0")
        for key in ("init_std", "budget_weight"):
            if not getattr(self, key) >= 0:
                raise ConfigError(f"method.{key}={getattr(self, key)}; allowed: 0 or more")
        for key, allowed in (("reduction", ("mean", "max")), ("response", ("answer", "question_answer"))):
            if getattr(self, key) not in allowed:
                raise ConfigError(f"method.{key}={getattr(self, key)}; allowed: {', '.join(allowed)}")
        if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in self.budgets):
            raise ConfigError(f"method.budgets={self.budgets}; allowed: a list of counts of 1 or more")
        self.linears()

    def linears(self) -> tuple[str, ...]:
        """The linears that have LoRA, in the order of `LINEARS`.

        Raises:
            ConfigError: `lora_targets` names something else.
        """
        asked = self.lora_targets
        names = _SETS.get(asked) if isinstance(asked, str) else asked
        if not isinstance(names, list | tuple) or not {str(name) for name in names} <= {*LINEARS}:
            raise ConfigError(
                f"method.lora_targets={asked}; allowed: {', '.join(_SETS)}, or a list of {', '.join(LINEARS)}"
            )
        return tuple(name for name in LINEARS if name in names)

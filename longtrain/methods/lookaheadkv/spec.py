"""What the rest of the toolkit knows of LookaheadKV."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from longtrain.data.config import DataConfig
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.methods.lookaheadkv.adapter import FORMATS
from longtrain.methods.lookaheadkv.config import Config, check_adaptive
from longtrain.methods.lookaheadkv.cost import COST
from longtrain.methods.lookaheadkv.modules import LookaheadKV
from longtrain.methods.lookaheadkv.objective import LookaheadObjective
from longtrain.methods.lookaheadkv.peft_files import peft_files
from longtrain.methods.lookaheadkv.runtime import LookaheadEvictor
from longtrain.methods.spec import MethodSpec, fitted
from longtrain.targets.info import TargetInfo
from longtrain.targets.model import Target

KEYS = ("budget_tokens", "budget_ratio", "adaptive")
IN_KVPRESS = """```python
from longtrain.integrations.lookaheadkv_kvpress import LookaheadKVPress  # or copy the file

with LookaheadKVPress(artifact="ADDRESS", budget=128)(model):
    model.generate(**tokenizer(prompt, return_tensors="pt").to(model.device), max_new_tokens=64)
```"""


def _build(config: Config, info: TargetInfo | None) -> nn.Module:
    """Fresh lookahead tokens and LoRA."""
    if info is None:
        raise TargetMismatchError("lookahead tokens are built for a target; pass target.path")
    return LookaheadKV(config, info)


def _objective(module: nn.Module, target: Target | None, config: Config) -> LookaheadObjective:
    """The objective; soft tokens that were not loaded get the spread of the target's embeddings."""
    if target is None or not isinstance(module, LookaheadKV):
        raise TargetMismatchError(
            "LookaheadKV trains a LookaheadKV module against a target; pass target.path"
        )
    if module.fresh and not config.init_std:
        weight: torch.Tensor = target.model.model.embed_tokens.weight
        norm = torch.linalg.vector_norm(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        module.scale_embeddings(float(norm) / math.sqrt(weight.numel()))
    return LookaheadObjective(module, target, config)


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    """The evictor for an engine, in the target's dtype and on its device (a copy where they differ).

    Raises:
        ConfigError: an unknown key, no budget, or one out of range.
    """
    if not isinstance(module, LookaheadKV):
        raise TargetMismatchError(f"LookaheadKV runs a LookaheadKV module, not {type(module).__name__}")
    given = {key: value for key, value in keys.items() if value is not None}
    if unknown := sorted(set(given) - {*KEYS}):
        raise ConfigError(f"LookaheadKV has no inference key '{unknown[0]}'; known: {', '.join(KEYS)}")
    tokens, ratio = given.get("budget_tokens"), given.get("budget_ratio")
    if tokens is None and ratio is None:
        raise ConfigError(
            "LookaheadKV evicts to a budget and was given none; pass evict.budget_tokens=128 or "
            "evict.budget_ratio=0.1 (in Python: attach(target, budget_tokens=128))"
        )
    adaptive = given.get("adaptive", config.adaptive)
    check_adaptive(adaptive, "evict.adaptive")
    module = fitted(module, target)
    evictor = LookaheadEvictor(module, target, config, Budget(tokens, ratio), adaptive=adaptive)
    return Parts(evictor=evictor, name="lookaheadkv")


def _check_data(config: Config, data: DataConfig) -> None:
    """Check that the data labels the response that the module is to foretell.

    Raises:
        ConfigError: one of the two holds the question and the other does not.
    """
    labelled = "question_answer" if data.question == "response" else "answer"
    if labelled != config.response:
        asked = "response" if config.response == "question_answer" else "prompt"
        raise ConfigError(
            f"data.question={data.question} labels what method.response={labelled} stands for, and method."
            f"response={config.response} is set; pass method.response={labelled} or data.question={asked}"
        )


SPEC = MethodSpec(
    name="lookaheadkv",
    config=Config,
    paper="LookaheadKV: Fast and Accurate KV Cache Eviction by Glimpsing into the Future without Generation, "
    "arXiv 2603.10899",
    build=_build,
    objective=_objective,
    attach=_attach,
    golden_tokens=lambda config: 128 + config.suffix_window,
    inference_keys=KEYS,
    golden_keys={"budget_ratio": 1.0},
    check_data=_check_data,
    files=peft_files,
    formats=FORMATS,
    elsewhere={"kvpress": IN_KVPRESS},
    cost=COST,
)

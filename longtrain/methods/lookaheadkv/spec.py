"""The `MethodSpec` of LookaheadKV: how to build, train and run it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from longtrain.data.config import DataConfig
from longtrain.decoding.roles import Parts
from longtrain.errors import ConfigError
from longtrain.methods.checked import built_for_target, eviction_budget, given_keys, running, trained
from longtrain.methods.lookaheadkv.adapter import FORMATS
from longtrain.methods.lookaheadkv.config import Config
from longtrain.methods.lookaheadkv.cost import COST
from longtrain.methods.lookaheadkv.modules import LookaheadKV
from longtrain.methods.lookaheadkv.objective import LookaheadObjective
from longtrain.methods.lookaheadkv.peft_files import peft_files
from longtrain.methods.lookaheadkv.runtime import LookaheadEvictor
from longtrain.methods.spec import MethodSpec
from longtrain.settings import Adaptive, Kernel, convert
from longtrain.targets.model import Target

KEYS = ("budget_tokens", "budget_ratio", "adaptive", "kernel")
IN_KVPRESS = """```python
from longtrain.integrations.lookaheadkv_kvpress import LookaheadKVPress  # or copy the file

with LookaheadKVPress(artifact="ADDRESS", budget=128)(model):
    model.generate(**tokenizer(prompt, return_tensors="pt").to(model.device), max_new_tokens=64)
```"""


def _objective(module: nn.Module, target: Target | None, config: Config) -> LookaheadObjective:
    """Build the objective; new soft tokens get the standard deviation of the target's embeddings."""
    rows, target = trained(LookaheadKV, module, target)
    if rows.fresh and not config.init_std:
        weight: torch.Tensor = target.model.model.embed_tokens.weight
        norm = torch.linalg.vector_norm(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        rows.scale_embeddings(target.embed_scale * float(norm) / math.sqrt(weight.numel()))
    return LookaheadObjective(rows, target, config)


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    """Return the evictor for an engine."""
    given = given_keys("LookaheadKV", keys, KEYS)
    budget = eviction_budget("LookaheadKV", given)
    adaptive = convert(given.get("adaptive", config.adaptive), Adaptive, "evict.adaptive")
    kernel = convert(given.get("kernel", config.pool_kernel), Kernel, "kernel")
    rows = running(LookaheadKV, module, target)
    evictor = LookaheadEvictor(rows, target, config, budget, adaptive=adaptive, kernel=kernel)
    return Parts(evictor=evictor, name="lookaheadkv")


def _check_data(config: Config, data: DataConfig) -> None:
    """Check that the data's labels match the response that the module learns to predict."""
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
    build=built_for_target(LookaheadKV),
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

"""The `MethodSpec` of KVzap: how to build, train and run it."""

from __future__ import annotations

from typing import Any

from torch import nn

from longtrain.data.config import DataConfig
from longtrain.decoding.roles import Parts
from longtrain.errors import ConfigError
from longtrain.methods.checked import built_for_target, eviction_budget, given_keys, running, trained
from longtrain.methods.kvzap.config import Config
from longtrain.methods.kvzap.cost import COST
from longtrain.methods.kvzap.kvpress_files import kvpress_files
from longtrain.methods.kvzap.labels import usual
from longtrain.methods.kvzap.modules import KVzap
from longtrain.methods.kvzap.objective import KVzapObjective
from longtrain.methods.kvzap.runtime import KVzapEvictor
from longtrain.methods.spec import MethodSpec
from longtrain.settings import Adaptive, CountOrZero, convert
from longtrain.targets.model import Target

KEYS = ("budget_tokens", "budget_ratio", "adaptive", "window", "threshold", "decoding")

IN_KVPRESS = """```python
from kvpress import KVzapPress
from kvpress.presses.kvzap_press import KVzapModel

press = KVzapPress(model_type="mlp")
press.kvzap_model = KVzapModel.from_pretrained("ADDRESS", subfolder="kvpress")
press.post_init_from_model = lambda model: None  # kvpress would look for a published one of the model's name
```"""


def _objective(module: nn.Module, target: Target | None, config: Config) -> KVzapObjective:
    """The objective; a module that was not loaded begins at the target's usual scores."""
    layers, target = trained(KVzap, module, target)
    objective = KVzapObjective(layers, target, config)
    if layers.fresh:
        layers.centre(usual(target, config))
    return objective


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    """The evictor for an engine."""
    given = given_keys("KVzap", keys, KEYS)
    evictor = KVzapEvictor(
        running(KVzap, module, target),
        config,
        eviction_budget("KVzap", given),
        adaptive=convert(given.get("adaptive", "layers"), Adaptive, "evict.adaptive"),
        window=convert(given.get("window"), CountOrZero | None, "evict.window"),
        threshold=convert(given.get("threshold"), float | None, "evict.threshold"),
        decoding=convert(given.get("decoding", False), bool, "evict.decoding"),
    )
    return Parts(evictor=evictor, name="kvzap")


def _check_data(config: Config, data: DataConfig) -> None:
    """Refuse to have answers written that nobody reads."""
    if data.asks_target:
        raise ConfigError(
            "data.answers=target has the target write answers, and kvzap learns from the prompts alone; pass "
            "data.answers=source"
        )


SPEC = MethodSpec(
    name="kvzap",
    config=Config,
    paper="KVzap: Fast, Adaptive, and Faithful KV Cache Pruning, arXiv 2601.07891",
    build=built_for_target(KVzap),
    objective=_objective,
    attach=_attach,
    golden_tokens=lambda config: max(128, config.window),
    inference_keys=KEYS,
    golden_keys={"budget_ratio": 1.0},
    check_data=_check_data,
    files=kvpress_files,
    elsewhere={"kvpress": IN_KVPRESS},
    cost=COST,
)

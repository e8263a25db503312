"""What the rest of the toolkit knows of KVzap."""

from __future__ import annotations

from typing import Any

from torch import nn

from longtrain.data.config import DataConfig
from longtrain.decoding.evict import Budget
from longtrain.decoding.roles import Parts
from longtrain.errors import ConfigError, TargetMismatchError
from longtrain.methods.kvzap.config import Config
from longtrain.methods.kvzap.cost import COST
from longtrain.methods.kvzap.kvpress_files import kvpress_files
from longtrain.methods.kvzap.labels import usual
from longtrain.methods.kvzap.modules import KVzap
from longtrain.methods.kvzap.objective import KVzapObjective
from longtrain.methods.kvzap.runtime import ADAPTIVE, KVzapEvictor
from longtrain.methods.spec import MethodSpec, fitted
from longtrain.settings import CountOrZero, convert, wrong
from longtrain.targets.info import TargetInfo
from longtrain.targets.model import Target

KEYS = ("budget_tokens", "budget_ratio", "adaptive", "window", "threshold", "decoding")

IN_KVPRESS = """```python
from kvpress import KVzapPress
from kvpress.presses.kvzap_press import KVzapModel

press = KVzapPress(model_type="mlp")
press.kvzap_model = KVzapModel.from_pretrained("ADDRESS", subfolder="kvpress")
press.post_init_from_model = lambda model: None  # kvpress would look for a published one of the model's name
```"""


def _build(config: Config, info: TargetInfo | None) -> nn.Module:
    """A fresh module."""
    if info is None:
        raise TargetMismatchError("KVzap's layers are built for a target; pass target.path")
    return KVzap(config, info)


def _objective(module: nn.Module, target: Target | None, config: Config) -> KVzapObjective:
    """The objective; a module that was not loaded begins at the target's usual scores."""
    if target is None or not isinstance(module, KVzap):
        raise TargetMismatchError("KVzap trains a KVzap module against a target; pass target.path")
    objective = KVzapObjective(module, target, config)
    if module.fresh:
        module.centre(usual(target, config))
    return objective


def _attach(module: nn.Module, target: Target, config: Config, keys: dict[str, Any]) -> Parts:
    """The evictor for an engine, in the target's dtype and on its device (a copy where they differ).

    Raises:
        ConfigError: an unknown key, no budget, or a value out of range.
    """
    if not isinstance(module, KVzap):
        raise TargetMismatchError(f"KVzap runs a KVzap module, not {type(module).__name__}")
    given = {key: value for key, value in keys.items() if value is not None}
    if unknown := sorted(set(given) - {*KEYS}):
        raise ConfigError(f"KVzap has no inference key '{unknown[0]}'; known: {', '.join(KEYS)}")
    tokens, ratio = given.get("budget_tokens"), given.get("budget_ratio")
    threshold = convert(given.get("threshold"), float | None, "evict.threshold")
    if tokens is None and ratio is None:
        raise ConfigError(
            "KVzap evicts to a budget and was given none; pass evict.budget_tokens=128 or "
            "evict.budget_ratio=0.1 (in Python: attach(target, budget_tokens=128))"
        )
    adaptive = given.get("adaptive", "layers")
    if adaptive not in ADAPTIVE or (adaptive == 0 and adaptive is not False):
        raise wrong("evict.adaptive", adaptive, ", ".join(str(way).lower() for way in ADAPTIVE))
    module = fitted(module, target)
    evictor = KVzapEvictor(
        module,
        config,
        Budget(tokens, ratio),
        adaptive=adaptive,
        window=convert(given.get("window"), CountOrZero | None, "evict.window"),
        threshold=threshold,
        decoding=convert(given.get("decoding", False), bool, "evict.decoding"),
    )
    return Parts(evictor=evictor, name="kvzap")


def _check_data(config: Config, data: DataConfig) -> None:
    """Refuse to have answers written that nobody reads.

    Raises:
        ConfigError: the data has the target write them.
    """
    if data.asks_target:
        raise ConfigError(
            "data.answers=target has the target write answers, and kvzap learns from the prompts alone; pass "
            "data.answers=source"
        )


SPEC = MethodSpec(
    name="kvzap",
    config=Config,
    paper="KVzap: Fast, Adaptive, and Faithful KV Cache Pruning, arXiv 2601.07891",
    build=_build,
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

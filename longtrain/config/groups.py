"""Typed configuration groups that belong to no other module: target, method, decode, evict and suite.

The other groups are defined where they are used: `data.config`, `training.optim`, `training.settings` and
`features.settings`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from longtrain import methods
from longtrain.errors import ConfigError
from longtrain.methods.prompt_lookup.config import Lookup
from longtrain.settings import (
    AUTO,
    Adaptive,
    Count,
    CountOrZero,
    NotNegative,
    OneOrMore,
    Tokens,
    Words,
    convert,
    fulfils,
    made_by,
    one_of,
    read,
)

if TYPE_CHECKING:
    from longtrain.decoding.control import ShapeChoice
    from longtrain.decoding.roles import ChildChoice, TreeShape
    from longtrain.decoding.sampling import Sampling
    from longtrain.methods.spec import MethodSpec

NO_TARGET = (
    "no target model is chosen (target.path=null); pass target=NAME or target.path=FOLDER; "
    "longtrain train --help lists the names"
)
AsTyped = Annotated[Any, made_by(lambda value: None if value is None else str(value))]
"""The field's value as text (a typed number is converted), or None."""
Device = Annotated[
    str, fulfils(re.compile(r"auto|cpu|cuda(:\d+)?").fullmatch), Words("auto, cpu, cuda, cuda:0, ...")
]
Widths = tuple[Count, ...]


@dataclass(frozen=True)
class TargetConfig:
    """The group `target`: which frozen model, and how it is loaded (`conf/target/local.yaml`).

    `shape` stays as it was typed; `jobs.planning.target_shape` reads it if there is no config.json.
    """

    path: AsTyped = None
    dtype: one_of([AUTO, "float64", "float32", "bfloat16", "float16"]) = AUTO  # type: ignore[valid-type]
    device: Device = AUTO
    weights: Literal["stored", "random"] = "stored"
    shard: Literal["fsdp2"] | None = None
    fused: Literal["auto", True, False] = "auto"
    max_positions: Count | None = None
    chat_template: str | None = None
    shape: Any = None

    def required_path(self, otherwise: str | None = None) -> str:
        """Return the model's folder, file or Hub id.

        Args:
            otherwise: the path to return if `target.path` is not set.

        Raises:
            ConfigError: neither names a model.
        """
        where = self.path or otherwise
        if not where:
            raise ConfigError(NO_TARGET)
        return str(where)

    @property
    def overrides(self) -> dict[str, Any]:
        """The keys of `target` that override values of the model's own config files."""
        return {"max_positions": self.max_positions, "chat_template": self.chat_template}

    def device_here(self) -> str:
        """The torch device name, with `auto` resolved to CUDA if available, else the CPU."""
        import torch

        if self.device != AUTO:
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class ArtifactSource:
    """Where every job finds the artifacts that are named, and which of them it accepts.

    Args:
        home: the folder that holds `checkpoints`.
        trained_by: the trainer (tool) that wrote a draft in another tool's format.
        unverified: True if artifacts that fail verification are used all the same.
    """

    home: Path
    trained_by: str | None = None
    unverified: bool = False


@dataclass(frozen=True)
class MethodChoice:
    """The group `method`: the name of a method and its keys.

    Args:
        name: of the method.
        values: its keys as typed, `name` among them.
    """

    name: str
    values: Mapping[str, Any]

    @cached_property
    def settings(self) -> Any:
        """The keys as the method's own config dataclass (`longtrain/methods/NAME/config.py`).

        Raises:
            ConfigError: there is no such method or key, or a value is not allowed.
        """
        return read(methods.config_class(self.name), self.values, "method", ignore=("name",))

    @cached_property
    def spec(self) -> MethodSpec:
        """The method's `MethodSpec`; accessing it imports torch."""
        return methods.get(self.name)


@dataclass(frozen=True)
class DecodeConfig:
    """The group `decode`: the shape of the drafted tree, look-up beside it, and how tokens are sampled."""

    shape: Literal["auto"] | Widths = (1, 1, 1, 1)
    keep: Count | None = None
    menu: tuple[Widths, ...] | None = None
    children: Literal["auto", "point", "iid", "no_replace"] = "auto"
    lookup: Lookup | None = None
    temperature: NotNegative = 0.0
    top_p: float = 1.0
    top_k: CountOrZero = 0
    max_new_tokens: Tokens = 128

    def one_shape(self, widths: Sequence[int] | None = None) -> TreeShape:
        """The single tree shape that every cycle drafts; `children=auto` is resolved by
        `decoding.roles.usual_children`.

        Args:
            widths: nodes at each depth, instead of `shape`.

        Raises:
            ConfigError: `shape=auto`, which chooses among several.
        """
        from longtrain.decoding.roles import TreeShape, usual_children

        chosen = self.shape if widths is None else _widths(widths)
        if isinstance(chosen, str):
            raise ConfigError(
                "decode.shape=auto chooses a shape for each cycle, and this job wants one for all; pass "
                "widths, e.g. decode.shape=[1,1,1,1]; in eval a system may choose: "
                "suite.systems=[{artifact: NAME, drafted: auto}]"
            )
        children = self._children() or usual_children(chosen, sampled=self.temperature > 0)
        return TreeShape(chosen, children, None if set(chosen) <= {1} else self.keep)

    def drafting(self) -> TreeShape | ShapeChoice:
        """The tree shape, or with `shape=auto` the choice between several shapes.

        Raises:
            ConfigError: `menu` without `shape=auto`, or `keep` with it.
        """
        from longtrain.decoding.control import ShapeChoice

        if not isinstance(self.shape, str):
            if self.menu is not None:
                menu = [list(one) for one in self.menu]
                raise ConfigError(
                    f"decode.menu={menu} and decode.shape={list(self.shape)}; a menu is for "
                    "decode.shape=auto, leave one out"
                )
            return self.one_shape()
        if self.keep is not None:
            raise ConfigError(
                f"decode.keep={self.keep} and decode.shape=auto; it goes with widths, leave it out"
            )
        return ShapeChoice(self.menu or (), self._children())

    def sampling(self, seed: int) -> Sampling:
        """The sampling settings of a run with this seed.

        Raises:
            ConfigError: a value is out of its range.
        """
        from longtrain.decoding.sampling import Sampling

        return Sampling(self.temperature, self.top_p, self.top_k, seed)

    def _children(self) -> ChildChoice | None:
        """The `ChildChoice` that selects the children of tree nodes, or None for the method's default."""
        from longtrain.decoding.roles import ChildChoice

        return None if self.children == AUTO else ChildChoice(self.children)


@dataclass(frozen=True)
class EvictConfig:
    """The group `evict`: an eviction policy with its options, or the options of an eviction artifact."""

    policy: AsTyped = None
    budget_tokens: int | None = None
    budget_ratio: float | None = None
    adaptive: Adaptive | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> EvictConfig:
        """Read the group; keys that are not common to all policies are options.

        Raises:
            ConfigError: a value is not allowed.
        """
        own = {one.name for one in fields(cls)} - {"options"}
        common = {key: value for key, value in values.items() if key in own}
        options = {key: value for key, value in values.items() if key not in own}
        return replace(read(cls, common, "evict"), options=options)


@dataclass(frozen=True)
class SuiteConfig:
    """The group `suite` of `eval` and `bench`.

    Args:
        name: of the suite.
        values: all keys of the group as typed; each suite parses those of its own.
    """

    name: str
    values: Mapping[str, Any]

    @property
    def systems(self) -> Any:
        """The value of `suite.systems` as typed; `suite.policies` is an alias of it."""
        return self.values["policies"] if "policies" in self.values else self.values["systems"]

    @cached_property
    def harness(self) -> HarnessKeys:
        """The keys of the evaluation harness that every suite of `eval` has.

        Raises:
            ConfigError: a value is not allowed.
        """
        return read(HarnessKeys, self.values, "suite", ignore=self.values)


@dataclass(frozen=True)
class HarnessKeys:
    """The keys of `suite` that configure the evaluation harness, the same for every suite of `eval`.

    Args:
        batch: examples decoded together.
        bootstrap: resamples of examples behind the 95% intervals.
        check_baseline: require that the full cache's score equals the recorded one.
        record: write the full cache's score to the recorded scores.
        budgets: KV entries that evicting systems keep, or shares of the prompt.
        shapes: widths of the trees that drafts are measured with; none: `decode.shape`.
        speed_prompts: prompts of each task, or length, that are timed.
        speed_batch: prompts timed together: a number, or several to be timed in turn.
        speed_tokens: tokens of a timed answer, whatever ends it; None: answers as long as the suite's.
    """

    batch: Count
    bootstrap: Count
    check_baseline: bool = True
    record: bool = False
    budgets: Any = None
    shapes: tuple[tuple[Count, ...], ...] | None = None
    speed_prompts: CountOrZero = 0
    speed_batch: OneOrMore = (1,)
    speed_tokens: Count | None = None


def _widths(typed: Sequence[int]) -> tuple[int, ...]:
    """Check and return the number of nodes at each depth of a drafted tree."""
    found: tuple[int, ...] = convert(list(typed), Widths, "decode.shape")
    return found

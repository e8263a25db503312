"""What one evaluation measures, as the configuration asks for it, and the session that measures it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtrain.config import ArtifactSource, DecodeConfig, MethodChoice, SuiteConfig, TargetConfig
from longtrain.errors import ConfigError
from longtrain.jobs.setup import load_artifact, load_target
from longtrain.settings import wrong

if TYPE_CHECKING:
    from longtrain.artifact import Artifact
    from longtrain.decoding.evict import Budget
    from longtrain.decoding.roles import TreeShape
    from longtrain.evaluation.harness.session import Session
    from longtrain.evaluation.suite import Suite
    from longtrain.systems import Entry


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation measures.

    It holds plain values alone: a part in another process gets a pickled copy, and reading it imports no
    torch.

    Args:
        suite: the suite's name and keys, `suite.systems` among them.
        named: entries, as in `suite.systems`, of the systems that the command names outside the suite
            (`named_systems`).
        select: keys of `select` that are set, for the systems of `named` that have a selector.
        target: the group `target`; without a path, the target of the first artifact is loaded.
        decode: the group `decode`.
        seed: of prompts, sampling and resamples.
        source: where artifacts are found.
        run_dir: the run's folder.
    """

    suite: SuiteConfig
    named: Sequence[Mapping[str, Any]]
    select: Mapping[str, Any]
    target: TargetConfig
    decode: DecodeConfig
    seed: int
    source: ArtifactSource
    run_dir: Path

    @property
    def folder(self) -> Path:
        """The folder of the suite's files."""
        return self.run_dir / "eval" / self.suite.name

    def load(self) -> tuple[Session, list[Artifact]]:
        """Load and check target, suite and systems.

        Returns:
            The session, and all artifacts that its systems name.

        Raises:
            ConfigError: a setting is wrong.
            ArtifactError: an artifact does not exist, or is damaged.
        """
        from longtrain.evaluation.harness.session import Session
        from longtrain.evaluation.suites import SUITES
        from longtrain.systems import Builder

        asked, sampling = self.suite.harness, self.decode.sampling(self.seed)
        entries, artifacts = self._entries()
        first = next(iter(artifacts.values()), None)
        path = None if first is None else first.target.name
        target = load_target(self.target, seed=self.seed, path=path)
        module = importlib.import_module(SUITES[self.suite.name])
        suite: Suite = module.build(self.suite.values, target, seed=self.seed, sampling=sampling)
        builder = Builder(
            target,
            budgets_of(asked.budgets),
            shapes_of(self.decode, asked.shapes),
            artifacts.__getitem__,
            greedy=sampling.greedy and not any(own_temperatures(suite)),
            shape_of=self.decode.one_shape,
            lookup=self.decode.lookup or "off",
        )
        systems = builder.systems(
            entries, roles=suite.needs, taker=f"suite {suite.name}", own=suite.own_systems
        )
        session = Session(
            target=target,
            suite=suite.meet(suite, systems) if suite.meet else suite,
            systems=systems if suite.full_cache else systems[1:],
            sampling=sampling,
            folder=self.folder,
            home=self.source.home,
            batch=asked.batch,
            resamples=asked.bootstrap,
            check=asked.check_baseline,
            record=asked.record,
        )
        return session, [*artifacts.values()]

    def _entries(self) -> tuple[list[Entry], dict[str, Artifact]]:
        """The entries of `suite.systems` after those of `named`, and all artifacts that they name."""
        from longtrain.systems.system import check_methods, parse_all

        named, listed = parse_all(self.named), parse_all(self.suite.systems or [])
        check_methods(listed)
        wanted = dict.fromkeys(name for entry in [*named, *listed] for name in entry.artifacts)
        artifacts = {name: load_artifact(name, self.source) for name in wanted}
        if self.select:
            named = _choosing(named, self.select, artifacts)
        return [*named, *(entry for entry in listed if entry not in named)], artifacts


def named_systems(artifacts: Sequence[str], method: MethodChoice | None) -> list[dict[str, Any]]:
    """Entries, as in `suite.systems`, for what `artifact=` names; without any, for an untrained `method=`.

    Raises:
        ConfigError: there is no such method.
    """
    if not artifacts and method is not None and method.spec.objective is None:
        return [{"method": dict(method.values)}]
    return [{"artifact": name} for name in artifacts]


def _choosing(
    entries: Sequence[Entry], chosen: Mapping[str, Any], artifacts: Mapping[str, Artifact]
) -> list[Entry]:
    """Apply the keys of `select` to the entries with a selector."""
    from longtrain import methods

    def chooses(entry: Entry) -> bool:
        name = entry.method.name if entry.method else artifacts[entry.artifacts[0]].method
        return "every" in methods.get(name).inference_keys

    if not any(map(chooses, entries)):
        key, value = next(iter(chosen.items()))
        raise ConfigError(
            f"select.{key}={value} and neither artifact= nor method= selects entries; systems in "
            f"suite.systems have it as a key: {{artifact: NAME, {key}: {value}}}"
        )
    return [
        replace(entry, options={**entry.options, **chosen}) if chooses(entry) else entry for entry in entries
    ]


def own_temperatures(suite: Suite) -> Iterator[float]:
    """The temperatures that tasks set for their answers."""
    from longtrain.evaluation.task import Task

    for task in suite.tasks:
        if isinstance(task, Task):
            yield task.temperature or 0.0


def budgets_of(values: Any) -> tuple[Budget, ...]:
    """Parse budgets: whole numbers are tokens, numbers below 1 are shares of the prompt.

    May be empty if no system evicts.

    Raises:
        ConfigError: a value is neither, or the list mixes both.
    """
    from longtrain.decoding.evict import Budget

    if not values:
        return ()
    if isinstance(values, list):
        kinds = {type(value) for value in values}
        if kinds == {int} and min(values) >= 1:
            return tuple(Budget(tokens=value) for value in sorted(set(values)))
        if kinds == {float} and all(0 < value <= 1 for value in values):
            return tuple(Budget(ratio=value) for value in sorted(set(values)))
        if kinds == {int, float}:
            whole, shares = ([v for v in values if type(v) is kind] for kind in (int, float))
            rule = "tokens or shares of the prompt, not both in one run; pass "
            remedy = f"suite.budgets={whole}, then suite.budgets={shares} with another name="
            raise wrong("suite.budgets", values, rule + remedy)
    rows = "tokens of 1 or more ([64,128]) or shares of the prompt ([0.1,0.2])"
    raise wrong("suite.budgets", values, rows)


def shapes_of(decode: DecodeConfig, asked: Sequence[Sequence[int]] | None) -> list[TreeShape]:
    """The shapes of the drafted tree to measure; empty if `decode.shape` is empty.

    Args:
        decode: the group `decode`.
        asked: widths of each shape; empty: the shape of `decode`.

    Raises:
        ConfigError: a shape drafts nothing.
    """
    if asked and not all(asked):
        shown = [list(one) for one in asked]
        raise wrong("suite.shapes", shown, "lists of widths, e.g. [1,1,1,1] or [4,8,8]")
    shapes = [decode.one_shape(widths) for widths in asked] if asked else [decode.one_shape()]
    return [shape for shape in shapes if shape.widths]

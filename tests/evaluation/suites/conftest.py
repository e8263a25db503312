"""The bundled target, settings as the configuration has them, and runs of a suite with the full cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from longtrain.assets import asset_dir
from longtrain.decoding.sampling import Sampling
from longtrain.evaluation.harness.plan import plan
from longtrain.evaluation.harness.run import Runner
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import Suite
from longtrain.systems import System
from longtrain.systems.system import FULL
from longtrain.targets.loading import load_target


@pytest.fixture(scope="session")
def tiny():
    """The target that ships with longtrain."""
    return load_target(asset_dir("bundled") / "tiny", dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def settings_of() -> Callable[..., dict[str, Any]]:
    """`settings_of(name, key=value)`: what conf/suite/NAME.yaml says, with other values."""

    def make(name: str, **changed: Any) -> dict[str, Any]:
        found = yaml.safe_load((asset_dir("conf") / "suite" / f"{name}.yaml").read_text())["suite"]
        assert set(changed) <= set(found), "a key that the configuration does not have"
        return {**found, **changed}

    return make


@pytest.fixture(scope="session")
def run_suite() -> Callable[..., dict[str, list[Record]]]:
    """`run_suite(suite, target, batch=2)`: the records of the full cache, by task."""

    def run(suite: Suite, target: Any, *, batch: int = 2) -> dict[str, list[Record]]:
        full, runner = System("full", FULL, "full"), Runner(target, Sampling())
        records: dict[str, list[Record]] = {task.name: [] for task in suite.tasks}
        for unit in plan(suite, batch=batch):
            found = runner.unit(full, unit)["records"]
            records[unit.task.name] += [Record.from_json(values) for values in found]
        return records

    return run


@pytest.fixture(scope="session")
def answered() -> Callable[..., dict[str, list[Record]]]:
    """`answered(suite, answer)`: records as if `answer(task, example)` had been generated."""

    def records(suite: Suite, answer: Callable[..., str]) -> dict[str, list[Record]]:
        return {
            task.name: [
                Record(
                    "full",
                    task.name,
                    one.id,
                    task.facets(one),
                    score=task.score(answer(task, one), one),
                )
                for one in task.examples()
            ]
            for task in suite.tasks
        }

    return records

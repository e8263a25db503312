"""The bundled target, settings as the configuration has them, and runs of a suite with the full cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from longtrain.assets import asset_dir
from longtrain.decoding.sampling import Sampling
from longtrain.evaluation.harness.plan import plan
from longtrain.evaluation.harness.run import Runner
from longtrain.evaluation.records import Record
from longtrain.evaluation.suite import Suite
from longtrain.systems import System
from longtrain.systems.system import FULL
from longtrain.targets.loading import load_target
from tests.helpers import HEADS_OF_64


@pytest.fixture(scope="session")
def bundled():
    """The target that ships with longtrain."""
    return load_target(asset_dir("bundled") / "tiny", dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A micro target with that one's tokenizer and template, for what its weights do not matter to."""
    folder, bundled = tmp_path_factory.mktemp("tiny"), asset_dir("bundled") / "tiny"
    torch.manual_seed(0)
    own = json.loads((bundled / "config.json").read_text())
    shape = {name: own[name] for name in ("vocab_size", "max_position_embeddings", "eos_token_id")}
    config = AutoConfig.for_model(**{**HEADS_OF_64, **shape})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / name, folder)
    return load_target(folder, device="cpu")


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

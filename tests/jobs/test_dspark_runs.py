"""DSpark by the command line's keys: acceptance by position and depth, cuts, and a training step's cost."""

from __future__ import annotations

import json

import pytest
import torch

from longtrain import methods
from longtrain.artifact import Artifact
from longtrain.errors import ConfigError
from longtrain.jobs import bench
from longtrain.jobs import eval as evaluation
from longtrain.methods.dspark.config import Config
from longtrain.methods.dspark.mask_token import choose_mask_token
from longtrain.targets.loading import load_target

SETTINGS = {
    "layers": [0],
    "n_layers": 2,
    "block_size": 4,
    "windows": [16, None],
    "markov_rank": 8,
    "mask_token": 1,
}
EVAL = (
    "suite=smoke",
    "lengths=[64,128]",
    "suite.prompts=2",
    "suite.max_new_tokens=12",
    "suite.bootstrap=50",
    "suite.shapes=[[1,1,1,1]]",
    "suite.speed_prompts=0",
)


@pytest.fixture
def artifact(tmp_path, target_folder):
    """A draft of random weights whose last layer reads the target's keys."""
    target, config = load_target(target_folder), Config(**SETTINGS, target_kv=True)
    torch.manual_seed(0)
    module = methods.get("dspark").build(config, target.info)
    choose_mask_token(module, target, config)
    Artifact.from_module("dspark", config, module=module, target=target).save(tmp_path / "checkpoints/draft")


def test_acceptance_by_position_and_depth_with_and_without_a_cut(composed, artifact, text, tmp_path):
    """One run compares both; the text is checked to be the target's own, and a cut never accepts more."""
    systems = "suite.systems=[{artifact: draft},{artifact: draft,min_confidence: 0.9,label: cut}]"
    evaluation.run(composed("eval", *EVAL, "artifact=null", f"suite.text={text}", systems))
    found = json.loads((tmp_path / "runs/one/eval/acceptance/results.json").read_text())
    _, whole, cut = found["systems"]
    assert (whole["name"], cut["name"]) == ("draft", "cut")
    for one in (whole, cut):
        assert all(task["exactness"]["different"] == 0 for task in one["tasks"])
        (depths, positions) = (one["acceptance"][key] for key in ("by_depth", "by_position"))
        assert len(depths) <= 4 and depths[0]["depth"] == 1
        assert positions[0]["from"] == 1 and all(row["tau"]["value"] >= 1 for row in positions)
    assert cut["acceptance"]["tau"]["value"] <= whole["acceptance"]["tau"]["value"]
    both = "suite.systems=[{artifact: draft,min_confidence: 0.9,lookup: auto}]"
    says = r"low confidence \(method.min_confidence\).*nothing would be saved; pass min_confidence=0 to join"
    with pytest.raises(ConfigError, match=says):
        evaluation.run(composed("eval", *EVAL, "artifact=null", f"suite.text={text}", both))
    with pytest.raises(ConfigError, match=r"min_confidences"):
        evaluation.run(composed("eval", *EVAL, "artifact=null", systems.replace("fidence:", "fidences:")))


@pytest.mark.parametrize("target_kv", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_command_measures_a_training_step_by_length(target_kv, composed, tmp_path):
    """As on a GPU with lengths=[32k,64k,128k]; memory is not known on a CPU."""
    keys = [f"method.{key}={json.dumps(value)}" for key, value in SETTINGS.items()]
    short = ["lengths=[128,256]", "suite.repeats=1", "suite.warmup=0", "suite.chunk_tokens=64"]
    words = ["suite=draft_memory", "method=dspark", *keys, f"method.target_kv={target_kv}", *short]
    bench.run(composed("bench", *words))
    rows = json.loads((tmp_path / "runs/one/bench/draft_memory.json").read_text())["rows"]
    assert [row["sequence_tokens"] for row in rows] == [128, 256]
    for row in rows:
        assert row["step"]["seconds"]["median"] > row["target"]["seconds"]["median"] > 0
        assert row["percent"]["loss"] > 0 and row["draft"]["tokens_per_s"] > 0
        assert "peak_gib" in row["step"] and (row["inputs"]["k_bytes"] > 0) == target_kv

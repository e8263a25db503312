"""The speculators package reads our rows and a folder of states as we do, loss masks included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_files import write_states
from environments import run
from helpers import token_ids
from safetensors.torch import load_file
from test_speculators import SPECULATORS

from longtrain.assets import asset_dir
from longtrain.features.engine import EngineStates
from longtrain.features.target import in_words, row_key
from longtrain.targets.loading import random_target
from longtrain.targets.shapes import SHAPES
from longtrain.targets.step import OutputRequest

pytestmark = pytest.mark.slow
ASK = OutputRequest("none", hidden=(0, 2, -1))


def test_speculators_reads_rows_and_states_as_we_do(tmp_path):
    keys = {**SHAPES["llama_micro"], "num_hidden_layers": 4, "vocab_size": 256}
    target = random_target(keys, seed=1)
    documents = token_ids(20, 48, 33, vocab=256)
    masks = [[int(at >= len(ids) // 2) for at in range(len(ids))] for ids in documents]
    with (tmp_path / "rows.jsonl").open("w") as file:
        for ids, mask in zip(documents, masks, strict=True):
            file.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
    write_states(tmp_path / "states", target, documents, (1, 3, 4))
    worker = str(Path(__file__).with_name("states_worker.py"))
    named, *places = (str(tmp_path / name) for name in ("rows.jsonl", "states", "data", "result"))
    run(SPECULATORS.python(), worker, named, str(asset_dir("bundled") / "tiny"), *places)
    theirs = load_file(tmp_path / "result")
    ours = EngineStates(tmp_path / "data/hidden_states", target)
    ours.expect(ASK)
    assert len(ours) == 3
    for number in range(3):
        ids_T = theirs[f"{number}.input_ids"]
        at = documents.index(ids_T.tolist())
        found = ours.read(row_key(ids_T, in_words(ASK)), "it")
        together = torch.cat([found["hidden.0"], found["hidden.2"]], -1)
        assert torch.equal(theirs[f"{number}.hidden_states"], together)
        last = target.final_norm(theirs[f"{number}.verifier_last_hidden_states"])
        assert torch.equal(last, found["hidden.-1"])
        assert theirs[f"{number}.loss_mask"].tolist() == masks[at]

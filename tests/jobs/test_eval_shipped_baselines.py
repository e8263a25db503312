"""The full-cache scores that ship are held against runs of today's code, so its protocol must be theirs."""

from __future__ import annotations

import json
import shlex

import pytest

from longtrain.assets import asset_dir
from longtrain.evaluation.harness.recorded import FILE
from longtrain.jobs import eval as eval_job

ENTRIES = json.loads((asset_dir("recipes") / "results" / FILE).read_text())["baselines"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["suite"])
def test_the_command_of_a_shipped_score_has_its_protocol(composed, entry):
    words = shlex.split(entry["source"])[2:]
    (name,) = (word.removeprefix("target=") for word in words if word.startswith("target="))
    session = eval_job.session_of(composed("eval", *words, f"target.path={name}"))
    assert session.protocol.settings == entry["protocol"]
    assert session.baseline is not None and session.baseline["score"] == entry["score"]
